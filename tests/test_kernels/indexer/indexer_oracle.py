"""Oracle of the indexer in NumPy and float64, key by key, independent of the package."""

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from tests.test_kernels.oracle import E2M1, E4M3, Float64, e4m3, float64, pack, unpack

FORMATS = ("nvfp4", "mxfp4", "fp8", "bf16")
# Bytes of data and of scales per key, by D.
KEY_BYTES = {
    "nvfp4": lambda d: (d // 2, d // 16),
    "mxfp4": lambda d: (d // 2, d // 32),
    "fp8": lambda d: (d, 4),
    "bf16": lambda d: (2 * d, 0),
}


@dataclass(frozen=True)
class Stored:
    """Stored vectors and their values, without NVFP4's global scale.

    Attributes:
        data: ``(..., D)`` or ``(..., D/2)``.
        scales: block scales of ``data``.
        values: float64 ``(..., D)``.
    """

    data: Tensor
    scales: Tensor | None
    values: Float64


def e8m0(exponents: np.ndarray) -> Tensor:
    """Powers of two; exponent 128 is NaN."""
    codes = torch.from_numpy((exponents + 127).astype(np.uint8))
    return codes.view(torch.float8_e8m0fnu)


def dequantize(fmt: str, data: Tensor, scales: Tensor | None) -> Float64:
    """Exact values of stored vectors."""
    if fmt == "bf16":
        return float64(data)
    assert scales is not None
    if fmt == "fp8":
        return float64(data) * float64(scales)[..., None]
    if fmt == "nvfp4":
        return unpack(data) * np.repeat(float64(scales), 16, axis=-1)
    factors = scales.view(torch.uint8).numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    return unpack(data) * np.repeat(factors, 32, axis=-1)


def stored(fmt: str, elements: Float64, exponents: np.ndarray) -> Stored:
    """Store elements ``(..., D)`` on the format's grid, and powers of two as their scales."""
    scales: Tensor | None
    if fmt == "bf16":
        data, scales = torch.from_numpy(elements).bfloat16(), None
    elif fmt == "fp8":
        data, scales = e4m3(elements), torch.from_numpy(2.0**exponents).float()
    elif fmt == "nvfp4":
        data, scales = pack(elements), e4m3(2.0**exponents)
    else:
        data, scales = pack(elements), e8m0(exponents)
    return Stored(data, scales, dequantize(fmt, data, scales))


def scale_shape(fmt: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of vectors ``(..., D)``."""
    *vectors, head_dim = shape
    blocks = {"nvfp4": (head_dim // 16,), "mxfp4": (head_dim // 32,), "fp8": (), "bf16": (0,)}
    return (*vectors, *blocks[fmt])


def grid(fmt: str, rng: np.random.Generator, *shape: int) -> Stored:
    """Small integers and scales of 1/2, 1 and 2: float32 sums of their products are exact."""
    elements = rng.choice([-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0], size=shape)
    return stored(fmt, elements, rng.integers(-1, 2, size=scale_shape(fmt, shape)))


def any_values(fmt: str, rng: np.random.Generator, *shape: int) -> Stored:
    """Values with all mantissas of the format, and scales over eight octaves."""
    if fmt in ("nvfp4", "mxfp4"):
        elements = np.arange(16, dtype=np.uint8).view(E2M1).astype(np.float64)
        elements = rng.choice(elements, size=shape)
    else:
        elements = rng.standard_normal(shape).astype(E4M3).astype(np.float64)
    return stored(fmt, elements, rng.integers(-4, 5, size=scale_shape(fmt, shape)))


def write_page(fmt: str, keys: Stored, cache: Tensor, pages: list[int], block_size: int) -> None:
    """Write keys ``(L, D)`` to pages of ``cache`` ``(pages, page_bytes)``, byte by byte."""
    data_bytes, scale_bytes = KEY_BYTES[fmt](keys.values.shape[-1])
    for s in range(len(keys.values)):
        page, at = cache[pages[s // block_size]], s % block_size
        page[at * data_bytes :][:data_bytes] = keys.data[s].view(torch.uint8)
        if keys.scales is not None:
            start = block_size * data_bytes + at * scale_bytes
            scales = keys.scales[s].reshape(-1).view(torch.uint8)
            page[start : start + scale_bytes] = scales


def scores(q: Float64, k: Float64, weights: Float64) -> Float64:
    """Scores ``(L,)`` of one query ``(H, D)`` and keys ``(L, D)``."""
    return weights @ np.maximum(q @ k.T, 0.0)


def best(row: Float64, top_k: int) -> list[int]:
    """Indices of the highest scores, in ascending order; among ties, the first."""
    order = sorted(range(len(row)), key=lambda s: (math.inf if row[s] != row[s] else -row[s], s))
    return sorted(order[:top_k])


def padded(chosen: list[int], top_k: int) -> list[int]:
    """Pad a list of indices with −1 to ``top_k``."""
    return chosen + [-1] * (top_k - len(chosen))


# --- quantising -------------------------------------------------------------------------------


def quantize(fmt: str, x: Tensor, global_scale: float = 1.0) -> Stored:
    """Quantise finite bfloat16 vectors ``(..., D)`` in rational arithmetic or float64.

    For NVFP4, scale and step are rounded to float32 at each operation, as by the runtime quantiser.
    """
    values = float64(x)
    if fmt == "bf16":
        return Stored(x, None, values)
    if fmt == "fp8":
        amax = np.maximum(np.abs(values).max(-1), np.float32(1e-4))
        exponents = least_exponents(amax, 448.0)
        return stored(fmt, values / 2.0 ** exponents[..., None], exponents)
    if fmt == "mxfp4":
        blocks = values.reshape(*values.shape[:-1], -1, 32)
        amax = np.maximum(np.abs(blocks).max(-1), 6.0 * 2.0**-126)
        exponents = least_exponents(amax, 6.0)
        elements = blocks / 2.0 ** exponents[..., None]
        return stored(fmt, elements.reshape(values.shape).clip(-6, 6), exponents)
    blocks = values.reshape(*values.shape[:-1], -1, 16).astype(np.float32)
    inverse = np.float32(1) / np.float32(global_scale)
    exact = inverse * (np.abs(blocks).max(-1) * np.float32(1 / 6))
    scales = np.minimum(exact, np.float32(448)).astype(E4M3)
    step = scales.astype(np.float32) * (np.float32(1) / inverse)
    with np.errstate(divide="ignore"):
        multiplier = np.where(step == 0, np.float32(0), np.float32(1) / step)
    elements = (blocks * multiplier[..., None]).reshape(values.shape).clip(-6, 6)
    data, found = pack(elements), torch.from_numpy(scales.view(np.uint8)).view(torch.float8_e4m3fn)
    return Stored(data, found, dequantize(fmt, data, found))


def least_exponents(amax: Float64, largest: float) -> np.ndarray:
    """Least n with ``amax <= largest · 2^n``, by trying."""
    exponents = np.full(amax.shape, -160)
    while (short := amax > largest * 2.0**exponents).any():
        exponents[short] += 1
    return exponents
