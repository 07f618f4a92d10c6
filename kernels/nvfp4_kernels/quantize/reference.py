"""``quantize`` in torch: the formula, and the kernel on CPU."""

from torch import Tensor

from nvfp4_kernels.formats.nvfp4 import row_global_scales
from nvfp4_kernels.formats.terms import quantize_terms


def quantize(x: Tensor, global_scale: Tensor, terms: int = 1) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.quantize.op.quantize``."""
    return quantize_terms(x, global_scale, terms)


def quantize_per_token(x: Tensor, terms: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """See ``nvfp4_kernels.quantize.op.quantize_per_token``."""
    row_scale = row_global_scales(x)
    return (*quantize_terms(x, row_scale, terms), row_scale)
