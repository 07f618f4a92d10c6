"""``grouped_silu_mul_gemm``: gate and up GEMMs of every expert and the activation in one pass."""

from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.activation import SILU, Activation
from nvfp4_kernels.gemm.grouped.arguments import (
    ACTIVATION,
    OPERANDS,
    GroupedOperands,
    check_quantized,
    fake_grouped,
    fake_quantized,
    run_grouped,
)
from nvfp4_kernels.gemm.grouped.op import activation_arguments
from nvfp4_kernels.gemm.grouped_silu_mul.kernels import KERNELS


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
) -> Tensor:
    """``act(alpha[e, 0] · A · Gateᵀ) · (alpha[e, 1] · A · Upᵀ)`` of each token tile's expert e.

    Formed in float32, rounded once. The routing is read on the device.

    Args:
        a: w4a4: uint8 ``(tiles, T, K/2)``; w4a16 (``a_scales`` None): 16-bit floats
            ``(tiles, T, K)``; T one of ``routing.TILE_TOKENS``.
        a_scales: float8_e4m3fn, blocked layout of each tile's scales, or None.
        groups: int32 ``(1 + tiles,)``, of a ``Routing``.
        b: uint8 ``(experts, 2, N, K/2)``, gate before up; w4a16 on CPU and sm_90 also in fragments,
            ``(experts, 2, ceil(N/64), ceil(K/64), 4, 32, 16)``.
        b_scales: float8_e4m3fn, blocked layout of each weight's scales; of fragments uint8. The
            dtype tells the layouts apart.
        alpha: float32 ``(experts, 2)``: the global scale of each weight, times the activation's
            global scale if that is a single number. Gate and up may differ.
        row_scale: float32 ``(tiles, T)``, the activation's per-row global scales, if any.
        bias: bfloat16, float16 or float32 ``(experts, 2, N)``, added to gate and up.
        activation: gated activation, one of ``activation.GATED``.
        out_dtype: bfloat16, float16 or float32.
        n: rows of each weight; needed with fragments, which are padded to whole tiles.
        terms: number of NVFP4 terms of the activation, 1 to 4; with more than one, ``a`` is
            ``(tiles, terms, T, K/2)``, and ``a_scales`` as ``moe_dispatch`` gives it.

    Returns:
        ``(tiles, T, N)`` of ``out_dtype``; unused tiles are not written.

    Raises:
        InvalidArgument: shapes, dtypes or devices that do not fit, named.
        NoKernelError: no kernel for this device and mode; the message lists existing kernels.
    """
    return torch.ops.nvfp4.grouped_silu_mul_gemm(
        a, a_scales, groups, b, b_scales, alpha, row_scale, bias, n,
        *activation_arguments(activation), out_dtype, terms,
    )  # fmt: skip


def grouped_silu_mul_gemm_quantized(
    a: Tensor,
    a_scales: Tensor | None,
    groups: Tensor,
    b: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    out_global_scale: Tensor,
    *,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    activation: Activation = SILU,
    terms: int = 1,
    out_terms: int = 1,
) -> tuple[Tensor, Tensor]:
    """``grouped_silu_mul_gemm`` with the result quantised, from the float32 values.

    Arguments as for ``grouped_silu_mul_gemm``, without fragments, N a multiple of 16.
    ``out_global_scale``, float32 ``(experts,)``: the input scale of each expert's next GEMM.
    ``out_terms``, 1 to 4: number of NVFP4 terms of the result.

    Returns:
        ``data`` uint8 ``(tiles, T, N/2)`` and ``scales`` float8_e4m3fn in the blocked layout of
        each tile, as arguments of ``grouped_gemm``; with several terms, as returned by
        ``moe_dispatch``.

    Raises:
        InvalidArgument, NoKernelError: as ``grouped_silu_mul_gemm``.
    """
    return torch.ops.nvfp4.grouped_silu_mul_gemm_quantized(
        a, a_scales, groups, b, b_scales, alpha, row_scale, bias, out_global_scale,
        *activation_arguments(activation), terms, out_terms,
    )  # fmt: skip


@torch.library.custom_op(
    "nvfp4::grouped_silu_mul_gemm",
    mutates_args=(),
    schema=f"({OPERANDS}, SymInt? n, {ACTIVATION}, ScalarType out_dtype, int terms) -> Tensor",
)
def _grouped_silu_mul_gemm(*arguments: Any) -> Tensor:
    *operands, n, name, limit, alpha, beta, out_dtype, terms = arguments
    activation = Activation(name, limit, alpha, beta)
    out, _ = run_grouped(
        KERNELS, GroupedOperands(*operands), n, None, activation, out_dtype, terms, gated=True
    )
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
    *given, out_global_scale, name, limit, alpha, beta, terms, out_terms = arguments
    operands = GroupedOperands(*given)
    check_quantized("grouped_silu_mul_gemm_quantized", operands, out_global_scale, out_terms)
    activation = Activation(name, limit, alpha, beta)
    data, scales = run_grouped(
        KERNELS, operands, None, out_global_scale, activation, torch.float32, terms, out_terms,
        gated=True,
    )  # fmt: skip
    assert scales is not None
    return data, scales


_grouped_silu_mul_gemm_quantized.register_fake(fake_quantized)
