"""Host side of the kernels that quantise rows on sm_100: memory for the result."""

from typing import NamedTuple

from torch import Tensor

from nvfp4_kernels.device.rowwise.operands import Rows, new_operand, new_row_scale
from nvfp4_kernels.device.rowwise.output import QuantizedRows
from nvfp4_kernels.formats.output import Fp8Output, Nvfp4Output, PerToken, Static
from nvfp4_kernels.formats.terms import TermLayout


class NewRows(NamedTuple):
    """Allocated result of a launch, as tensors and as kernel argument.

    Attributes:
        result: ``data``, ``scales``, and ``row_scale`` if each row has its own global scale.
        rows: kernel argument with pointers to the result, and to a given global scale.
        terms: layout of the result's NVFP4 terms.
        per_token: whether each row has its own global scale.
    """

    result: tuple[Tensor, ...]
    rows: QuantizedRows
    terms: TermLayout
    per_token: bool


def new_rows(x: Tensor, rows: Rows, output: Nvfp4Output | Fp8Output) -> NewRows:
    """Allocate the result for ``rows``, the layout of ``x`` or of rows computed from ``x``."""
    assert isinstance(output, Static | PerToken), "sm_100 has no kernel that writes E4M3"
    data, scales = new_operand(x, rows.k, output.terms)
    layout, per_token = TermLayout.of(output.terms, rows.m), isinstance(output, PerToken)
    scale = output.global_scale if isinstance(output, Static) else new_row_scale(x)
    out = QuantizedRows(data, scales, scale, rows.m, rows.k, rows.batch)
    return NewRows((data, scales, scale)[: 2 + per_token], out, layout, per_token)
