"""``python -m vllm_fp4_plugin doctor``: what is installed, and which commands work with it."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

from nvfp4_kernels.devices import FAMILIES, GPUS, device_arch
from nvfp4_kernels.runtime.compile import UnusableCache, cache_folder, check_folder
from nvfp4_kernels.tool.toolchain import NoCompiler, check_compiler
from vllm_fp4_plugin import versions
from vllm_fp4_plugin.commands import command_line, tried
from vllm_fp4_plugin.engine import vllm_installation

_ENTRY_POINTS = ("vllm.general_plugins", "vllm.platform_plugins")
_NAME = "nvfp4_tc"
_FILTER = "VLLM_PLUGINS"  # vLLM's variable: comma-separated names of the plugins that it loads


@dataclass(frozen=True)
class Finding:
    """Result of looking at one thing.

    Attributes:
        about: what was looked at.
        said: what was found; with a remedy where something is wrong.
        is_well: whether nothing is wrong.
    """

    about: str
    said: str
    is_well: bool = True


def doctor() -> None:
    """Print what is installed, whether it was tried together, and what works here.

    The exit status is 1 where ``vllm serve`` would not start.
    """
    found = list(findings())
    table = Table(show_header=False)
    for each in found:
        table.add_row(each.about, "ok" if each.is_well else "[red]no[/red]", escape(each.said))
    command_line.output().print(table)
    if not all(each.is_well for each in found):
        raise typer.Exit(1)


def findings() -> Iterator[Finding]:
    """Look at versions, vLLM, its device, the plugin's entry points and what compiles kernels."""
    yield Finding("versions", "; ".join(versions.lines()))
    yield Finding("tried", tried.verdict(tried.here()))
    yield _vllm()
    yield _loaded()
    yield _compiler()
    yield _cache()


def _vllm() -> Finding:
    """Look for a vLLM that imports and finds a device of ours."""
    try:
        vllm_installation.check()
    except ImportError as error:
        return Finding("serve", str(error), is_well=False)
    from vllm_fp4_plugin.device import current_device

    arch = device_arch(current_device())
    if arch != "cpu" and arch not in FAMILIES:
        gpus = ", ".join(f"{each} ({GPUS[each]})" for each in FAMILIES)
        return Finding("serve", f"{arch} has no kernels of ours, only {gpus} have", is_well=False)
    return Finding("serve", f"on {arch}, with everything else")


def _loaded() -> Finding:
    """Look whether vLLM would load the plugin."""
    for group in _ENTRY_POINTS:
        if _NAME not in {each.name for each in entry_points(group=group)}:
            said = f"no entry point {_NAME} in {group}; install the plugin with pip"
            return Finding("plugin", said, is_well=False)
    named = os.environ.get(_FILTER)
    if named is not None and _NAME not in named.split(","):
        said = f"{_FILTER} is {named!r}, must name {_NAME}, or vLLM does not load it; add it"
        return Finding("plugin", said, is_well=False)
    return Finding("plugin", "vLLM loads it")


def _compiler() -> Finding:
    """Look for what compiles kernels, which no CPU needs to serve."""
    try:
        check_compiler()
    except NoCompiler as error:
        return Finding("build", f"{error}; needed on GPUs and by build", is_well=_is_cpu())
    return Finding("build", "CuTe DSL compiles kernels")


def _cache() -> Finding:
    """Look whether the folder of compiled kernels is safe."""
    folder = cache_folder()
    if folder is None:
        return Finding("kernels", "none are kept: NVFP4_KERNELS_CACHE is empty")
    if not folder.exists():
        return Finding("kernels", f"kept in {folder}, which is not made yet")
    try:
        check_folder("NVFP4_KERNELS_CACHE", folder)
    except UnusableCache as error:
        return Finding("kernels", str(error), is_well=False)
    return Finding("kernels", f"{_count(folder)} kept in {folder}")


def _is_cpu() -> bool:
    return versions.vllm_version().endswith("+cpu")


def _count(folder: Path) -> int:
    return sum(1 for _ in folder.glob("*.o"))
