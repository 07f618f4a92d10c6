"""Custom ops of a linear layer: a single dispatch from the input to the result.

Inputs are 16-bit tensors or already quantised; results are 16-bit or quantised for the next layer.
Each op calls the kernels that the layer's plan names, and checks nothing: weights were checked at
load, and ``Nvfp4LinearBase.apply`` checks the input's dtype and width. The whole pass is one op
because the kernel's tile depends on the number of tokens, which ``torch.compile`` must not
specialise on.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_fake

from nvfp4_kernels.gemm.arguments import quantized_result
from nvfp4_kernels.quantize.call import QuantizeCall
from vllm_fp4_plugin.ops.define import define, function, readable

# An op library, not torch.library.custom_op, whose wrappers cost as much as a dispatch.
_LIBRARY = Library("nvfp4_tc", "FRAGMENT")


def _operand(
    x: Tensor,
    x_scales: Tensor | None,
    row_scale: Tensor | None,
    input_scale: Tensor | None,
    quantizer: str | None,
    terms: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Data, block scales and row scales of the input, flattened to ``(tokens, K)``."""
    if x_scales is not None:
        return x, x_scales, row_scale
    flat = readable(x.reshape(-1, x.shape[-1]))
    if quantizer is None:
        return flat, None, None
    data, scales, *row_scales = function(quantizer)(QuantizeCall(flat, input_scale, terms))
    return data, scales, row_scales[0] if row_scales else None


def _result_shape(x: Tensor, x_scales: Tensor | None, n: int) -> tuple[int, ...]:
    """Shape of a 16-bit result with ``n`` columns; 2-D for a quantised input."""
    return (*x.shape[:-1], n) if x_scales is None else (x.shape[-2], n)


def _of_terms(quantizer: str | None, terms: int) -> tuple[int, ...]:
    """Last argument of a GEMM kernel; kernels of 16-bit activations take no terms."""
    return () if quantizer is None else (terms,)


def _linear(
    x: Tensor,
    x_scales: Tensor | None,
    row_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    shard_sizes: Sequence[int],
    input_scale: Tensor | None,
    bias: Tensor | None,
    kernel: str,
    quantizer: str | None,
    terms: int,
    dtype: torch.dtype,
) -> Tensor:
    """Compute ``x · weightᵀ + bias`` in NVFP4.

    Args:
        x: bfloat16 or float16 ``(..., K)``, or the data of a ``QuantizedInput``.
        x_scales: block scales of a ``QuantizedInput``; None: x is in 16 bits.
        row_scale: row scale of a ``QuantizedInput``, or None.
        weight: uint8 ``(N, K/2)``, or the data in fragment layout.
        weight_scale: float8_e4m3fn, blocked layout, or uint8, fragment layout.
        alpha: float32 ``(S,)``, one factor per shard; includes ``input_scale`` if given.
        shard_sizes: widths of the shards, S numbers adding up to N.
        input_scale: float32 ``()``, calibrated; None: a scale per token, or 16-bit activations.
        bias: ``(N,)`` or None.
        kernel: target of a kernel of ``gemm``, see ``nvfp4_kernels.dispatch.Kernel``.
        quantizer: target of a kernel of ``quantize``; None: activations stay in 16 bits.
        terms: NVFP4 values summed for each element of x.
        dtype: dtype of the result; equals x's if x is in 16 bits.

    Returns:
        ``(..., N)`` of ``dtype``; ``(M, N)`` for a quantised input.
    """
    a, a_scales, row_scale = _operand(x, x_scales, row_scale, input_scale, quantizer, terms)
    out = function(kernel)(
        a, a_scales, weight, weight_scale, alpha, shard_sizes, row_scale, bias, dtype,
        *_of_terms(quantizer, terms),
    )  # fmt: skip
    return out.view(_result_shape(x, x_scales, out.shape[-1]))


