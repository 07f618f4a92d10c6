"""``gemm`` on sm_100."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nvfp4_kernels.sm100.product import product


def gemm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    shard_sizes: Sequence[int],
    row_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """See ``nvfp4_kernels.gemm.op.gemm``."""
    weights = [(b, b_scales)]
    out, _ = product((a, a_scales), weights, alpha, shard_sizes, row_scale, bias, out_dtype)
    return out


def gemm_quantized(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    shard_sizes: Sequence[int],
    row_scale: Tensor | None,
    bias: Tensor | None,
    out_global_scale: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """See ``nvfp4_kernels.gemm.op.gemm_quantized``."""
    weights = [(b, b_scales)]
    return product(
        (a, a_scales), weights, alpha, shard_sizes, row_scale, bias, torch.float32, out_global_scale
    )
