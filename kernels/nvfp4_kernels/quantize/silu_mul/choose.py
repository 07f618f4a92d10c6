"""Choice of the layout of threads over rows for ``silu_mul_quantize``. Imports no CuTe."""

from nvfp4_kernels.device.row_vectors import tile as vectors
from nvfp4_kernels.device.rowwise.tile import BLOCK, RowTile, choose_row_parts, choose_whole_rows
from nvfp4_kernels.sm90.limits import SMS as SMS_SM90
from nvfp4_kernels.sm100.limits import SMS


def choose_config(m: int, k: int, element_size: int, per_token: bool, sms: int = SMS) -> RowTile:
    """Choose the layout for ``m`` rows, of all matrices, of ``k`` results each. Pure function."""
    words = BLOCK * element_size // 4
    # A whole row keeps its products alone; parts of rows have gate and up in flight.
    return (
        choose_whole_rows(m, k, words, sms) if per_token else choose_row_parts(m, k, 2 * words, sms)
    )


def choose_fp8_config(
    m: int, k: int, element_size: int, per_token: bool, sms: int = SMS_SM90
) -> vectors.VectorTile:
    """Choose the layout of the kernel that writes E4M3. Pure function."""
    words = vectors.VECTOR * element_size // 4
    if per_token:
        return vectors.choose_whole_rows(m, k, words, sms)
    return vectors.choose_row_parts(m, k, 2 * words, sms)
