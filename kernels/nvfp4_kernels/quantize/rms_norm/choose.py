"""Layout of rows for ``rms_norm_quantize`` and its three siblings. No CuTe in here."""

from nvfp4_kernels.device.rowwise.tile import BLOCK, RowTile, choose_whole_rows
from nvfp4_kernels.sm100.limits import SMS


def choose_config(m: int, k: int, sms: int = SMS, batch_invariant: bool = False) -> RowTile:
    """The layout for ``m`` rows, of all matrices together, of ``k`` elements. Pure.

    ``batch_invariant``: that of one row for any number of them, as threads add up a row's squares.

    Between the passes a thread keeps its elements, or their sums, as float32: a word each.
    """
    return choose_whole_rows(1 if batch_invariant else m, k, BLOCK, sms)
