"""Custom ops of a linear layer's forward pass: one dispatch from 16-bit input to 16-bit output.

Each calls the kernels that the layer's plan chose, by name, and checks nothing: weights were
checked when they were loaded, and ``Nvfp4LinearBase.apply`` checks the input's dtype and width. All
of it is one op, as which tile a kernel gets depends on the number of tokens, which
``torch.compile`` must not specialise on.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_fake

ALIGNMENT = 32  # bytes: the most that a kernel's thread loads of an input at once

# Of its own, not torch.library.custom_op, whose wrappers take as long as a dispatch.
_LIBRARY = Library("nvfp4_tc", "FRAGMENT")


def function(target: str) -> Callable[..., Any]:
    """Function of a ``Kernel.target``, ``"module:function"``, as its module has it now."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def readable(x: Tensor) -> Tensor:
    """Return ``x`` as kernels read it: a copy if it is columns of a wider matrix, as MLA's are."""
    if x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _operand(
    x: Tensor, input_scale: Tensor | None, quantizer: str | None, terms: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Data, block scales and row scales of the input, flattened to ``(tokens, K)``."""
    flat = readable(x.reshape(-1, x.shape[-1]))
    if quantizer is None:
        return flat, None, None
    if input_scale is None:
        return function(quantizer)(flat, terms)
    return (*function(quantizer)(flat, input_scale, terms), None)


def _of_terms(quantizer: str | None, terms: int) -> tuple[int, ...]:
    """Last argument of a product's kernel; those of 16-bit activations know of no terms."""
    return () if quantizer is None else (terms,)


def _linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    shard_sizes: Sequence[int],
    input_scale: Tensor | None,
    bias: Tensor | None,
    kernel: str,
    quantizer: str | None,
    terms: int,
) -> Tensor:
    """Compute ``x · weightᵀ + bias`` in NVFP4.

    Args:
        x: bfloat16 or float16 ``(..., K)``.
        weight: uint8 ``(N, K/2)``, or the data of its fragments.
        weight_scale: float8_e4m3fn, blocked layout, or uint8, that of fragments.
        alpha: float32 ``(S,)``, one factor per shard; includes ``input_scale`` where there is one.
        shard_sizes: the shards' widths, S numbers adding up to N.
        input_scale: float32 ``()``, calibrated; None: a scale per token, or 16-bit activations.
        bias: ``(N,)`` or None.
        kernel: target of a kernel of ``gemm``, see ``nvfp4_kernels.dispatch.Kernel``.
        quantizer: target of a kernel of ``quantize``, or of ``quantize_per_token`` where there is
            no ``input_scale``; None: activations stay in 16 bits.
        terms: how many NVFP4 values add up to each of x.

    Returns:
        ``(..., N)`` of x's dtype.
    """
    a, a_scales, row_scale = _operand(x, input_scale, quantizer, terms)
    out = function(kernel)(
        a, a_scales, weight, weight_scale, alpha, shard_sizes, row_scale, bias, x.dtype,
        *_of_terms(quantizer, terms),
    )  # fmt: skip
    return out.view(*x.shape[:-1], out.shape[-1])


def _silu_mul_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    n: int,
    input_scale: Tensor | None,
    kernel: str,
    quantizer: str | None,
    terms: int,
) -> Tensor:
    """Compute ``silu(x · gateᵀ) · (x · upᵀ)`` in NVFP4.

    Args:
        x: bfloat16 or float16 ``(..., K)``.
        weight: uint8 ``(2, N, K/2)``, gate and up projection, or ``(2, …)`` the data of their
            fragments.
        weight_scale: float8_e4m3fn ``(2, …)``, the blocked layout of each, or uint8, that of
            fragments.
        alpha: float32 ``(2,)``.
        n: N, which fragments pad.
        input_scale: as for ``linear``.
        kernel: target of a kernel of ``silu_mul_gemm``.
        quantizer: as for ``linear``.
        terms: as for ``linear``.

    Returns:
        ``(..., N)`` of x's dtype.
    """
    a, a_scales, row_scale = _operand(x, input_scale, quantizer, terms)
    out, _ = function(kernel)(
        a, a_scales, weight[0], weight_scale[0], weight[1], weight_scale[1], alpha, row_scale, n,
        None, x.dtype, *_of_terms(quantizer, terms),
    )  # fmt: skip
    return out.view(*x.shape[:-1], out.shape[-1])


def _define(name: str, schema: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # Kernels launch on whatever device their tensors are on, so one registration serves all.
    _LIBRARY.define(f"{name}({schema}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.nvfp4_tc, name).default


linear = _define(
    "linear",
    "Tensor x, Tensor weight, Tensor weight_scale, Tensor alpha, SymInt[] shard_sizes, "
    "Tensor? input_scale, Tensor? bias, str kernel, str? quantizer, int terms",
    _linear,
)
silu_mul_linear = _define(
    "silu_mul_linear",
    "Tensor x, Tensor weight, Tensor weight_scale, Tensor alpha, SymInt n, Tensor? input_scale, "
    "str kernel, str? quantizer, int terms",
    _silu_mul_linear,
)


@register_fake("nvfp4_tc::linear", lib=_LIBRARY)
def _(
    x: Tensor, weight: Tensor, weight_scale: Tensor, alpha: Tensor, shard_sizes: Sequence[int],
    *rest: Any,
) -> Tensor:  # fmt: skip
    return x.new_empty((*x.shape[:-1], sum(shard_sizes)))


@register_fake("nvfp4_tc::silu_mul_linear", lib=_LIBRARY)
def _(x: Tensor, weight: Tensor, weight_scale: Tensor, alpha: Tensor, n: int, *rest: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))
