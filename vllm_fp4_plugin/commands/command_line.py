"""Refusals of the commands that read a model; re-exports output functions of both packages."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nvfp4_kernels.tool.console import nothing_printed, output, print_json, refusal, say
from vllm_fp4_plugin.engine.vllm_installation import UnusableVllm
from vllm_fp4_plugin.versions import IncompatibleVllm

__all__ = [
    "message",
    "nothing_printed",
    "output",
    "parse_additional_config",
    "print_json",
    "refusal",
    "refusals",
    "say",
]


@contextmanager
def refusals(model: str) -> Iterator[None]:
    """Context that prints an error about ``model`` as one line and exits with status 1.

    A vLLM imported from then on logs only errors, unless VLLM_LOGGING_LEVEL says otherwise.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        yield
    except (ValueError, NotImplementedError, OSError, IncompatibleVllm, UnusableVllm) as error:
        raise refusal(message(error)) from error
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


def parse_additional_config(requested: str) -> Any:
    """Parse the JSON of the option ``--additional-config``; refuse invalid JSON."""
    try:
        return json.loads(requested)
    except ValueError as error:
        raise refusal(f"additional-config: is no JSON ({error}); quote it for the shell") from error


def message(error: Any) -> str:
    """Message of an error, or of the errors of vLLM's config that a pydantic error collects."""
    details = error.errors() if hasattr(error, "errors") else ()
    causes = [detail["ctx"]["error"] for detail in details if "error" in detail.get("ctx", {})]
    return "; ".join(map(str, causes)) or str(error)
