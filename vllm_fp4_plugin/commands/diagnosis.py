"""``nvfp4-tc doctor``: versions and devices of this machine, and whether vLLM could serve here."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from statistics import mode
from typing import Literal, NamedTuple

import torch
import typer
from rich.markup import escape
from rich.table import Table

from nvfp4_kernels.devices import FAMILIES, GPUS, driver_version
from nvfp4_kernels.runtime.compile import UnusableCache, cache_folder, check_folder
from nvfp4_kernels.settings import CACHE_VARIABLE
from nvfp4_kernels.tool.toolchain import NoCompiler, check_compiler
from vllm_fp4_plugin import versions
from vllm_fp4_plugin.commands import command_line, tried
from vllm_fp4_plugin.engine import host_memory, vllm_installation

Verdict = Literal["ok", "wrong", "unknown"]

_COLOURS: dict[Verdict, str] = {"ok": "green", "wrong": "red", "unknown": "yellow"}
_ENTRY_POINTS = ("vllm.general_plugins", "vllm.platform_plugins")
_NAME = "nvfp4_tc"
_FILTER = "VLLM_PLUGINS"  # vLLM's variable: comma-separated names of the plugins that it loads
_NEVER_RUN = "sm_100"  # family whose kernels are compiled and emulated, and have run on no chip
_GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """Finding about one part of the installation or the machine.

    Attributes:
        about: name of the part, e.g. ``"driver"``.
        note: version, state or fault; with a remedy unless the verdict is ``"ok"``.
        verdict: ``"wrong"``: ``vllm serve`` would not start; ``"unknown"``: not tested, may work.
    """

    about: str
    note: str
    verdict: Verdict = "ok"


class Gpu(NamedTuple):
    """GPU that torch finds, with its free and total memory in bytes."""

    name: str
    arch: str
    free: int
    total: int


def diagnose() -> None:
    """Print each finding; end the command with status 1 if one is wrong."""
    found = list(findings())
    table = Table(show_header=False)
    for each in found:
        colour = _COLOURS[each.verdict]
        table.add_row(each.about, f"[{colour}]{each.verdict}[/]", escape(each.note))
    command_line.output().print(table)
    if any(each.verdict == "wrong" for each in found):
        raise typer.Exit(1)


def findings() -> Iterator[Finding]:
    """Yield a finding for each part of the installation and of the machine that serving needs."""
    yield _plugin()
    yield _vllm()
    yield _torch()
    for of_gpus in (_cuda(), _driver(), _gpu(), _cute_dsl()):
        # Without a vLLM nobody knows whether it is to serve on a GPU.
        is_moot = of_gpus.verdict == "wrong" and not versions.vllm_version()
        yield replace(of_gpus, verdict="unknown") if is_moot else of_gpus
    yield _flashinfer()
    yield _cache()
    yield _memory()
    verdict = tried.verdict(tried.here())
    is_tried = "not tried" not in verdict and not verdict.endswith(f": {tried.RESOLVED}")
    yield Finding("tried", verdict, "ok" if is_tried else "unknown")


def gpus() -> list[Gpu]:
    """GPUs that torch finds; none if the driver is missing or too old.

    Raises:
        RuntimeError: a GPU does not answer.
    """
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        major, minor = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        found.append(Gpu(name, f"sm_{major}{minor}", free, total))
    return found


# --- what is installed --------------------------------------------------------------------------


def _plugin() -> Finding:
    """Check whether vLLM would load the plugin."""
    for group in _ENTRY_POINTS:
        if _NAME not in {each.name for each in entry_points(group=group)}:
            note = f"no entry point {_NAME} in {group}; install the plugin with pip"
            return Finding("plugin", note, "wrong")
    named = os.environ.get(_FILTER)
    if named is not None and _NAME not in named.split(","):
        note = f"{_FILTER} is {named!r}, must name {_NAME}, or vLLM does not load it; add it"
        return Finding("plugin", note, "wrong")
    return Finding("plugin", f"{versions.PLUGIN}, vLLM loads it")


def _vllm() -> Finding:
    """Check that vLLM imports, finds a device, and is a release that the plugin is written for."""
    try:
        vllm_installation.check()
    except ImportError as error:
        return Finding("vLLM", str(error), "wrong")
    if versions.vllm_release() not in versions.RELEASES:
        note = f"{versions.vllm_version()}, the plugin is written for {versions.VLLM}"
        return Finding("vLLM", f"{note}; {versions.REMEDY}", "unknown")
    return Finding("vLLM", versions.vllm_version())


def _torch() -> Finding:
    """Check whether this torch was tried with this vLLM."""
    here = tried.here()
    with_vllm = [each.torch for each in tried.COMBINATIONS if each.vllm == here.vllm]
    if here.torch in with_vllm or not with_vllm:
        return Finding("torch", torch.__version__)
    remedy = f"with vllm {here.vllm} tried: {', '.join(with_vllm)}; install the one vllm asks for"
    return Finding("torch", f"{torch.__version__}; {remedy}", "unknown")


def _cuda() -> Finding:
    """Check whether torch is built for GPUs if vLLM is, and for a CUDA version that was tried."""
    built = torch.version.cuda
    if _is_cpu():
        note = "none: torch and vLLM are built for CPUs"
        return Finding("CUDA", note if built is None else f"{built}, not used by vLLM's CPU build")
    if built is None:
        note = f"torch {torch.__version__} is built for CPUs, must be for GPUs as vLLM is"
        remedy = "install the extra `cuda` of vllm-fp4-plugin into a new environment"
        return Finding("CUDA", f"{note}; {remedy}", "wrong")
    known = {each.cuda for each in tried.COMBINATIONS} - {"CPU"}
    if built not in known:
        note = f"torch is built for {built}; tried: {', '.join(sorted(known))}"
        return Finding("CUDA", f"{note}; install torch for one of these", "unknown")
    return Finding("CUDA", f"{built}, which torch is built for")


def _cute_dsl() -> Finding:
    """Check for a tried version of CuTe DSL, which compiles the kernels; a CPU needs none."""
    try:
        check_compiler()
    except NoCompiler as error:
        note = f"{error}; needed on GPUs and by build"
        return Finding("CuTe DSL", note, "unknown" if _is_cpu() else "wrong")
    version = versions.installed("nvidia-cutlass-dsl")
    known = [each.cute_dsl for each in tried.COMBINATIONS]
    if version not in known:
        name = f"nvidia-cutlass-dsl=={mode(known)}"
        return Finding("CuTe DSL", f"{version} was not tried; install {name}", "unknown")
    return Finding("CuTe DSL", version)


def _flashinfer() -> Finding:
    """Check for FlashInfer; of the plugin's own ops, only the fused all-reduce needs it."""
    version = versions.installed("flashinfer-python")
    if version:
        return Finding("FlashInfer", version)
    if _is_cpu():
        return Finding("FlashInfer", "not installed, and not used on a CPU")
    note = (
        "not installed; Blackwell's fused all-reduce and some of vLLM's own attention need it; "
        "pip install flashinfer-python"
    )
    return Finding("FlashInfer", note, "unknown")


