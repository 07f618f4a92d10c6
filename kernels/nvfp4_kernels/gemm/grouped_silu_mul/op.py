"""``grouped_silu_mul_gemm``: gate and up GEMMs of every expert and the activation in one pass."""

from typing import Any, overload

import torch
from torch import Tensor

from nvfp4_kernels.activation import SILU, Activation
from nvfp4_kernels.formats.output import Output, Static, StaticFp8
from nvfp4_kernels.gemm.arguments import check_no_n, check_output
from nvfp4_kernels.gemm.grouped.arguments import (
    ACTIVATION,
    OPERANDS,
    activation_arguments,
    call_of,
    fake_fp8,
    fake_grouped,
    fake_quantized,
    run_fp8,
    run_grouped,
    run_quantized,
)
from nvfp4_kernels.gemm.grouped_silu_mul.kernels import KERNELS


@overload
def grouped_silu_mul_gemm(
    a: Tensor, a_scales: Tensor | None, groups: Tensor, b: Tensor, b_scales: Tensor,
    alpha: Tensor, *, row_scale: Tensor | None = ..., bias: Tensor | None = ...,
    activation: Activation = ..., out_dtype: torch.dtype = ..., n: int | None = ...,
    terms: int = ..., output: None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def grouped_silu_mul_gemm(
    a: Tensor, a_scales: Tensor | None, groups: Tensor, b: Tensor, b_scales: Tensor,
    alpha: Tensor, *, row_scale: Tensor | None = ..., bias: Tensor | None = ...,
    activation: Activation = ..., terms: int = ..., output: Static,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def grouped_silu_mul_gemm(
    a: Tensor, a_scales: None, groups: Tensor, b: Tensor, b_scales: Tensor, alpha: Tensor, *,
    row_scale: Tensor | None = ..., bias: Tensor | None = ..., activation: Activation = ...,
    n: int | None = ..., output: StaticFp8,
) -> Tensor: ...  # fmt: skip
def grouped_silu_mul_gemm(
    a: Tensor,
    a_scales: Tensor | None,
    groups: Tensor,
    b: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    *,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    activation: Activation = SILU,
    out_dtype: torch.dtype = torch.bfloat16,
    n: int | None = None,
    terms: int = 1,
    output: Output = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``act(alpha[e, 0] · A · Gateᵀ) · (alpha[e, 1] · A · Upᵀ)`` for each token tile of expert e.

    The result is computed in float32 and rounded once. The routing is read on the device.

    Args:
        a: w4a4: uint8 ``(tiles, T, K/2)``; w4a16 (``a_scales`` None): 16-bit floats
            ``(tiles, T, K)``; w4a8 (the same, with folded weights): float8_e4m3fn ``(tiles, T, K)``
            in the order of ``formats.fp8_rows``, K padded to a multiple of 64. T is one of
            ``moe.routing.TILE_TOKENS``, K a multiple of 16, on sm_100 of 32.
        a_scales: float8_e4m3fn, blocked layout of each tile's scales, or None.
        groups: int32 ``(1 + tiles,)``, ``moe.routing.Routing.groups``: the number of tiles in use,
            then the expert of each tile.
        b: uint8 ``(experts, 2, N, K/2)``, gate before up. On sm_90 ``b`` must, and for w4a16 on the
            CPU may, be in the fragment layout instead, ``(experts, 2, ceil(N/64), ceil(K/64), 4,
            32, 16)`` (see ``formats.fragments``); for w4a8, in the folded layout ``(experts, 2,
            ceil(N/64), ceil(K/128), 2, 4, 32, 16)`` (see ``formats.folded``).
        b_scales: float8_e4m3fn, blocked layout of each weight's scales; for weights in fragments,
            uint8 ``(experts, 2, ceil(N/64), ceil(K/64), 4, 8, 8)``; for folded weights, int32
            ``(experts, 2, ceil(N/64), ceil(K/128), 4, 32)``. The dtype tells the layouts apart.
        alpha: float32 ``(experts, 2)``: the global scale of each weight, times the activation's
            global scale if all rows share one. Gate and up may differ. For folded weights float32
            ``(experts, 2, N)``: the same, times each row's ``row_scale``.
        row_scale: float32 ``(tiles, T)``, the activation's per-row global scales, if any.
        bias: bfloat16, float16 or float32 ``(experts, 2, N)``, added to the gate and up products
            before the activation.
        activation: gated activation function, whose name is in ``activation.GATED``.
        out_dtype: bfloat16, float16 or float32; left out with ``output``.
        n: number of rows of each weight; needed with weights in fragments or folded, which are
            padded to whole tiles.
        terms: number of NVFP4 terms of ``a`` (see ``formats.terms``), 1 to 4; with more than one,
            ``a`` is ``(tiles, terms, T, K/2)``, and ``a_scales`` as returned by ``moe_dispatch``.
        output: None; ``Static`` for an NVFP4 result, quantised for the next GEMM from the
            float32 values: then the weights must be blocked, ``n`` is left out, and N must be a
            multiple of 16; or, with folded weights, ``StaticFp8`` for an E4M3 result. The scale is
            float32 ``(experts,)``, the input scale of each expert's next GEMM.

    Returns:
        ``(tiles, T, N)`` of ``out_dtype``. With ``StaticFp8``: float8_e4m3fn ``(tiles, T,
        ceil(N/64)·64)`` in the order of ``formats.fp8_rows``, zeros past N. With ``Static``:
        ``data`` uint8 ``(tiles, T, N/2)`` and ``scales`` float8_e4m3fn in the blocked layout of
        each tile; if ``output`` has several terms, both are as returned by ``moe_dispatch``. Unused
        tiles are not written.

    Raises:
        InvalidArgument: shapes, dtypes or devices do not match; the message names the argument.
        NoKernelError: no kernel for this device and mode; the message lists existing kernels.
    """
    operands = a, a_scales, groups, b, b_scales, alpha, row_scale, bias
    activates = activation_arguments(activation)
    if output is None:
        return torch.ops.nvfp4.grouped_silu_mul_gemm(*operands, n, *activates, out_dtype, terms)
    output = check_output(output, out_dtype)
    if isinstance(output, StaticFp8):
        return torch.ops.nvfp4.grouped_silu_mul_gemm_fp8(*operands, n, output.scale, *activates)
    scale, out_terms = output
    check_no_n(n)
    return torch.ops.nvfp4.grouped_silu_mul_gemm_quantized(
        *operands, scale, *activates, terms, out_terms
    )


@torch.library.custom_op(
    "nvfp4::grouped_silu_mul_gemm",
    mutates_args=(),
    schema=f"({OPERANDS}, SymInt? n, {ACTIVATION}, ScalarType out_dtype, int terms) -> Tensor",
)
def _grouped_silu_mul_gemm(*arguments: Any) -> Tensor:
    out, _ = run_grouped(KERNELS, call_of(*arguments), gated=True)
    return out


_grouped_silu_mul_gemm.register_fake(fake_grouped)


@torch.library.custom_op(
    "nvfp4::grouped_silu_mul_gemm_quantized",
    mutates_args=(),
    schema=(
        f"({OPERANDS}, Tensor out_global_scale, {ACTIVATION}, int terms, int out_terms) -> "
        "(Tensor, Tensor)"
    ),
)
def _grouped_silu_mul_gemm_quantized(*arguments: Any) -> tuple[Tensor, Tensor]:
    return run_quantized(KERNELS, arguments, gated=True)


_grouped_silu_mul_gemm_quantized.register_fake(fake_quantized)


@torch.library.custom_op(
    "nvfp4::grouped_silu_mul_gemm_fp8",
    mutates_args=(),
    schema=f"({OPERANDS}, SymInt? n, Tensor out_scale, {ACTIVATION}) -> Tensor",
)
def _grouped_silu_mul_gemm_fp8(*arguments: Any) -> Tensor:
    return run_fp8(KERNELS, arguments, gated=True)


_grouped_silu_mul_gemm_fp8.register_fake(fake_fp8)
