"""Custom ops of a linear layer: a single dispatch from the input to the result.

Inputs are 16-bit tensors or already quantised; results are 16-bit or quantised for the next layer.
Each op calls the kernels that the layer's plan names, and checks nothing: weights were checked at
load, and ``Nvfp4LinearBase.apply`` checks the input's dtype and width. The whole pass is one op
because the kernel's tile depends on the number of tokens, which ``torch.compile`` must not
specialise on.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library, register_fake

from nvfp4_kernels.dispatch import load_target
from nvfp4_kernels.formats.output import PerToken, PerTokenFp8, Static, StaticFp8
from nvfp4_kernels.gemm.arguments import fp8_result, quantized_result, weight_layout
from nvfp4_kernels.gemm.call import GemmCall, SiluMulGemmCall
from nvfp4_kernels.quantize.call import QuantizeCall
from vllm_fp4_plugin.ops.define import define, readable

# An op library, not torch.library.custom_op, whose wrappers cost as much as a dispatch.
_LIBRARY = Library("nvfp4_tc", "FRAGMENT")


class LinearCall(NamedTuple):
    """Arguments of ``linear``, in the order of its schema.

    Attributes:
        x: bfloat16 or float16 ``(..., K)``, or the data of a ``QuantizedInput``.
        x_scales: block scales of a ``QuantizedInput`` in NVFP4; None: x is in 16 bits or E4M3.
        row_scale: row scale of a ``QuantizedInput``, or None.
        weight: uint8 ``(N, K/2)``, or the data in fragment or folded layout.
        weight_scale: float8_e4m3fn, blocked layout, or uint8, fragment layout; int32, folded
            layout: activations are E4M3.
        alpha: float32 ``(S,)``, factor of each shard's product: the weight's global scale, times
            ``input_scale`` if given; for a folded weight ``(N,)``, a factor of each row.
        shard_sizes: widths of the shards, S numbers adding up to N.
        input_scale: float32 ``()``, calibrated; None: a scale per token, or 16-bit activations.
        bias: ``(N,)`` or None.
        kernel: target of a kernel of ``gemm``, see ``nvfp4_kernels.dispatch.Kernel``.
        quantizer: target of a kernel of ``quantize``; None: activations stay in 16 bits.
        terms: number of NVFP4 values whose sum represents each element of x.
        dtype: dtype of the result; equals x's if x is in 16 bits.
    """

    x: Tensor
    x_scales: Tensor | None
    row_scale: Tensor | None
    weight: Tensor
    weight_scale: Tensor
    alpha: Tensor
    shard_sizes: Sequence[int]
    input_scale: Tensor | None
    bias: Tensor | None
    kernel: str
    quantizer: str | None
    terms: int
    dtype: torch.dtype


class SiluMulLinearCall(NamedTuple):
    """Arguments of ``silu_mul_linear``, in the order of its schema.

    Arguments not listed here are as in ``LinearCall``.

    Attributes:
        weight: uint8 ``(2, N, K/2)``, gate and up projection, or ``(2, …)`` in fragment or folded
            layout.
        weight_scale: float8_e4m3fn ``(2, …)``, each projection in blocked layout; or uint8,
            fragment layout; or int32, folded layout.
        alpha: float32 ``(2,)``; for folded weights ``(2, N)``.
        n: N without the padding of the fragment and folded layouts.
        kernel: target of a kernel of ``silu_mul_gemm``.
        output: format of a result quantised for the next layer, not in the schema; None: the result
            is of ``dtype``.
    """

    x: Tensor
    x_scales: Tensor | None
    row_scale: Tensor | None
    weight: Tensor
    weight_scale: Tensor
    alpha: Tensor
    n: int
    input_scale: Tensor | None
    kernel: str
    quantizer: str | None
    terms: int
    dtype: torch.dtype
    output: Static | StaticFp8 | None = None


def _operand(call: LinearCall | SiluMulLinearCall) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Input in the form that the GEMM takes: data, block scales and row scales.

    A 16-bit input is flattened to ``(tokens, K)`` and, if the call has a quantizer, quantised.
    """
    x = call.x
    if _is_quantized(x, call.x_scales):
        return x, call.x_scales, call.row_scale
    flat = readable(x.reshape(-1, x.shape[-1]))
    if call.quantizer is None:
        return flat, None, None
    scale, terms, quantize = call.input_scale, call.terms, load_target(call.quantizer)
    if weight_layout(call.weight_scale) == "folded":
        to_fp8 = PerTokenFp8() if scale is None else StaticFp8(scale)
        data, *row_scales = quantize(QuantizeCall(flat, to_fp8))
        return data, None, row_scales[0] if row_scales else None
    output = PerToken(terms) if scale is None else Static(scale, terms)
    data, scales, *row_scales = quantize(QuantizeCall(flat, output))
    return data, scales, row_scales[0] if row_scales else None


