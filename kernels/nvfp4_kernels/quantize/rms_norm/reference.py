"""``rms_norm_quantize`` in torch: the formula, and the kernel on CPU.

Roundings as in ``add_rms_norm``, with or without a residual.
"""

from torch import Tensor

from nvfp4_kernels.formats.nvfp4 import row_global_scales
from nvfp4_kernels.formats.terms import quantize_terms
from nvfp4_kernels.norm.reference import add_rms_norm, rms_norm


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, global_scale: Tensor, terms: int = 1
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.quantize.rms_norm.op.rms_norm_quantize``."""
    return quantize_terms(rms_norm(x.float(), weight, eps, x.dtype), global_scale, terms)


def rms_norm_quantize_per_token(
    x: Tensor, weight: Tensor, eps: float, terms: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``nvfp4_kernels.quantize.rms_norm.op.rms_norm_quantize_per_token``."""
    return _quantize_per_token(rms_norm(x.float(), weight, eps, x.dtype), terms)


def add_rms_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    global_scale: Tensor,
    terms: int = 1,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``nvfp4_kernels.quantize.rms_norm.op.add_rms_norm_quantize``; ``out`` takes the residual.

    ``out`` may be ``x`` or the old residual.
    """
    norm, total = add_rms_norm(x, residual, weight, eps)
    out = total if out is None else out.copy_(total)
    return (*quantize_terms(norm, global_scale, terms), out)


def add_rms_norm_quantize_per_token(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, terms: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``nvfp4_kernels.quantize.rms_norm.op.add_rms_norm_quantize_per_token``."""
    norm, total = add_rms_norm(x, residual, weight, eps)
    return (*_quantize_per_token(norm, terms), total)


def _quantize_per_token(x: Tensor, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    row_scale = row_global_scales(x)
    return (*quantize_terms(x, row_scale, terms), row_scale)
