"""``gemv``: the product of a decode step, few tokens against an NVFP4 weight."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.gemv.config import KERNELS, MAX_M
from nvfp4_kernels.operands import PRODUCT_SCHEMA, check_layout_taken, check_product, fake_product


def gemv(
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
    """Product of at most 32 rows of activations with an NVFP4 weight, batched over leading dims.

    The same formula as ``gemm``; a kernel of its own because so few rows are bound by reading the
    weight, which it fills the tensor core's M side with.

    Args:
        a: w4a4: uint8 ``(..., M, K/2)``, two E2M1 codes per byte; w4a16 (``a_scales`` None):
            bfloat16 or float16 ``(..., M, K)``.
        a_scales: float8_e4m3fn, blocked layout of ``a``'s ``(..., M, K/16)`` scales, or None.
        b: uint8 ``(N, K/2)``, or ``(..., N, K/2)`` with the same batch dimensions as ``a``; w4a16
            on CPU and sm_90 also in fragments, ``(ceil(N/64), ceil(K/64), 4, 32, 16)``.
        b_scales: float8_e4m3fn, blocked layout of ``b``'s ``(..., N, K/16)`` scales; of fragments
            uint8 ``(ceil(N/64), ceil(K/64), 4, 8, 8)``. Their dtype tells the two apart.
        alpha: float32 ``(S,)``, one factor per shard of the output: global scale of the weight's
            shard, times the activation's global scale where that is one number.
        shard_sizes: S output widths that add up to N, e.g. those of q, k and v. With fragments,
            which are padded to whole tiles of 64 rows and 64 elements, they say what N is, and
            ``a`` says what K is.
        row_scale: float32 ``(..., M)``, the activation's global scales when there is one per row.
        bias: ``(N,)``, bfloat16, float16 or float32.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        ``(..., M, N)`` of ``out_dtype``.

    Raises:
        InvalidArgument: M above 32, or shapes, dtypes or devices that do not fit, named.
        NoKernelError: no kernel for this device and mode; the message lists what there is.
    """
    return torch.ops.nvfp4.gemv(
        a, a_scales, b, b_scales, alpha, list(shard_sizes), row_scale, bias, out_dtype
    )


@torch.library.custom_op("nvfp4::gemv", mutates_args=(), schema=PRODUCT_SCHEMA)
def _gemv(*operands: Any) -> Tensor:
    mode, m, *_ = check_product(*operands)
    if m > MAX_M:
        raise InvalidArgument(f"a: M is {m}, must be at most {MAX_M}; use gemm for more rows")
    kernel = KERNELS.select(operands[0].device, mode)
    check_layout_taken("b", operands[3], kernel)
    return kernel.load()(*operands)


_gemv.register_fake(fake_product)