# --- what the machine has -----------------------------------------------------------------------


def _driver() -> Finding:
    """Check whether the driver supports the major version of CUDA that torch is built for."""
    if _is_cpu():
        return Finding("driver", "none is needed on a CPU")
    try:
        number = driver_version()
    except Exception as error:  # of whatever kind the bindings raise where there is no driver
        note = " ".join(str(error).split()).rstrip(".")
        return Finding("driver", f"{note}; install NVIDIA's driver, nvidia-smi shows it", "wrong")
    served = f"CUDA {number // 1000}.{number % 1000 // 10}"
    major = int((torch.version.cuda or "0").partition(".")[0])
    if number // 1000 < major:
        note = f"serves {served}, torch is built for CUDA {torch.version.cuda}"
        return Finding("driver", f"{note}; install a driver for CUDA {major}.0 or newer", "wrong")
    return Finding("driver", f"serves {served}")


def _gpu() -> Finding:
    """Check that the plugin has kernels for every GPU, and that they have run on such a GPU."""
    if _is_cpu():
        return Finding("GPU", "none: vLLM's CPU build serves by references, which are slow")
    try:
        found = gpus()
    except RuntimeError as error:
        note = str(error).partition("\n")[0]
        return Finding(
            "GPU", f"{note}; end other processes on it (nvidia-smi), or restart it", "wrong"
        )
    if not found:
        note = "none that torch finds; mend the driver until nvidia-smi lists one"
        return Finding("GPU", note, "wrong")
    names = "; ".join(f"{each.name} ({each.arch})" for each in found)
    other = [each.arch for each in found if each.arch not in FAMILIES]
    if other:
        ours = ", ".join(f"{arch} ({GPUS[arch]})" for arch in FAMILIES)
        note = f"{names}: the plugin has no kernels for {other[0]}, only for {ours}"
        return Finding("GPU", f"{note}; set CUDA_VISIBLE_DEVICES to such a GPU", "wrong")
    if any(FAMILIES[each.arch] == _NEVER_RUN for each in found):
        note = f"{names}: its kernels have run in an emulator, on no chip"
        return Finding("GPU", f"{note}; first run nvfp4-kernels check --quick", "unknown")
    return Finding("GPU", names)


