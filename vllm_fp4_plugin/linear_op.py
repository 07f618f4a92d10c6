"""The ops that a linear layer's forward pass consists of.

Each is one custom op from 16-bit input to 16-bit output: which tile a kernel gets depends on the
number of tokens, which ``torch.compile`` must not specialise on.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from nvfp4_kernels import gemm, quantize, quantize_per_token, silu_mul_gemm

ALIGNMENT = 32  # bytes: the most that a kernel's thread loads of an input at once

# How a layer's input is quantised: with its calibrated scale, a scale per token, or not at all.
Activation = Literal["static", "per-token", "16-bit"]


def _quantized_input(x: Tensor, input_scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    if input_scale is not None:
        return (*quantize(x, input_scale), None)
    return quantize_per_token(x)


def _readable(x: Tensor) -> Tensor:
    """``x`` as kernels read it; a copy of columns of a wider matrix, as MLA has them, for one."""
    if x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _operand(
    x: Tensor, input_scale: Tensor | None, activation: str
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Data, block scales and row scales of the input, flattened to ``(tokens, K)``."""
    flat = _readable(x.reshape(-1, x.shape[-1]))
    return (flat, None, None) if activation == "16-bit" else _quantized_input(flat, input_scale)


@torch.library.custom_op("nvfp4_tc::linear", mutates_args=())
def linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    shard_sizes: Sequence[int],
    input_scale: Tensor | None,
    bias: Tensor | None,
    activation: str,
) -> Tensor:
    """``x · weightᵀ + bias`` in NVFP4.

    Args:
        x: bfloat16 or float16 ``(..., K)``.
        weight: uint8 ``(N, K/2)``, or the data of its fragments.
        weight_scale: float8_e4m3fn, blocked layout, or uint8, that of fragments.
        alpha: float32 ``(S,)``, one factor per shard; includes ``input_scale`` where there is one.
        shard_sizes: the shards' widths, S numbers adding up to N.
        input_scale: float32 ``()`` for ``activation="static"``, else None.
        bias: ``(N,)`` or None.
        activation: an ``Activation``.

    Returns:
        ``(..., N)`` of x's dtype.
    """
    a, a_scales, row_scale = _operand(x, input_scale, activation)
    out = gemm(
        a, a_scales, weight, weight_scale, alpha, shard_sizes,
        row_scale=row_scale, bias=bias, out_dtype=x.dtype,
    )  # fmt: skip
    return out.view(*x.shape[:-1], out.shape[-1])


@linear.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    shard_sizes: Sequence[int],
    input_scale: Tensor | None,
    bias: Tensor | None,
    activation: str,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], sum(shard_sizes)))


@torch.library.custom_op("nvfp4_tc::silu_mul_linear", mutates_args=())
def silu_mul_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    n: int,
    input_scale: Tensor | None,
    activation: str,
) -> Tensor:
    """``silu(x · gateᵀ) · (x · upᵀ)`` in NVFP4.

    Args:
        x: bfloat16 or float16 ``(..., K)``.
        weight: uint8 ``(2, I, K/2)``, gate and up projection, or ``(2, …)`` the data of their
            fragments.
        weight_scale: float8_e4m3fn ``(2, …)``, the blocked layout of each, or uint8, that of
            fragments.
        alpha: float32 ``(2,)``.
        n: I, which fragments pad.
        input_scale: as for ``linear``.
        activation: as for ``linear``.

    Returns:
        ``(..., I)`` of x's dtype.
    """
    a, a_scales, row_scale = _operand(x, input_scale, activation)
    out = silu_mul_gemm(
        a, a_scales, weight[0], weight_scale[0], weight[1], weight_scale[1], alpha,
        row_scale=row_scale, out_dtype=x.dtype, n=n,
    )  # fmt: skip
    return out.view(*x.shape[:-1], out.shape[-1])


@silu_mul_linear.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    n: int,
    input_scale: Tensor | None,
    activation: str,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))
