"""Kernels of ``quantize`` and ``quantize_per_token``, and their configuration for a problem."""

from nvfp4_kernels.dispatch import KernelTable
from nvfp4_kernels.rowwise.tile import BLOCK, RowTile, choose_row_parts, choose_whole_rows

KERNELS = KernelTable(
    "quantize",
    {
        ("cpu", "w4a4"): ("reference", "nvfp4_kernels.quantize.reference:quantize"),
        ("sm_100", "w4a4"): ("QuantizeSm100", "nvfp4_kernels.quantize.sm100:quantize"),
    },
)
PER_TOKEN_KERNELS = KernelTable(
    "quantize_per_token",
    {
        ("cpu", "w4a4"): ("reference", "nvfp4_kernels.quantize.reference:quantize_per_token"),
        ("sm_100", "w4a4"): ("QuantizeSm100", "nvfp4_kernels.quantize.sm100:quantize_per_token"),
    },
)


def choose_config(m: int, k: int, element_size: int, per_token: bool) -> RowTile:
    """The layout for ``m`` rows, of all matrices together, of ``k`` elements. Pure."""
    words = BLOCK * element_size // 4
    return choose_whole_rows(m, k, words) if per_token else choose_row_parts(m, k, words)
