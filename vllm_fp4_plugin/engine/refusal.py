"""Refusals of our plugin, repeated as one marked line at the end of standard error.

A worker's refusal stands far up in a server's log, between the tracebacks of two processes, and the
front end fails with an error that names no cause. So an engine's processes write a refusal to a
file that the front end has named, and the front end prints the refusal last.
"""

import atexit
import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any

from vllm_fp4_plugin.options import METHOD

VARIABLE = "NVFP4_TC_REFUSED"  # path of the file, for processes of an engine
MARK = f"{METHOD}: refused: "

# Loggers of the modules that start workers and engines. When an engine starts, vLLM configures
# logging anew, which removes handlers and keeps filters.
_LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
_PACKAGES = ("vllm_fp4_plugin", "nvfp4_kernels")
# Modules of vLLM's commands: only their tracebacks are of no use to the user.
_COMMANDS = ("vllm.entrypoints.cli", "vllm.entrypoints.launchers")


_of_vllm: dict[str, str] = {}


def cause(error: BaseException) -> str:
    """One-line message of the first error of ours in ``error`` and its causes; empty if none."""
    for each in _chain(error):
        if type(each).__module__.partition(".")[0] in _PACKAGES:
            return " ".join(str(each).split())
    return ""


def register() -> None:
    """Make vLLM's loggers in processes of an engine save the first refusal that is logged."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if _leave not in logger.filters:
            logger.addFilter(_leave)


def tell_last(of_vllm: Mapping[str, str] | None = None) -> None:
    """Make this front end print a refusal, its own or its next engine's, as the last line.

    Args:
        of_vllm: lines to print last for errors of vLLM, keyed by a part of the error's message.
    """
    _of_vllm.update(of_vllm or {})
    _remove()
    # Other users may write to this folder: with a name that cannot be guessed, no file exists yet.
    name = f"nvfp4-tc-refused-{os.getpid()}-{secrets.token_hex(8)}"
    os.environ[VARIABLE] = str(Path(tempfile.gettempdir(), name))
    if not isinstance(sys.excepthook, _TellLast):
        sys.excepthook = _TellLast(sys.excepthook)
        atexit.register(_remove)


class _TellLast:
    """Exception hook that prints a refusal last, and hides the traceback of a vLLM command.

    Other exceptions, and all tracebacks at debug level, are left to the previous hook.
    """

    def __init__(self, previous: Any) -> None:
        self._previous = previous

    def __call__(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        message = ""
        if isinstance(error, Exception):
            message = cause(error) or _left() or _explained(error)
        if not message or not _is_command(traceback) or _is_debugging():
            self._previous(kind, error, traceback)
        if message:
            print(f"{MARK}{message}", file=sys.stderr, flush=True)


def _explained(error: Exception) -> str:
    """Line of ``tell_last`` for an error of vLLM; empty if there is none for the error."""
    text = " ".join(str(each) for each in _chain(error))
    return next((line for part, line in _of_vllm.items() if part in text), "")


def _leave(record: logging.LogRecord) -> bool:
    """Filter that passes all records, and saves the first refusal logged with a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    file = os.environ.get(VARIABLE)
    if error is not None and file and (message := cause(error)):
        # Another rank may have been first; the log contains this refusal in any case.
        with suppress(OSError), open(file, "x", encoding="utf-8") as stream:
            stream.write(message)
    return True


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, each followed by the errors that pydantic collected inside."""
    while error is not None:
        yield error
        # pydantic, with which vLLM builds its config, keeps errors in a list.
        details = error.errors() if hasattr(error, "errors") else ()
        yield from (d["ctx"]["error"] for d in details if "error" in d.get("ctx", {}))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _left() -> str:
    file = os.environ.get(VARIABLE)
    try:
        return Path(file).read_text(encoding="utf-8") if file else ""
    except OSError:
        return ""


def _remove() -> None:
    name = os.environ.get(VARIABLE, "")
    # Only a file of this process: a child may have inherited the variable.
    if f"nvfp4-tc-refused-{os.getpid()}-" in name:
        Path(name).unlink(missing_ok=True)


def _is_command(traceback: TracebackType | None) -> bool:
    names = (frame.f_globals.get("__name__", "") for frame, _ in walk_tb(traceback))
    return any(name.startswith(_COMMANDS) for name in names)


def _is_debugging() -> bool:
    return logging.getLogger("vllm").isEnabledFor(logging.DEBUG)
