"""Layout of rows for norms that quantise. No CuTe in here."""

from nvfp4_kernels.device.rowwise.tile import BLOCK, RowTile, choose_whole_rows
from nvfp4_kernels.sm100.limits import SMS


def choose_config(m: int, k: int, sms: int = SMS, batch_invariant: bool = False) -> RowTile:
    """Choose the layout for ``m`` rows, over all matrices, of ``k`` elements. Pure.

    ``batch_invariant``: the layout for one row is used for any number of rows, as the layout
    determines the summation order of a row's squares.

    Between the passes a thread keeps its elements, or sums with the residual, in float32.
    """
    return choose_whole_rows(1 if batch_invariant else m, k, BLOCK, sms)