def _is_quantized(x: Tensor, x_scales: Tensor | None) -> bool:
    """Whether an op's input is the data of a ``QuantizedInput``, NVFP4 or E4M3."""
    return x_scales is not None or x.dtype == torch.float8_e4m3fn


def _result_shape(x: Tensor, x_scales: Tensor | None, n: int) -> tuple[int, ...]:
    """Shape of a 16-bit result with ``n`` columns; 2-D for a quantised input."""
    return (x.shape[-2], n) if _is_quantized(x, x_scales) else (*x.shape[:-1], n)


def _linear(*arguments: Any) -> Tensor:
    """Compute ``x · weightᵀ + bias``; ``arguments`` are the fields of a ``LinearCall``.

    Returns:
        ``(..., N)`` of ``dtype``; ``(M, N)`` for a quantised input.
    """
    call = LinearCall(*arguments)
    a, a_scales, row_scale = _operand(call)
    out, _ = load_target(call.kernel)(
        GemmCall(
            a, a_scales, call.weight, call.weight_scale, call.alpha, call.shard_sizes, row_scale,
            call.bias, call.dtype, call.terms,
        )
    )  # fmt: skip
    return out.view(_result_shape(call.x, call.x_scales, out.shape[-1]))


def _silu_mul_linear(*arguments: Any) -> Tensor:
    """Compute ``silu(x · gateᵀ) · (x · upᵀ)``.

    ``arguments`` are the fields of a ``SiluMulLinearCall`` but ``output``.

    Returns:
        ``(..., N)`` of ``dtype``; ``(M, N)`` for a quantised input.
    """
    call = SiluMulLinearCall(*arguments)
    out, _ = _silu_mul_product(call)
    return out.view(_result_shape(call.x, call.x_scales, call.n))


def _silu_mul_linear_quantized(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Compute ``silu_mul_linear`` with a result quantised for the next layer.

    ``arguments`` are the fields of a ``SiluMulLinearCall`` up to ``terms``; then the input scale of
    the next layer, float32 ``()``, and the number of NVFP4 values whose sum represents each element
    of the result.

    Returns:
        Data and block scales of the result.
    """
    *given, out_scale, out_terms = arguments
    output = Static(out_scale, out_terms)
    return _silu_mul_product(SiluMulLinearCall._make((*given, torch.float32, output)))


def _silu_mul_linear_fp8(*arguments: Any) -> Tensor:
    """Compute ``silu_mul_linear`` with an E4M3 result for the next layer.

    ``arguments`` are the fields of a ``SiluMulLinearCall`` up to ``terms``; then the input scale of
    the next layer, float32 ``()``.

    Returns:
        float8_e4m3fn ``(M, N)``, N padded: see ``nvfp4_kernels.formats.fp8_rows``.
    """
    *given, out_scale = arguments
    out, _ = _silu_mul_product(
        SiluMulLinearCall._make((*given, torch.float32, StaticFp8(out_scale)))
    )
    return out


def _silu_mul_product(call: SiluMulLinearCall) -> Any:
    """Run the kernel; return the result and None or, if NVFP4, its data and block scales."""
    a, a_scales, row_scale = _operand(call)
    weight, scales = call.weight, call.weight_scale
    return load_target(call.kernel)(
        SiluMulGemmCall(
            a, a_scales, weight[0], scales[0], weight[1], scales[1], call.alpha, row_scale, call.n,
            call.dtype, call.terms, call.output,
        )
    )  # fmt: skip


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
silu_mul_linear_fp8 = define(
    _LIBRARY,
    "silu_mul_linear_fp8",
    f"{_WEIGHT}, SymInt n, Tensor? input_scale, {_KERNELS}, Tensor out_scale",
    _silu_mul_linear_fp8,
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


@register_fake("nvfp4_tc::silu_mul_linear_fp8", lib=_LIBRARY)
def _(
    x: Tensor, x_scales: Tensor | None, row_scale: Tensor | None, weight: Tensor,
    weight_scale: Tensor, alpha: Tensor, n: int, *rest: Any,
) -> Tensor:  # fmt: skip
    return fp8_result(x.reshape(-1, x.shape[-1]), n)