def _cache() -> Finding:
    """Check whether the folder of compiled kernels is secure and can be written to."""
    folder = cache_folder()
    if folder is None:
        return Finding("cache", f"no kernels are kept: {CACHE_VARIABLE} is empty")
    try:
        if folder.exists():
            check_folder(CACHE_VARIABLE, folder)
    except UnusableCache as error:
        return Finding("cache", str(error), "wrong")
    there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not there.is_dir():
        note = f"{CACHE_VARIABLE}: {there} is no folder, must be one; name another"
        return Finding("cache", note, "wrong")
    kept = f"{folder} holds {_count(folder)} compiled kernels"
    if not os.access(there, os.W_OK):
        note = f"{kept}; {there} cannot be written to, which a kernel that is missing needs"
        remedy = f"build the model's kernels ahead, or set {CACHE_VARIABLE} to another folder"
        return Finding("cache", f"{note}; {remedy}", "unknown")
    return Finding("cache", kept if folder.exists() else f"{folder}, which is not made yet")


def _memory() -> Finding:
    """Check whether the memory that vLLM takes by default is free."""
    if _is_cpu():
        try:
            memory = host_memory.read(0)
        except (OSError, KeyError, ValueError) as error:
            note = f"cannot be read ({error}); name the cache's: --kv-cache-memory-bytes"
            return Finding("memory", note, "unknown")
        return Finding("memory", _of(memory.available, memory.total))
    try:
        found = gpus()
    except RuntimeError:
        found = []
    if not found:
        note = "none that a GPU could tell of; mend the line about the GPU first"
        return Finding("memory", note, "unknown")
    note = "; ".join(_of(each.free, each.total) for each in found)
    share, least = _vllm_share(), min(each.free / each.total for each in found)
    if share is not None and least < share:
        remedy = "end other processes on it (nvidia-smi), or serve with --gpu-memory-utilization"
        note = f"{note}, vLLM takes {share:.0%} of each; {remedy} {int(least * 100) / 100}"
        return Finding("memory", note, "wrong")
    return Finding("memory", note)


def _vllm_share() -> float | None:
    """Share of a GPU's memory that vLLM takes by default; None where vLLM cannot tell."""
    try:
        from vllm.config import CacheConfig

        return CacheConfig().gpu_memory_utilization
    except Exception:  # the line about vLLM says what is wrong
        return None


def _of(free: int, total: int) -> str:
    return f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"


def _is_cpu() -> bool:
    return versions.vllm_version().endswith("+cpu")


def _count(folder: Path) -> int:
    return sum(1 for _ in folder.glob("*.o"))
