"""Printing and refusals of the commands: one line on standard error, and status 1.

What the command line itself has wrong is the parser's to tell, with 2.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

from vllm_fp4_plugin.engine.vllm_installation import UnusableVllm
from vllm_fp4_plugin.versions import IncompatibleVllm


def output() -> Console:
    """Console of what a command finds; in a file or a pipe, a row stays on its line."""
    return Console(width=None if sys.stdout.isatty() else 200)


def say(message: str) -> None:
    """Print a message about what a command was given."""
    Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def refusals(model: str) -> Iterator[None]:
    """Print what is refused within in one line and exit with status 1; vLLM keeps quiet."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        yield
    except (ValueError, NotImplementedError, OSError, IncompatibleVllm, UnusableVllm) as error:
        raise refusal(_message(error)) from error
    except ImportError as error:
        raise refusal(
            f"{model}: needs a module that cannot be imported here ({error}); install it into the "
            f"environment of {sys.executable}"
        ) from error
    except Exception as error:  # of vLLM, which reads a model's files as if all were well
        raise refusal(
            f"{model}: vLLM cannot build it here ({type(error).__name__}: {error}), must be one "
            "that it serves on this machine; mend its config.json"
        ) from error


def parse_additional_config(given: str) -> Any:
    """Parse the option ``--additional-config``."""
    try:
        return json.loads(given)
    except ValueError as error:
        raise refusal(f"additional-config: is no JSON ({error}); quote it for the shell") from error


def refusal(message: str) -> typer.Exit:
    """Print a refusal in one line; return what ends the command."""
    say(f"error: {' '.join(message.splitlines())}")
    return typer.Exit(1)


def _message(error: Any) -> str:
    """Message of an error; pydantic, with which vLLM builds its config, hides it in a dump."""
    details = error.errors() if hasattr(error, "errors") else ()
    causes = [detail["ctx"]["error"] for detail in details if "error" in detail.get("ctx", {})]
    return "; ".join(map(str, causes)) or str(error)
