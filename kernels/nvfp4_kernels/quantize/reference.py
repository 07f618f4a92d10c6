"""``quantize`` in torch: the reference, which is also the CPU kernel."""

from torch import Tensor

from nvfp4_kernels.formats.nvfp4 import row_global_scales
from nvfp4_kernels.formats.terms import quantize_terms
from nvfp4_kernels.quantize.call import QuantizeCall


def quantize(call: QuantizeCall) -> tuple[Tensor, ...]:
    """See ``nvfp4_kernels.quantize.op.quantize``."""
    return quantize_rows(*call)


def quantize_rows(x: Tensor, global_scale: Tensor | None, terms: int) -> tuple[Tensor, ...]:
    """Quantise ``x``; if ``global_scale`` is None, use a scale per row, and return these, too."""
    if global_scale is not None:
        return quantize_terms(x, global_scale, terms)
    row_scale = row_global_scales(x)
    return (*quantize_terms(x, row_scale, terms), row_scale)
