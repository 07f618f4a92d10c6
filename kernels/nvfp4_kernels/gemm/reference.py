"""``gemm`` in torch: the reference, which is also the CPU kernel."""

from functools import partial

import torch
from torch import Tensor

from nvfp4_kernels.formats.folded import folded_product
from nvfp4_kernels.formats.fp8_rows import from_rows, quantize_fp8
from nvfp4_kernels.formats.fragments import blocked_weight
from nvfp4_kernels.formats.nvfp4 import product_with_weight
from nvfp4_kernels.formats.output import StaticFp8
from nvfp4_kernels.formats.terms import decode_terms, quantize_terms
from nvfp4_kernels.gemm.call import AnyCall, GemmCall


def gemm(call: GemmCall, *, batch_invariant: bool = False) -> tuple[Tensor, Tensor | None]:
    """See ``nvfp4_kernels.gemm.op.gemm``; the second result is None for floating-point output.

    ``batch_invariant``: whether to compute each row separately.
    """
    out = product(values_of(call), call.b, call.b_scales, call.rows, batch_invariant)
    factors = call.alpha
    if not is_folded(call.b_scales):
        sizes = torch.tensor(list(call.shard_sizes), device=factors.device)
        factors = factors.repeat_interleave(sizes)
    out.mul_(factors)
    if call.row_scale is not None:
        out.mul_(call.row_scale.unsqueeze(-1))
    if call.bias is not None:
        out.add_(call.bias.float())
    return result_of(call, out)


gemm_batch_invariant = partial(gemm, batch_invariant=True)


def values_of(call: AnyCall) -> Tensor:
    """Values of the activation in float32, without global scales."""
    if call.a.dtype == torch.float8_e4m3fn:
        return from_rows(call.a, call.a.shape[-1]).float()
    if call.a_scales is None:
        return call.a.float()
    return decode_terms(call.a, call.a_scales, call.terms)


def product(
    a: Tensor, b: Tensor, b_scales: Tensor, n: int, batch_invariant: bool = False
) -> Tensor:
    """A · Bᵀ with a weight of ``n`` rows in any layout: float32 ``(..., M, n)``, not scaled."""
    if is_folded(b_scales):
        return folded_product(a, b, b_scales, n, batch_invariant)
    return product_with_weight(a, *blocked_weight(b, b_scales, n, a.shape[-1]), batch_invariant)


def is_folded(scales: Tensor) -> bool:
    """Whether a weight is in the folded layout, told by its scales' dtype."""
    return scales.dtype == torch.int32


def result_of(call: AnyCall, out: Tensor) -> tuple[Tensor, Tensor | None]:
    """Convert float32 ``out`` to the result's format; return it, and NVFP4 scales or None."""
    if call.output is None:
        return out.to(call.out_dtype), None
    if isinstance(call.output, StaticFp8):
        return quantize_fp8(out, call.output.scale), None
    return quantize_terms(out, *call.output)
