"""``gemm`` in torch: the formula, and the kernel on CPU."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from nvfp4_kernels.formats.fragments import blocked_weight
from nvfp4_kernels.formats.nvfp4 import product_with_weight
from nvfp4_kernels.formats.terms import decode_terms, quantize_terms


def gemm(
    a: Tensor,
    a_scales: Tensor | None,
    b: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    shard_sizes: Sequence[int],
    row_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    terms: int = 1,
    *,
    batch_invariant: bool = False,
) -> Tensor:
    """See ``nvfp4_kernels.gemm.op.gemm``; ``batch_invariant``: each row is a product by itself."""
    b, b_scales = blocked_weight(b, b_scales, sum(shard_sizes), a.shape[-1])
    values = a.float() if a_scales is None else decode_terms(a, a_scales, terms)
    accumulator = product_with_weight(values, b, b_scales, batch_invariant)
    sizes = torch.tensor(list(shard_sizes), device=alpha.device)
    out = accumulator.mul_(alpha.repeat_interleave(sizes))
    if row_scale is not None:
        out.mul_(row_scale.unsqueeze(-1))
    if bias is not None:
        out.add_(bias.float())
    return out.to(out_dtype)


gemm_batch_invariant = partial(gemm, batch_invariant=True)


def gemm_quantized(
    a: Tensor,
    a_scales: Tensor | None,
    b: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    shard_sizes: Sequence[int],
    row_scale: Tensor | None,
    bias: Tensor | None,
    out_global_scale: Tensor,
    terms: int = 1,
    out_terms: int = 1,
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.gemm.op.gemm_quantized``."""
    operands = (a, a_scales, b, b_scales, alpha, shard_sizes, row_scale, bias)
    return quantize_terms(gemm(*operands, torch.float32, terms), out_global_scale, out_terms)
