"""Kernels of ``rms_norm_quantize`` and its three siblings, and their configuration."""

from nvfp4_kernels.dispatch import KernelTable
from nvfp4_kernels.rowwise.tile import BLOCK, RowTile, choose_whole_rows

_MODULE = "nvfp4_kernels.rms_norm_quantize"

KERNELS = {
    op: KernelTable(
        op,
        {
            ("cpu", "w4a4"): ("reference", f"{_MODULE}.reference:{op}"),
            ("sm_100", "w4a4"): ("RmsNormQuantizeSm100", f"{_MODULE}.sm100:{op}"),
        },
    )
    for op in (
        "rms_norm_quantize",
        "rms_norm_quantize_per_token",
        "add_rms_norm_quantize",
        "add_rms_norm_quantize_per_token",
    )
}


def choose_config(m: int, k: int) -> RowTile:
    """The layout for ``m`` rows, of all matrices together, of ``k`` elements. Pure.

    Between the passes a thread keeps its elements, or their sums, as float32: a word each.
    """
    return choose_whole_rows(m, k, words=BLOCK)
