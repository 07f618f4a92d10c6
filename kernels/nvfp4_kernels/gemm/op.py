"""``gemm``: D = alpha · row_scale · (A · Bᵀ) + bias, NVFP4 weight; ``gemv``, ``gemm_quantized``."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.checks import (
    InvalidArgument,
    check_blocks_of_16,
    check_dtype,
    check_same_device,
    check_shape,
)
from nvfp4_kernels.formats.terms import check_terms
from nvfp4_kernels.gemm.arguments import (
    PRODUCT_SCHEMA,
    QUANTIZED_SCHEMA,
    check_layout_taken,
    check_product,
    fake_product,
    quantized_result,
    refuse_fragments,
)
from nvfp4_kernels.gemm.kernels import KERNELS, MAX_GEMV_ROWS, QUANTIZED_KERNELS


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
    terms: int = 1,
) -> Tensor:
    """Matrix product of activations with an NVFP4 weight.

    Products of E2M1 values times block scales are accumulated in float32; ``alpha``, ``row_scale``
    and ``bias`` are applied to the accumulator, which is then rounded once.

    On sm_90 all arguments but ``a`` may be read while preceding kernels that allow programmatic
    dependent launch still run: these kernels must not write any argument but ``a``.

    Args:
        a: w4a4: uint8 ``(..., M, K/2)``, two E2M1 codes per byte; w4a16 (``a_scales`` None):
            bfloat16 or float16 ``(..., M, K)``.
        a_scales: float8_e4m3fn, blocked layout of ``a``'s ``(..., M, K/16)`` scales, or None.
        b: uint8 ``(N, K/2)``, or ``(..., N, K/2)`` with the same batch dimensions as ``a``; w4a16
            on CPU and sm_90 also in fragments, ``(ceil(N/64), ceil(K/64), 4, 32, 16)``.
        b_scales: float8_e4m3fn, blocked layout of ``b``'s ``(..., N, K/16)`` scales; of fragments
            uint8 ``(ceil(N/64), ceil(K/64), 4, 8, 8)``. The dtype tells the layouts apart.
        alpha: float32 ``(S,)``, one factor per shard of the output: global scale of the weight's
            shard, times the activation's global scale if that is a single number.
        shard_sizes: S output widths that add up to N, e.g. the widths of q, k and v. With
            fragments, which are padded to whole tiles of 64 rows and 64 elements, the widths
            determine N, and ``a`` determines K.
        row_scale: float32 ``(..., M)``, the activation's per-row global scales, if any.
        bias: ``(N,)``, bfloat16, float16 or float32.
        out_dtype: bfloat16, float16 or float32.
        terms: number of NVFP4 terms of the activation, 1 to 4; with more than one, ``a`` is ``(...,
            terms, M, K/2)`` and ``a_scales`` as ``quantize`` returns it.

    Returns:
        ``(..., M, N)`` of ``out_dtype``.

    Raises:
        InvalidArgument: shapes, dtypes or devices that do not fit, named.
        NoKernelError: no kernel for this device and mode; the message lists existing kernels.
    """
    return torch.ops.nvfp4.gemm(
        a, a_scales, b, b_scales, alpha, _widths(shard_sizes), row_scale, bias, out_dtype, terms
    )


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
    terms: int = 1,
) -> Tensor:
    """``gemm`` of a decode step: at most ``MAX_GEMV_ROWS`` rows of activations, else refused.

    The same arguments, result and kernels: the choice of kernel depends on M, not on the op.

    Raises:
        InvalidArgument: M above ``MAX_GEMV_ROWS``, or as ``gemm``.
        NoKernelError: as ``gemm``.
    """
    if isinstance(a, Tensor) and a.ndim > 1 and a.shape[-2] > MAX_GEMV_ROWS:
        raise InvalidArgument(
            f"a: M is {a.shape[-2]}, must be at most {MAX_GEMV_ROWS}; use gemm for more rows"
        )
    return gemm(
        a, a_scales, b, b_scales, alpha, shard_sizes,
        row_scale=row_scale, bias=bias, out_dtype=out_dtype, terms=terms,
    )  # fmt: skip


def gemm_quantized(
    a: Tensor,
    a_scales: Tensor | None,
    b: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    shard_sizes: Sequence[int],
    out_global_scale: Tensor,
    *,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    terms: int = 1,
    out_terms: int = 1,
) -> tuple[Tensor, Tensor]:
    """``gemm`` with the result quantised for the next GEMM, from the float32 values.

    Arguments as for ``gemm``, without fragments, N a multiple of 16. ``out_global_scale``, float32
    ``()``: the next layer's input scale. ``out_terms``, 1 to 4: number of NVFP4 terms of the
    result.

    Returns:
        ``data`` uint8 ``(..., M, N/2)`` and ``scales`` float8_e4m3fn in the blocked layout; with
        several terms, as returned by ``quantize``.

    Raises:
        InvalidArgument, NoKernelError: as ``gemm``.
    """
    return torch.ops.nvfp4.gemm_quantized(
        a, a_scales, b, b_scales, alpha, _widths(shard_sizes), row_scale, bias, out_global_scale,
        terms, out_terms,
    )  # fmt: skip


def _widths(shard_sizes: Sequence[int]) -> list[int]:
    if not isinstance(shard_sizes, Sequence):
        raise InvalidArgument(
            f"shard_sizes: is {type(shard_sizes).__name__}, must be a sequence of widths; of one "
            "shard pass [N]"
        )
    return list(shard_sizes)


@torch.library.custom_op("nvfp4::gemm", mutates_args=(), schema=PRODUCT_SCHEMA)
def _gemm(*arguments: Any) -> Tensor:
    mode, *_ = check_product(*arguments)
    kernel = KERNELS.select(arguments[0].device, mode)
    check_layout_taken("b", arguments[3], kernel)
    *operands, terms = arguments
    # Kernels of 16-bit activations know of one term alone.
    return kernel.load()(*(arguments if terms > 1 else operands))


_gemm.register_fake(fake_product)


@torch.library.custom_op("nvfp4::gemm_quantized", mutates_args=(), schema=QUANTIZED_SCHEMA)
def _gemm_quantized(*arguments: Any) -> tuple[Tensor, Tensor]:
    *operands, out_global_scale, terms, out_terms = arguments
    refuse_fragments("gemm_quantized", b_scales=operands[3])
    check_dtype("out_global_scale", out_global_scale, (torch.float32,))
    check_shape("out_global_scale", out_global_scale, (), "one scale for the whole output")
    given: tuple[Any, ...] = (*operands, torch.float32, terms)
    mode, _, n, _ = check_product(*given)
    check_terms("out_terms", out_terms)
    check_blocks_of_16("output", (1, n))  # the next product's K is this one's N
    check_same_device(a=operands[0], out_global_scale=out_global_scale)
    kernel = QUANTIZED_KERNELS.select(operands[0].device, mode).load()
    return kernel(*arguments)


@_gemm_quantized.register_fake
def _(a: Tensor, a_scales: Tensor | None, b: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, terms, out_terms = rest
    return quantized_result(a, b.shape[-2], terms, out_terms)
