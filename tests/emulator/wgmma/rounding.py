"""Sums rounded bit-exactly as on an H200, slower than by a plain matrix product.

The rule was found from recorded sums of normal numbers (``silicon/cases/wgmma.py``): NVIDIA
documents no part of it. A wgmma adds its 16 products and the previous D at once. Each term is
truncated, toward zero, 25 bits below the largest exponent, where a product's exponent is the sum of
the exponents of its factors. The sum is truncated to float32 as well.
"""

import numpy as np
import numpy.typing as npt

from tests.emulator.wgmma.fragments import Floats

_KEPT = 25
_OF_ZERO = -(1 << 12)  # below every exponent
_F32_DIGITS, _F32_LEAST = 24, -149


def _exponents(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Exponent e of each value, written as 1.x times 2^e."""
    return np.where(values == 0, _OF_ZERO, np.frexp(values)[1] - 1).astype(np.int64)


def multiply_accumulate(a: Floats, b: Floats, before: Floats | None) -> Floats:
    """A · Bᵀ + D of one wgmma.

    Args:
        a: [rows, 16], of f16 or bf16 values.
        b: [n, 16], likewise.
        before: D, [rows, n]; None if D is overwritten.

    Returns:
        float32 [rows, n]; non-finite values are rounded as numpy does.
    """
    rows, columns = a.astype(np.float64), b.astype(np.float64)
    terms = rows[:, None, :] * columns[None, :, :]
    exponents = _exponents(rows)[:, None, :] + _exponents(columns)[None, :, :]
    if before is not None:
        start = before.astype(np.float64)[:, :, None]
        terms = np.concatenate([terms, start], axis=2)
        exponents = np.concatenate([exponents, _exponents(start)], axis=2)
    largest = np.maximum(exponents.max(axis=2, keepdims=True), 2 * _F32_LEAST)
    units = np.ldexp(1.0, (largest - _KEPT).astype(np.int32))
    sums = (np.trunc(terms / units) * units).sum(axis=2)
    places = np.maximum(np.frexp(sums)[1] - _F32_DIGITS, _F32_LEAST)
    last = np.ldexp(1.0, places)
    return np.where(np.isfinite(sums), np.trunc(sums / last) * last, sums).astype(np.float32)
