"""``gemm`` in torch: the reference, which is also the CPU kernel."""

from functools import partial

import torch
from torch import Tensor

from nvfp4_kernels.formats.fragments import blocked_weight
from nvfp4_kernels.formats.nvfp4 import product_with_weight
from nvfp4_kernels.formats.terms import decode_terms, quantize_terms
from nvfp4_kernels.gemm.call import AnyCall, GemmCall


def gemm(call: GemmCall, *, batch_invariant: bool = False) -> tuple[Tensor, Tensor | None]:
    """See ``nvfp4_kernels.gemm.op.gemm``; the second result is None for floating-point output.

    ``batch_invariant``: whether to compute each row separately.
    """
    weight = blocked_weight(call.b, call.b_scales, call.rows, call.a.shape[-1])
    accumulator = product_with_weight(values_of(call), *weight, batch_invariant)
    sizes = torch.tensor(list(call.shard_sizes), device=call.alpha.device)
    out = accumulator.mul_(call.alpha.repeat_interleave(sizes))
    if call.row_scale is not None:
        out.mul_(call.row_scale.unsqueeze(-1))
    if call.bias is not None:
        out.add_(call.bias.float())
    return result_of(call, out)


gemm_batch_invariant = partial(gemm, batch_invariant=True)


def values_of(call: AnyCall) -> Tensor:
    """Values of the activation in float32, without global scales."""
    if call.a_scales is None:
        return call.a.float()
    return decode_terms(call.a, call.a_scales, call.terms)


def result_of(call: AnyCall, out: Tensor) -> tuple[Tensor, Tensor | None]:
    """Convert float32 ``out`` to the result's format; return it, and NVFP4 scales or None."""
    if call.output is None:
        return out.to(call.out_dtype), None
    return quantize_terms(out, *call.output)
