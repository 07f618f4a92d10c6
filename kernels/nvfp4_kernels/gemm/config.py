"""Kernels of ``gemm`` and how one is configured for a problem."""

from dataclasses import dataclass

from nvfp4_kernels.dispatch import KernelTable

KERNELS = KernelTable(
    "gemm",
    {
        ("cpu", "w4a4"): ("reference", "nvfp4_kernels.gemm.reference:gemm"),
        ("cpu", "w4a16"): ("reference", "nvfp4_kernels.gemm.reference:gemm"),
    },
)

# The reference decodes this many weight elements at a time: 64 MB of float32.
_DECODED_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class GemmConfig:
    """How the reference walks the weight.

    Attributes:
        tile_n: weight rows decoded at a time.
    """

    tile_n: int


def choose_config(m: int, n: int, k: int) -> GemmConfig:
    """The configuration for an ``m × n × k`` product. Pure."""
    return GemmConfig(tile_n=max(1, min(n, _DECODED_ELEMENTS // max(1, k))))
