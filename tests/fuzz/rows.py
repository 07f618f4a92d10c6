"""Row-wise ops: quantisers, norms, a quantising activation, merged segments, rotary embedding.

The merged segments are results of attention to parts of the keys.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvfp4_kernels import PerToken, PerTokenFp8, Static, StaticFp8
from tests.fuzz.bounds import (
    SMALLEST,
    ULP,
    fp8_rows,
    near,
    quantized,
    rounded,
    row_scales,
    row_there,
    same,
    within,
)
from tests.fuzz.draw import BF16, FP16, FP32, Draw
from tests.fuzz.ops import Given, Op
from tests.test_kernels.oracle import Float64, float64

Interval = tuple[Float64, Float64]


def _output(draw: Draw, usual: float) -> Given:
    if not draw.gpu and draw.chance(0.3):  # sm_100 has no kernels that write E4M3
        return {"output": draw.one(StaticFp8(draw.scalar(6 * usual)), PerTokenFp8())}
    terms = draw.one(1, 1, 2, 3, 4)
    return {"output": draw.one(Static(draw.scalar(usual), terms), PerToken(terms))}


def _sizes(draw: Draw) -> tuple[int, ...]:
    most = 3 if draw.gpu else draw.one(3, 12, 70)
    rows = draw.one(draw.number(0, 5), 31, 32, 33, 129) if draw.chance(0.3) else draw.number(1, 9)
    return *draw.batch(), rows, 16 * draw.number(1, most)


def draw_quantize(draw: Draw) -> Given:
    dtype = draw.one(BF16, FP16, FP32)
    x = draw.extremes(draw.floats(_sizes(draw), dtype))
    return {"x": draw.strided(x)} | _output(draw, 0.003)


def draw_silu_mul(draw: Draw) -> Given:
    *rows, half = _sizes(draw)
    x = draw.floats((*rows, 2 * half), draw.one(BF16, FP16, FP32), octaves=4)
    return {"gate_up": draw.strided(x)} | _output(draw, 0.003)


def draw_norm(draw: Draw, adds: bool) -> Given:
    shape, dtype = _sizes(draw), draw.one(BF16, FP16, FP32)
    given: Given = {"x": draw.strided(draw.floats(shape, dtype))}
    if adds:
        given["residual"] = draw.strided(draw.floats(shape, dtype))
    weight = 1 + draw.floats(shape[-1:], FP32, 0) / 4
    given["weight"] = weight.to(draw.one(dtype, FP32))
    given["eps"] = draw.one(1e-5, 1e-6, 0.5) if draw.gpu else draw.one(1e-5, 1e-6, 0.5, 0.0)
    return given | _output(draw, 0.002)


def draw_add_rms_norm(draw: Draw) -> Given:
    shape = draw.number(0, 5), draw.number(1, 70) * (8 if draw.gpu else 1)
    dtype = draw.one(BF16, FP16)
    return {
        "x": draw.strided(draw.floats(shape, dtype)),
        "residual": draw.strided(draw.floats(shape, dtype)),
        "weight": (1 + draw.floats(shape[-1:], FP32, 0) / 4).to(dtype),
        "eps": draw.one(1e-5, 1e-6, 0.5),
    }


def _check_operand(given: Given, result: Any, low: Float64, high: Float64) -> None:
    """Check that quantised values lie between two bounds, with a static scale or one per row."""
    output = given["output"]
    if isinstance(output, StaticFp8):
        fp8_rows(result[0] if isinstance(result, tuple) else result, low, high, output.scale)
        return
    if isinstance(output, PerTokenFp8):
        row_scales(result[1], low, high, 448, 2.0**-126)
        fp8_rows(result[0], low, high, result[1])
        return
    if isinstance(output, PerToken):
        row_scales(result[2], low, high)
    scale = result[2] if isinstance(output, PerToken) else output.global_scale
    quantized(result[0], result[1], low, high, scale, output.terms)


def check_quantize(given: Given, result: Any, after: Given) -> None:
    x = float64(given["x"])
    _check_operand(given, result, x, x)


def silu_mul(gate_up: Tensor) -> Interval:
    """Interval of SiLU-mul, for an exponential that is off by up to two ulp.

    Both SiLU and the product are rounded to the input's dtype.
    """
    gate, up = np.split(float64(gate_up), 2, axis=-1)
    with np.errstate(all="ignore"):
        silu = gate / (1 + np.exp(-gate))
    error = 6 * ULP * np.abs(silu) + 2.0**-118
    ends = [rounded(silu + sign * error, gate_up.dtype) * up for sign in (-1, 1)]
    a, b = (rounded(end, gate_up.dtype) for end in ends)
    return np.minimum(a, b), np.maximum(a, b)


def check_silu_mul(given: Given, result: Any, after: Given) -> None:
    _check_operand(given, result, *silu_mul(given["gate_up"]))


def rms_norm(y: Float64, weight: Tensor, eps: float, dtype: torch.dtype) -> Interval:
    """Interval of the RMS norm over all summation orders of the mean.

    The normalised value is rounded to the weight's dtype, multiplied by the weight, and rounded to
    ``dtype``.
    """
    with np.errstate(all="ignore"):
        inverse = 1 / np.sqrt((y * y).mean(-1, keepdims=True) + eps)
        error = (y.shape[-1] + 8) * ULP
        ends = [rounded(y * inverse * (1 + sign * error), weight.dtype) for sign in (-1, 1)]
        factors = float64(weight)
        a, b = (rounded(end * factors, dtype) for end in ends)
        return np.minimum(a, b), np.maximum(a, b)


def _sum(given: Given) -> Float64:
    """Input of the norm: ``x``, or the float32 sum of ``x`` and the residual."""
    x = float64(given["x"])
    return rounded(x + float64(given["residual"]), FP32) if "residual" in given else x


def check_norm(given: Given, result: Any, after: Given) -> None:
    total = _sum(given)
    low, high = rms_norm(total, given["weight"], given["eps"], given["x"].dtype)
    _check_operand(given, result, low, high)
    if "residual" in given:
        expected = torch.from_numpy(total).to(FP32).to(given["x"].dtype)
        same("residual", result[-1], expected)


def check_add_rms_norm(given: Given, result: Any, after: Given) -> None:
    total = _sum(given)
    out, residual = result
    within("out", out, *rms_norm(total, given["weight"], given["eps"], given["x"].dtype))
    same("residual", residual, torch.from_numpy(total).float().to(given["x"].dtype))


# --- merging ------------------------------------------------------------------------------------


def draw_merge(draw: Draw) -> Given:
    shape = draw.one((), (1,)) if draw.chance(0.1) else (draw.number(0, 4), draw.number(1, 5))
    segments, dim = draw.number(1, 9), draw.number(1, 40) if not draw.gpu else 8 * draw.number(1, 9)
    outs = draw.floats((segments, *shape, dim), draw.one(BF16, FP16, FP32), 3)
    lses = draw.one(0.1, 4.0, 40.0) * draw.floats((segments, *shape), FP32, 1)
    kind = torch.from_numpy(draw.rng.random(lses.shape))
    lses[kind < 0.3], lses[kind < 0.1] = -torch.inf, torch.inf
    outs[kind < 0.2] = torch.nan
    given: Given = {"outs": outs if draw.gpu else draw.strided(outs), "lses": lses}
    if shape and draw.chance(0.5):
        given["sinks"] = draw.floats(shape[-1:], FP32, 1)
    return given | {"out_dtype": draw.one(None, BF16, FP16, FP32)}


def check_merge(given: Given, result: Any, after: Given) -> None:
    out, lse = result
    logs = float64(given["lses"])
    counts = ~np.isinf(logs)
    logs = np.where(counts, logs, -np.inf)
    sinks = given.get("sinks")
    everything = logs
    if sinks is not None:
        rows = np.broadcast_to(float64(sinks), logs.shape[1:])
        everything = np.concatenate([logs, rows[None]])
    top = everything.max(0)
    shift = np.where(np.isfinite(top), top, 0)
    with np.errstate(all="ignore"):
        total = shift + np.log(np.exp(everything - shift).sum(0))
        weights = np.where(counts, np.exp(logs - np.where(total == -np.inf, 0, total)), 0)
        outs = np.where(counts[..., None], float64(given["outs"]), 0)
    finite = np.where(np.isfinite(total), np.abs(total), 0)
    within("lse", lse, total - 1e-6 * (finite + 4), total + 1e-6 * (finite + 4))
    spread = (weights[..., None] * np.abs(outs)).sum(0)
    reach = np.abs(np.where(counts, logs, 0)).max(0)
    error = spread * (1e-6 + 8 * ULP * (reach + finite))[..., None] + SMALLEST
    near("out", out, (weights[..., None] * outs).sum(0), error)


# --- rotating -----------------------------------------------------------------------------------


def rotated(low: Float64, high: Float64, angles: Float64, neox: bool) -> Interval:
    """Bounds on rotated heads ``(T, H, D)``, from bounds on the heads.

    ``angles``: ``(T, R)``, R/2 cosines, then R/2 sines. ``neox``: whether the elements of a pair
    are R/2 apart instead of adjacent.
    """
    cos, sin = (part[:, None, :] for part in np.split(angles, 2, axis=-1))
    half = cos.shape[-1]
    first, second = _pairs(half, neox)
    ends = low.copy(), high.copy()
    for into, (sign, at, other) in {0: (-1, first, second), 1: (1, second, first)}.items():
        del into
        sums = _scaled(low[..., at], high[..., at], cos)
        more = _scaled(low[..., other], high[..., other], sign * sin)
        size = sum(np.maximum(np.abs(a), np.abs(b)) for a, b in (sums, more))
        error = 2 * ULP * size + SMALLEST
        ends[0][..., at] = sums[0] + more[0] - error
        ends[1][..., at] = sums[1] + more[1] + error
    return ends


def _pairs(half: int, neox: bool) -> tuple[slice, slice]:
    if neox:
        return slice(0, half), slice(half, 2 * half)
    return slice(0, 2 * half, 2), slice(1, 2 * half, 2)


def _scaled(low: Float64, high: Float64, factor: Float64) -> Interval:
    a, b = low * factor, high * factor
    return np.minimum(a, b), np.maximum(a, b)


def draw_angles(draw: Draw, positions: int, rotary_dim: int, dtype: torch.dtype) -> Tensor:
    frequencies = 1000.0 ** -(np.arange(0, rotary_dim, 2) / rotary_dim)
    angles = np.arange(positions)[:, None] * frequencies
    both = np.concatenate([np.cos(angles), np.sin(angles)], -1)
    return torch.from_numpy(both).to(dtype)


def angles_at(table: Tensor, positions: Tensor) -> Float64:
    rows = [row_there("positions", table, position) for position in positions.tolist()]
    return float64(torch.stack(rows) if rows else table[:0])


def draw_rotary_embedding(draw: Draw) -> Given:
    tokens, dim, dtype = draw.number(0, 6), 8 * draw.number(1, 12), draw.one(BF16, FP16)
    rotary = 16 * draw.number(1, max(1, dim // 16)) if draw.gpu else 2 * draw.number(1, dim // 2)
    dim = max(dim, rotary)
    positions = draw.number(1, 50)
    q, k = (draw.floats((tokens, draw.number(1, 4), dim), dtype) for _ in range(2))
    return {
        "positions": draw.integers(0, positions, (tokens,), torch.int64),
        "q": draw.heads(q),
        "k": draw.heads(k),
        "cos_sin_cache": draw_angles(draw, positions, rotary, dtype),
    }


def check_rotary_embedding(given: Given, result: Any, after: Given) -> None:
    angles = angles_at(given["cos_sin_cache"], given["positions"])
    for name, out in zip(("q", "k"), result, strict=True):
        x = float64(given[name])
        within(name, out, *rotated(x, x, angles, neox=True))


OPS = {
    "quantize": Op(draw_quantize, check_quantize),
    "silu_mul_quantize": Op(draw_silu_mul, check_silu_mul),
    "rms_norm_quantize": Op(partial(draw_norm, adds=False), check_norm),
    "add_rms_norm_quantize": Op(partial(draw_norm, adds=True), check_norm),
    "add_rms_norm": Op(draw_add_rms_norm, check_add_rms_norm, emulated=False),
    "merge_segments": Op(draw_merge, check_merge),
    "rotary_embedding": Op(draw_rotary_embedding, check_rotary_embedding, emulated=False),
}
