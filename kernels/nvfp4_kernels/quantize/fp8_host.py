"""Host side of the kernels that quantise rows to E4M3 on sm_90: memory for the result."""

from typing import NamedTuple

from torch import Tensor

from nvfp4_kernels.device.row_vectors.fp8 import Fp8Rows
from nvfp4_kernels.device.rowwise.operands import Rows
from nvfp4_kernels.formats.output import Fp8Output, Nvfp4Output, StaticFp8
from nvfp4_kernels.quantize.arguments import is_fp8, is_per_token, new_result

ALIGNMENT = 16  # bytes of a thread's load; input rows start on multiples of them


class NewFp8Rows(NamedTuple):
    """Allocated result of a launch, as tensors and as kernel argument.

    Attributes:
        result: E4M3 rows, and ``row_scale`` if each row has its own scale.
        rows: kernel argument with pointers to the result, and to a given scale.
        per_token: whether each row has its own scale.
    """

    result: tuple[Tensor, ...]
    rows: Fp8Rows
    per_token: bool


def new_fp8_rows(x: Tensor, rows: Rows, output: Nvfp4Output | Fp8Output) -> NewFp8Rows:
    """Allocate the result for ``rows``, the layout of ``x`` or of rows computed from ``x``."""
    assert is_fp8(output), "sm_90 has no kernel that writes NVFP4"
    result = new_result(x, rows.k, output)
    scale = output.scale if isinstance(output, StaticFp8) else result[1]
    out = Fp8Rows(result[0], scale, rows.count, rows.k)
    return NewFp8Rows(result, out, is_per_token(output))
