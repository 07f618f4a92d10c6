"""Kernels of ``gemv`` and how one is configured for a problem."""

from dataclasses import dataclass

from nvfp4_kernels.dispatch import KernelTable

KERNELS = KernelTable(
    "gemv",
    {
        ("cpu", "w4a4"): ("reference", "nvfp4_kernels.gemv.reference:gemv"),
        ("cpu", "w4a16"): ("reference", "nvfp4_kernels.gemv.reference:gemv"),
    },
)

# One tile of tokens: the N = 32 side of a swapped tcgen05.mma.
MAX_M = 32

# The reference decodes this many weight elements at a time: 64 MB of float32.
_DECODED_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class GemvConfig:
    """How the reference walks the weight.

    Attributes:
        tile_n: weight rows decoded at a time.
    """

    tile_n: int


def choose_config(n: int, k: int) -> GemvConfig:
    """The configuration for a weight of ``n × k``. Pure."""
    return GemvConfig(tile_n=max(1, min(n, _DECODED_ELEMENTS // max(1, k))))
