"""Products with NVFP4 weights: ``gemm``, ``gemv`` and ``silu_mul_gemm``."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvfp4_kernels.activation import SILU, Activation
from nvfp4_kernels.formats.fragments import fragment_shapes, from_fragments, to_fragments
from nvfp4_kernels.formats.output import Static
from tests.fuzz.bounds import SMALLEST, ULP, linear_scales, near, quantized
from tests.fuzz.draw import BF16, FP16, FP32, Draw
from tests.fuzz.ops import Given, Op
from tests.test_kernels import oracle
from tests.test_kernels.oracle import Float64, float64, unpack

Value = tuple[Float64, Float64]  # value, and its float32 error bound


# --- drawing --------------------------------------------------------------------------------------


def draw_operand(draw: Draw, *shape: int, terms: int = 1) -> tuple[Tensor, Tensor]:
    """NVFP4 data and blocked scales; an occasional scale is zero, the largest value, or NaN."""
    stacked = shape if terms == 1 else (*shape[:-2], terms, *shape[-2:])
    data = draw.integers(0, 256, (*stacked[:-1], stacked[-1] // 2), torch.uint8)
    scales = 2.0 ** draw.rng.uniform(-6, 6, (*stacked[:-1], stacked[-1] // 16))
    if scales.size and draw.chance(0.3):
        flat = scales.reshape(-1)
        flat[int(draw.rng.integers(scales.size))] = draw.one(0.0, 448.0, 2.0**-9, np.nan)
    linear = oracle.e4m3(scales)
    return data, oracle.blocked(linear if terms == 1 else oracle.stacked(linear))


def draw_weight(draw: Draw, batch: Sequence[int], n: int, k: int, fragments: bool) -> Any:
    if not fragments:
        return draw_operand(draw, *batch, n, k)
    count = int(np.prod(batch, dtype=int))
    parts = []
    for _ in range(count):
        scales = oracle.e4m3(2.0 ** draw.rng.uniform(-6, 6, (n, k // 16)))
        parts.append(to_fragments(draw.integers(0, 256, (n, k // 2), torch.uint8), scales))
    return tuple(
        torch.stack(each).view(*batch, *each[0].shape) for each in zip(*parts, strict=True)
    )


def draw_activation(draw: Draw, *shape: int, a16: bool, terms: int) -> tuple[Tensor, Tensor | None]:
    if a16:
        return draw.strided(draw.floats(shape, draw.one(BF16, FP16), 3)), None
    return draw_operand(draw, *shape, terms=terms)


def draw_factors(draw: Draw, *shape: int) -> Tensor:
    """Positive numbers, occasionally at an end of the range."""
    factors = torch.from_numpy(draw.rng.uniform(1e-5, 1e-3, shape)).float()
    if factors.numel() and draw.chance(0.15):
        factors.view(-1)[0] = draw.one(0.0, 2.0**-126, 1e30)
    return factors


def _problem(draw: Draw, quantizes: bool, most_rows: int) -> tuple[Given, tuple[int, ...], Any]:
    """Arguments common to the GEMMs (activation, row scale, terms); sizes; weight layout."""
    batch, m = draw.batch(), draw.number(0, 3) if draw.chance(0.2) else draw.number(1, most_rows)
    if draw.gpu:
        batch = ()
    n, k = draw.number(1, 40) * draw.one(1, 4, 16), 16 * draw.number(1, 20)
    if quantizes or draw.gpu:
        n = 16 * (1 + n // 16)
    if draw.gpu:
        k = 32 * (1 + k // 64)
    a16 = not draw.gpu and draw.chance(0.3)
    terms = 1 if a16 else draw.one(1, 1, 2, 3, 4)
    a, a_scales = draw_activation(draw, *batch, m, k, a16=a16, terms=terms)
    given: Given = {"a": a, "a_scales": a_scales, "row_scale": None, "terms": terms}
    if not a16 and draw.chance(0.4):
        rows = torch.from_numpy(draw.rng.uniform(0.1, 3.0, (*batch, m))).float()
        given["row_scale"] = rows
    fragments = a16 and not quantizes and draw.chance(0.5)
    weights = () if fragments or draw.chance(0.6) else batch
    return given, (*batch, n, k), (weights, fragments)


def draw_gemm(draw: Draw, most_rows: int) -> Given:
    quantizes = draw_quantizes(draw)
    given, (*_, n, k), (batch, fragments) = _problem(draw, quantizes, most_rows)
    weight = draw_weight(draw, batch, n, k, fragments)
    given["b"], given["b_scales"] = weight
    cuts = sorted(draw.number(0, n) for _ in range(draw.one(0, 0, 1, 2, 7)))
    if draw.gpu:
        cuts = []
    sizes = np.diff([0, *cuts, n]).tolist()
    given |= {"alpha": draw_factors(draw, len(sizes)), "shard_sizes": sizes, "bias": None}
    if draw.chance(0.4):
        given["bias"] = draw.floats((n,), draw.one(BF16, FP16, FP32), 3)
    return given | _outputs(draw, quantizes)


def draw_silu_mul_gemm(draw: Draw) -> Given:
    quantizes = draw_quantizes(draw)
    given, (*_, n, k), (batch, fragments) = _problem(draw, quantizes, 150)
    for name in ("b1", "b2"):
        given[name], given[f"{name}_scales"] = draw_weight(draw, batch, n, k, fragments)
    given["alpha"] = draw_factors(draw, 2)
    if not quantizes and (fragments or draw.chance(0.2)):
        given["n"] = n
    return given | _outputs(draw, quantizes)


def draw_quantizes(draw: Draw) -> bool:
    """Whether the result is NVFP4; False for a kernel, for which ``_outputs`` draws the format."""
    return not draw.gpu and draw.chance(0.4)


def _outputs(draw: Draw, quantizes: bool) -> Given:
    if not quantizes and not (draw.gpu and draw.chance(0.4)):
        return {"out_dtype": draw.one(BF16, FP16, FP32)}
    return {"output": Static(draw.scalar(0.01), draw.one(1, 1, 2, 3))}


# --- the formula ----------------------------------------------------------------------------------


def activation_values(a: Tensor, a_scales: Tensor | None, terms: int) -> Float64:
    """Values of an activation without its global scale: ``(..., M, K)``."""
    if a_scales is None:
        return float64(a)
    *batch, rows, packed = a.shape
    outer = batch if terms == 1 else batch[:-1]
    linear = linear_scales(a_scales, outer, rows, 2 * packed, terms)
    values = unpack(a) * np.repeat(linear, 16, axis=-1)
    return values if terms == 1 else values.sum(-3)


def weight_values(b: Tensor, b_scales: Tensor, n: int, k: int) -> Float64:
    """Values of one or more weights ``(..., N, K)``, in the blocked or the fragment layout."""
    if b_scales.dtype != torch.uint8:
        linear = linear_scales(b_scales, list(b.shape[:-2]), b.shape[-2], 2 * b.shape[-1], 1)
        return unpack(b) * np.repeat(linear, 16, axis=-1)
    data, _ = fragment_shapes(n, k)
    batch = b.shape[: b.ndim - len(data)]
    parts = (
        [
            from_fragments(*part, n, k)
            for part in zip(b.flatten(0, -6), b_scales.flatten(0, -6), strict=True)
        ]
        if batch
        else [from_fragments(b, b_scales, n, k)]
    )
    values = [oracle.dequantize(*part, 1.0) for part in parts]
    return np.stack(values).reshape(*batch, n, k)


def product(
    a: Float64,
    b: Float64,
    factors: Float64,
    row_scale: Tensor | None,
    bias: Tensor | None,
    adds: int,
) -> Value:
    """``(A · Bᵀ) · factors · row_scale + bias``, with ``adds`` float32 additions in any order.

    The value is exact; the error counts one rounding for each addition, and three for the factors
    and the bias.
    """
    rows = 1.0 if row_scale is None else float64(row_scale)[..., None]
    added = 0.0 if bias is None else float64(bias)
    with np.errstate(all="ignore"):
        value = oracle.product(a, b) * factors * rows
        size = oracle.product(np.abs(a), np.abs(b)) * np.abs(factors) * np.abs(rows)
        error = (adds + 4) * ULP / 2 * (size + np.abs(added)) + SMALLEST * (1 + np.abs(rows))
        return value + added, error


def activated(gate: Value, up: Value | None, activation: Activation | None) -> Value:
    """Values after the activation function, with the propagated errors."""
    if activation is None:
        return gate
    with np.errstate(all="ignore"):
        return _activated(gate, up, activation)


def _activated(gate: Value, up: Value | None, activation: Activation) -> Value:
    (g, g_error), limit = gate, activation.limit
    if up is None:
        out = activation.ungated(torch.from_numpy(g)).numpy()
        slope = 2 * np.abs(g) + g_error if activation.name == "relu2" else 1.2
        return out, slope * g_error + 8 * ULP * (np.abs(out) + np.abs(g)) + SMALLEST
    u, u_error = up
    bounded = np.clip(u, -limit, limit) if limit is not None else u
    if activation.name == "situ" and limit is not None:
        bounded = limit * np.tanh(u / limit)
    out = activation.gated(torch.from_numpy(g), torch.from_numpy(u)).numpy()
    factor = np.abs(bounded + activation.beta)
    # |f| is at most |g|, also in float32; f's slope is at most 1.2, or with tanh's factor 1 + alpha
    # / 4.
    slope = 1.2 + (abs(activation.alpha) / 4 if activation.name == "situ" else 0)
    f = np.abs(g) + g_error
    if limit is not None and activation.name == "swigluoai_uninterleave":
        f = np.where(g > limit, limit + g_error, f)
    error = slope * g_error * (factor + u_error) + f * u_error
    return out, error + 8 * ULP * f * (factor + u_error + 1) + SMALLEST


def _result(given: Given, result: Any, value: Value) -> None:
    expected, error = value
    if given.get("output") is None:
        near("out", result, expected, error)
        return
    low, high = expected - error, expected + error
    quantized(*result, low, high, *given["output"])


def check_gemm(given: Given, result: Any, after: Given) -> None:
    terms, sizes = given["terms"], list(given["shard_sizes"])
    a = activation_values(given["a"], given["a_scales"], terms)
    b = weight_values(given["b"], given["b_scales"], sum(sizes), a.shape[-1])
    factors = np.repeat(float64(given["alpha"]), sizes)
    adds = terms * a.shape[-1]
    _result(given, result, product(a, b, factors, given["row_scale"], given["bias"], adds))


def check_silu_mul_gemm(given: Given, result: Any, after: Given) -> None:
    terms, alpha = given["terms"], float64(given["alpha"])
    a = activation_values(given["a"], given["a_scales"], terms)
    n = given.get("n") or given["b1"].shape[-2]
    both = []
    for name, factor in zip(("b1", "b2"), alpha, strict=True):
        b = weight_values(given[name], given[f"{name}_scales"], n, a.shape[-1])
        adds = terms * a.shape[-1]
        both.append(product(a, b, factor, given["row_scale"], None, adds))
    _result(given, result, activated(*both, SILU))


OPS = {
    "gemm": Op(partial(draw_gemm, most_rows=150), check_gemm),
    "gemv": Op(partial(draw_gemm, most_rows=32), check_gemm),
    "silu_mul_gemm": Op(draw_silu_mul_gemm, check_silu_mul_gemm),
}
