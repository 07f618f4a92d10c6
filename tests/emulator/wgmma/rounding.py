"""Sums rounded bit-exactly as on an H200, slower than by a plain matrix product.

The rule was found from recorded sums of normal numbers (``silicon/cases/wgmma.py``): NVIDIA
documents no part of it. A wgmma adds its products, 16 or 32, and the previous D at once. Each term
is truncated, toward zero, 25 bits below the largest exponent, where a product's exponent is the sum
of the exponents of its factors. The sum is truncated to float32 as well. With E4M3, terms are
truncated 13 bits below the largest exponent, and the sum to 14 significant bits.
"""

import numpy as np
import numpy.typing as npt

from tests.emulator.tcgen05.formats import Element
from tests.emulator.wgmma.fragments import Floats

# Bits kept below the largest exponent, and significant bits of the sum: of 16-bit elements, E4M3.
_SIXTEEN_BITS, _EIGHT_BITS = (25, 24), (13, 14)
_OF_ZERO = -(1 << 12)  # below every exponent
_F32_LEAST = -149


def _exponents(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Exponent e of each value, written as 1.x times 2^e."""
    return np.where(values == 0, _OF_ZERO, np.frexp(values)[1] - 1).astype(np.int64)


def multiply_accumulate(
    a: Floats, b: Floats, before: Floats | None, element: Element = Element.BF16
) -> Floats:
    """A · Bᵀ + D of one wgmma.

    Args:
        a: [rows, K], values of ``element``.
        b: [n, K], likewise.
        before: D, [rows, n]; None if D is overwritten.
        element: element type of A and B.

    Returns:
        float32 [rows, n]; non-finite values are rounded as numpy does.
    """
    kept, digits = _EIGHT_BITS if element.bits == 8 else _SIXTEEN_BITS
    rows, columns = a.astype(np.float64), b.astype(np.float64)
    terms = rows[:, None, :] * columns[None, :, :]
    exponents = _exponents(rows)[:, None, :] + _exponents(columns)[None, :, :]
    if before is not None:
        start = before.astype(np.float64)[:, :, None]
        terms = np.concatenate([terms, start], axis=2)
        exponents = np.concatenate([exponents, _exponents(start)], axis=2)
    largest = np.maximum(exponents.max(axis=2, keepdims=True), 2 * _F32_LEAST)
    units = np.ldexp(1.0, (largest - kept).astype(np.int32))
    sums = (np.trunc(terms / units) * units).sum(axis=2)
    places = np.maximum(np.frexp(sums)[1] - digits, _F32_LEAST)
    last = np.ldexp(1.0, places)
    return np.where(np.isfinite(sums), np.trunc(sums / last) * last, sums).astype(np.float32)
