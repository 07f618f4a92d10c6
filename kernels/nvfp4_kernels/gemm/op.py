"""``gemm``: D = alpha · row_scale · (A · Bᵀ) + bias with an NVFP4 weight."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nvfp4_kernels.checks import check_same_device
from nvfp4_kernels.gemm.config import KERNELS, choose_config
from nvfp4_kernels.operands import (
    check_activation,
    check_batch,
    check_bias,
    check_out_dtype,
    check_shards,
    check_weight,
)


def gemm(
    a: Tensor,
    a_scales: Tensor | None,
    b: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    shard_sizes: Sequence[int],
    *,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Matrix product of activations with an NVFP4 weight.

    Products of E2M1 values times block scales are accumulated in float32; ``alpha``, ``row_scale``
    and ``bias`` are applied to the accumulator, which is then rounded once.

    Args:
        a: w4a4: uint8 ``(..., M, K/2)``, two E2M1 codes per byte; w4a16 (``a_scales`` None):
            bfloat16 or float16 ``(..., M, K)``.
        a_scales: float8_e4m3fn, blocked layout of ``a``'s ``(..., M, K/16)`` scales, or None.
        b: uint8 ``(N, K/2)``, or ``(..., N, K/2)`` with the same batch dimensions as ``a``.
        b_scales: float8_e4m3fn, blocked layout of ``b``'s ``(..., N, K/16)`` scales.
        alpha: float32 ``(S,)``, one factor per shard of the output: global scale of the weight's
            shard, times the activation's global scale where that is one number.
        shard_sizes: S output widths that add up to N, e.g. those of q, k and v.
        row_scale: float32 ``(..., M)``, the activation's global scales when there is one per row.
        bias: ``(N,)``, bfloat16, float16 or float32.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        ``(..., M, N)`` of ``out_dtype``.

    Raises:
        InvalidArgument: shapes, dtypes or devices that do not fit, named.
        NoKernelError: no kernel for this device and mode; the message lists what there is.
    """
    return torch.ops.nvfp4.gemm(
        a, a_scales, b, b_scales, alpha, list(shard_sizes), row_scale, bias, out_dtype
    )


@torch.library.custom_op("nvfp4::gemm", mutates_args=())
def _gemm(
    a: Tensor,
    a_scales: Tensor | None,
    b: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    shard_sizes: Sequence[int],
    row_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    n, k = check_weight("b", b, b_scales)
    mode, m = check_activation(a, a_scales, row_scale, k)
    check_batch(a, "b", b)
    check_shards(alpha, shard_sizes, n)
    check_bias(bias, n)
    check_out_dtype(out_dtype)
    check_same_device(
        a=a, a_scales=a_scales, b=b, b_scales=b_scales, alpha=alpha, row_scale=row_scale, bias=bias
    )
    kernel = KERNELS.select(a.device, mode).load()
    config = choose_config(m, n, k)
    return kernel(a, a_scales, b, b_scales, alpha, shard_sizes, row_scale, bias, out_dtype, config)


@_gemm.register_fake
def _(
    a: Tensor,
    a_scales: Tensor | None,
    b: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    shard_sizes: Sequence[int],
    row_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-2]), dtype=out_dtype)
