"""Kernels of ``silu_mul_gemm`` and how one is configured for a problem."""

from dataclasses import dataclass

from nvfp4_kernels.dispatch import KernelTable

KERNELS = KernelTable(
    "silu_mul_gemm",
    {
        ("cpu", "w4a4"): ("reference", "nvfp4_kernels.silu_mul_gemm.reference:silu_mul_gemm"),
        ("cpu", "w4a16"): ("reference", "nvfp4_kernels.silu_mul_gemm.reference:silu_mul_gemm"),
    },
)

# The reference decodes this many elements of either weight at a time: 64 MB of float32.
_DECODED_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class SiluMulGemmConfig:
    """How the reference walks the weights.

    Attributes:
        tile_n: rows of either weight decoded at a time.
    """

    tile_n: int


def choose_config(m: int, n: int, k: int) -> SiluMulGemmConfig:
    """The configuration for an ``m × n × k`` pair of products. Pure."""
    return SiluMulGemmConfig(tile_n=max(1, min(n, _DECODED_ELEMENTS // max(1, k))))
