"""Kernels of ``silu_mul_quantize`` and its per-token form, and their configuration."""

from nvfp4_kernels.dispatch import KernelTable
from nvfp4_kernels.rowwise.tile import BLOCK, RowTile, choose_row_parts, choose_whole_rows

_OP = "silu_mul_quantize"
_PER_TOKEN = "silu_mul_quantize_per_token"

KERNELS = KernelTable(
    _OP,
    {
        ("cpu", "w4a4"): ("reference", f"nvfp4_kernels.{_OP}.reference:{_OP}"),
        ("sm_100", "w4a4"): ("SiluMulQuantizeSm100", f"nvfp4_kernels.{_OP}.sm100:{_OP}"),
    },
)
PER_TOKEN_KERNELS = KernelTable(
    _PER_TOKEN,
    {
        ("cpu", "w4a4"): ("reference", f"nvfp4_kernels.{_OP}.reference:{_PER_TOKEN}"),
        ("sm_100", "w4a4"): ("SiluMulQuantizeSm100", f"nvfp4_kernels.{_OP}.sm100:{_PER_TOKEN}"),
    },
)


def choose_config(m: int, k: int, element_size: int, per_token: bool) -> RowTile:
    """The layout for ``m`` rows, of all matrices together, of ``k`` elements of output. Pure."""
    words = BLOCK * element_size // 4
    # Of a whole row only the products are kept; parts of rows have gate and up in flight.
    return choose_whole_rows(m, k, words) if per_token else choose_row_parts(m, k, 2 * words)
