"""Refusals that are found: one marked line, the last on standard error, whichever process refused.

What a worker refuses stands far up in the log of a server, between the tracebacks of two processes,
and the front end ends with an error that names no cause. So processes of an engine leave a refusal
in a file of the front end's, which tells it in the end.
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

# Of what starts workers and engines. When an engine starts, vLLM configures logging anew, which
# takes handlers away and leaves filters.
_LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
_PACKAGES = ("vllm_fp4_plugin", "nvfp4_kernels")
# Modules of vLLM's commands: only theirs are tracebacks that nobody asked for.
_COMMANDS = ("vllm.entrypoints.cli", "vllm.entrypoints.launchers")


_of_vllm: dict[str, str] = {}


def cause(error: BaseException) -> str:
    """Message of the refusal of ours that an error is, or came of, in one line; empty if none."""
    for each in _chain(error):
        if type(each).__module__.partition(".")[0] in _PACKAGES:
            return " ".join(str(each).split())
    return ""


def register() -> None:
    """Have this process leave behind what it refuses, if it is a process of an engine."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if _leave not in logger.filters:
            logger.addFilter(_leave)


def tell_last(of_vllm: Mapping[str, str] | None = None) -> None:
    """Have this process, a front end, end with its refusal or that of an engine it starts next.

    Args:
        of_vllm: lines to end with for errors of vLLM's, by a part of their messages.
    """
    _of_vllm.update(of_vllm or {})
    _remove()
    # Other users may write to this folder: a name that none of them can guess has no file yet.
    name = f"nvfp4-tc-refused-{os.getpid()}-{secrets.token_hex(8)}"
    os.environ[VARIABLE] = str(Path(tempfile.gettempdir(), name))
    if not isinstance(sys.excepthook, _TellLast):
        sys.excepthook = _TellLast(sys.excepthook)
        atexit.register(_remove)


class _TellLast:
    """Hook for what ends a program: the traceback as ever, but of vLLM's commands; a last line."""

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
    """Line for an error of vLLM's whose message is known to say too little; empty if none."""
    said = " ".join(str(each) for each in _chain(error))
    return next((line for part, line in _of_vllm.items() if part in said), "")


def _leave(record: logging.LogRecord) -> bool:
    """Leave the first refusal that vLLM logs with its traceback; a filter that all pass."""
    error = record.exc_info[1] if record.exc_info else None
    file = os.environ.get(VARIABLE)
    if error is not None and file and (message := cause(error)):
        # Another rank may have been first; the log has what this one refuses in any case.
        with suppress(OSError), open(file, "x", encoding="utf-8") as stream:
            stream.write(message)
    return True


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what pydantic made it of, and what it was raised from."""
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
