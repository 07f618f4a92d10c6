"""Early exit of the examples' commands, and options that several of these commands read.

An early exit is one line on standard error, and an exit status.

Refusals end with status 1; errors of the command line itself are reported by the parser, with
status 2. Like ``examples.paths``, this module imports only the standard library.
"""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

REFUSED, INTERRUPTED = 1, 130


@contextmanager
def refusals(kept: str = "nothing was written") -> Iterator[None]:
    """Context that ends the program with one line on a refusal or Ctrl-C.

    Refusals are errors of the examples, bad values, missing packages, and files that cannot be read
    or written; other exceptions are bugs, which keep their tracebacks.

    Args:
        kept: description, for the message, of the files that an interrupted run leaves.

    Raises:
        SystemExit: with status ``REFUSED`` or ``INTERRUPTED``.
    """
    try:
        yield
    except KeyboardInterrupt:
        print(f"interrupted; {kept}", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        if not _is_refusal(error):
            raise
        print(f"error: {_message(error)}", file=sys.stderr)
        raise SystemExit(REFUSED) from error


def server_words(server_options: str) -> tuple[str, ...]:
    """Split the value of ``--server-options`` into arguments, as a shell does.

    Raises:
        ValueError: a quote is not closed.
    """
    try:
        return tuple(shlex.split(server_options))
    except ValueError as error:
        raise ValueError(
            f"--server-options: is {server_options!r}, must be options as a shell takes them "
            f"({error}); quote them in pairs"
        ) from error


def _message(error: Exception) -> str:
    """Message of an error; if vLLM is missing, Python's message is followed by a remedy."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "vllm":
        return (
            f"vllm: {error}; install the extra `cuda` of vllm-fp4-plugin on a machine with a GPU, "
            "`cpu` on one without"
        )
    return str(error)


def _is_refusal(error: Exception) -> bool:
    if isinstance(error, ImportError | OSError | ValueError):
        return True
    return type(error).__module__.partition(".")[0] == "examples"