def _silu_mul_linear(
    x: Tensor,
    x_scales: Tensor | None,
    row_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    n: int,
    input_scale: Tensor | None,
    kernel: str,
    quantizer: str | None,
    terms: int,
    dtype: torch.dtype,
) -> Tensor:
    """Compute ``silu(x · gateᵀ) · (x · upᵀ)`` in NVFP4.

    Args:
        x: see ``linear``; likewise ``x_scales`` and ``row_scale``.
        x_scales: block scales of a ``QuantizedInput``.
        row_scale: row scale of a ``QuantizedInput``.
        weight: uint8 ``(2, N, K/2)``, gate and up projection, or ``(2, …)`` in fragment layout.
        weight_scale: float8_e4m3fn ``(2, …)``, blocked layout of each, or uint8, fragment layout.
        alpha: float32 ``(2,)``.
        n: N without the padding of the fragment layout.
        input_scale: as for ``linear``.
        kernel: target of a kernel of ``silu_mul_gemm``.
        quantizer: as for ``linear``.
        terms: as for ``linear``.
        dtype: as for ``linear``.

    Returns:
        ``(..., N)`` of ``dtype``; ``(M, N)`` for a quantised input.
    """
    a, a_scales, row_scale = _operand(x, x_scales, row_scale, input_scale, quantizer, terms)
    out, _ = function(kernel)(
        a, a_scales, weight[0], weight_scale[0], weight[1], weight_scale[1], alpha, row_scale, n,
        None, dtype, *_of_terms(quantizer, terms),
    )  # fmt: skip
    return out.view(_result_shape(x, x_scales, n))


def _silu_mul_linear_quantized(
    x: Tensor,
    x_scales: Tensor | None,
    row_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    n: int,
    input_scale: Tensor | None,
    kernel: str,
    quantizer: str | None,
    terms: int,
    out_scale: Tensor,
    out_terms: int,
) -> tuple[Tensor, Tensor]:
    """Compute ``silu_mul_linear`` with a result quantised for the next layer.

    Args:
        x: see ``silu_mul_linear``; likewise all arguments but the last two.
        x_scales: block scales of a ``QuantizedInput``.
        row_scale: row scale of a ``QuantizedInput``.
        weight: gate and up projection.
        weight_scale: block scales of each projection.
        alpha: alpha of each projection.
        n: N.
        input_scale: calibrated scale, or None.
        kernel: target of the GEMM kernel.
        quantizer: target of the kernel that quantises the input, or None.
        terms: terms of the input.
        out_scale: float32 ``()``, input scale of the next layer.
        out_terms: NVFP4 values summed for each element of the result.

    Returns:
        Data and block scales.
    """
    a, a_scales, row_scale = _operand(x, x_scales, row_scale, input_scale, quantizer, terms)
    data, scales = function(kernel)(
        a, a_scales, weight[0], weight_scale[0], weight[1], weight_scale[1], alpha, row_scale, n,
        out_scale, torch.float32, terms, out_terms,
    )  # fmt: skip
    return data, scales


_WEIGHT = (
    "Tensor x, Tensor? x_scales, Tensor? row_scale, Tensor weight, Tensor weight_scale, "
    "Tensor alpha"
)
_KERNELS = "str kernel, str? quantizer, int terms"

linear = define(
    _LIBRARY,
    "linear",
    f"{_WEIGHT}, SymInt[] shard_sizes, Tensor? input_scale, Tensor? bias, {_KERNELS}, "
    "ScalarType dtype",
    _linear,
)
silu_mul_linear = define(
    _LIBRARY,
    "silu_mul_linear",
    f"{_WEIGHT}, SymInt n, Tensor? input_scale, {_KERNELS}, ScalarType dtype",
    _silu_mul_linear,
)
silu_mul_linear_quantized = define(
    _LIBRARY,
    "silu_mul_linear_quantized",
    f"{_WEIGHT}, SymInt n, Tensor? input_scale, {_KERNELS}, Tensor out_scale, int out_terms",
    _silu_mul_linear_quantized,
    "(Tensor, Tensor)",
)


@register_fake("nvfp4_tc::linear", lib=_LIBRARY)
def _(
    x: Tensor, x_scales: Tensor | None, row_scale: Tensor | None, weight: Tensor,
    weight_scale: Tensor, alpha: Tensor, shard_sizes: Sequence[int], *rest: Any,
) -> Tensor:  # fmt: skip
    return x.new_empty(_result_shape(x, x_scales, sum(shard_sizes)), dtype=rest[-1])


@register_fake("nvfp4_tc::silu_mul_linear", lib=_LIBRARY)
def _(
    x: Tensor, x_scales: Tensor | None, row_scale: Tensor | None, weight: Tensor,
    weight_scale: Tensor, alpha: Tensor, n: int, *rest: Any,
) -> Tensor:  # fmt: skip
    return x.new_empty(_result_shape(x, x_scales, n), dtype=rest[-1])


@register_fake("nvfp4_tc::silu_mul_linear_quantized", lib=_LIBRARY)
def _(
    x: Tensor, x_scales: Tensor | None, row_scale: Tensor | None, weight: Tensor,
    weight_scale: Tensor, alpha: Tensor, n: int, *rest: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows = x.reshape(-1, x.shape[-1]) if x_scales is None else x
    return quantized_result(rows, n, 1 if x_scales is None else rest[-3], rest[-1])
