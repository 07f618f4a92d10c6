"""Choice of the layout of threads over rows for ``silu_mul_quantize``. Imports no CuTe."""

from nvfp4_kernels.device.rowwise.tile import BLOCK, RowTile, choose_row_parts, choose_whole_rows
from nvfp4_kernels.sm100.limits import SMS


def choose_config(m: int, k: int, element_size: int, per_token: bool, sms: int = SMS) -> RowTile:
    """Choose the layout for ``m`` rows, of all matrices, of ``k`` results each. Pure function."""
    words = BLOCK * element_size // 4
    # A whole row keeps its products alone; parts of rows have gate and up in flight.
    return (
        choose_whole_rows(m, k, words, sms) if per_token else choose_row_parts(m, k, 2 * words, sms)
    )
