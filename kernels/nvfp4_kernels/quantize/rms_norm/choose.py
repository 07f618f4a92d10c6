"""Choice of the layout of threads over rows for norms that quantise. Imports no CuTe."""

from nvfp4_kernels.device.rowwise.tile import BLOCK, RowTile, choose_whole_rows
from nvfp4_kernels.sm100.limits import SMS


def choose_config(m: int, k: int, sms: int = SMS, batch_invariant: bool = False) -> RowTile:
    """Choose the layout for ``m`` rows, of all matrices, of ``k`` elements each. Pure function.

    ``batch_invariant``: whether to use the layout for one row at any number of rows; the layout
    determines the summation order of a row's squares.

    The layout reserves registers for a thread's elements, or sums with the residual, in float32.
    """
    return choose_whole_rows(1 if batch_invariant else m, k, BLOCK, sms)
