"""Host side of the kernels that quantise rows on sm_100: memory for the result."""

from typing import NamedTuple

from torch import Tensor

from nvfp4_kernels.device.rowwise.operands import Rows, new_operand, new_row_scale
from nvfp4_kernels.device.rowwise.output import QuantizedRows
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


def new_rows(x: Tensor, rows: Rows, global_scale: Tensor | None, terms: int) -> NewRows:
    """Allocate the result for ``rows``, the layout of ``x`` or of rows computed from ``x``."""
    data, scales = new_operand(x, rows.k, terms)
    layout, per_token = TermLayout.of(terms, rows.m), global_scale is None
    scale = new_row_scale(x) if global_scale is None else global_scale
    out = QuantizedRows(data, scales, scale, rows.m, rows.k, rows.batch)
    return NewRows((data, scales, scale)[: 2 + per_token], out, layout, per_token)
