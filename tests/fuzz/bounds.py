"""Bounds on results: the least and the largest value that an op's rounding may leave.

Every rounding step of an op is monotonic, so the rounded form of a value between two bounds lies
between the rounded bounds. Where the rounded bounds are equal, the result is known to the bit.
"""

import numpy as np
import torch
from torch import Tensor

from nvfp4_kernels.formats.nvfp4 import from_blocked
from nvfp4_kernels.formats.terms import unstack_scales
from tests.test_kernels import fp8_oracle, oracle
from tests.test_kernels.oracle import E2M1, E4M3, Float64, float64, unpack

F32 = np.float32
ULP = 2.0**-23  # of float32
SMALLEST = 2.0**-148


class Wrong(AssertionError):
    """Error for a result that the formula does not explain."""


def require(holds: object, what: str) -> None:
    if not bool(np.all(holds)):
        raise Wrong(what)


def rounded(x: Float64, dtype: torch.dtype) -> Float64:
    """Float64 values rounded to float32 and then to ``dtype``, as ops do."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(np.asarray(x, np.float64)).float().to(dtype).double().numpy()


def within(name: str, found: Tensor, low: Float64, high: Float64) -> None:
    """Require ``found`` between two values rounded to its dtype; NaN where the bounds are NaN."""
    require(tuple(found.shape) == low.shape, f"{name}: shape {tuple(found.shape)}, not {low.shape}")
    low, high = rounded(low, found.dtype), rounded(high, found.dtype)
    values = float64(found)
    undefined = np.isnan(low) | np.isnan(high)
    fits = np.where(undefined, np.isnan(values), (low <= values) & (values <= high))
    if not fits.all():
        at = tuple(int(i) for i in np.argwhere(~fits)[0])
        raise Wrong(f"{name}{list(at)}: is {values[at]}, must be from {low[at]} to {high[at]}")


def near(name: str, found: Tensor, expected: Float64, error: Float64) -> None:
    """Require ``found`` to equal ``expected`` to within ``error``, plus its last rounding."""
    within(name, found, expected - error, expected + error)


def row_there(name: str, x: Tensor, index: int) -> Tensor:
    """Row ``index`` of a tensor; a finding if the op accepted an index out of range."""
    require(0 <= index < len(x), f"{name}: {index} was accepted, {len(x)} are there")
    return x[index]


def same(name: str, found: Tensor, expected: Tensor) -> None:
    """Require the same shape, dtype and bits; any NaN equals any NaN."""
    require(found.dtype == expected.dtype, f"{name}: dtype {found.dtype}, not {expected.dtype}")
    require(found.shape == expected.shape, f"{name}: shape {tuple(found.shape)}")
    if found.numel() == 0:
        return
    ours, theirs = (x.contiguous().reshape(-1).view(torch.uint8) for x in (found, expected))
    if not torch.equal(ours, theirs):
        if found.is_floating_point():
            both = found.double().isnan() & expected.double().isnan()
            equal = both | (found.double() == expected.double())
        else:
            equal = found == expected
        if not bool(equal.all()):
            at = equal.logical_not().nonzero()[0].tolist()
            raise Wrong(f"{name}{at}: is {found[tuple(at)]}, must be {expected[tuple(at)]}")


# --- NVFP4 ----------------------------------------------------------------------------------------


def quantized(
    data: Tensor, scales: Tensor, low: Float64, high: Float64, global_scale: Tensor, terms: int
) -> None:
    """Require the NVFP4 terms of some values between ``low`` and ``high``, ``(..., M, K)``.

    The formula is the runtime quantiser of ``nvfp4.py``, with every operation in float32;
    ``global_scale`` is ``()`` or ``(..., M)``. Codes of a block whose scale is NaN may be anything.
    If ``low`` and ``high`` are the same array, the signs of zeros count too.
    """
    *batch, rows, k = low.shape
    shape = (*batch, *((terms,) if terms > 1 else ()), rows, k // 2)
    require(tuple(data.shape) == shape, f"data: shape {tuple(data.shape)}, not {shape}")
    codes, found = unpack(data), linear_scales(scales, batch, rows, k, terms, True)
    if terms == 1:
        codes, found = codes[..., None, :, :], found[..., None, :, :]
    factor = np.asarray(global_scale.numpy(), F32)
    factor = factor[..., None] if factor.ndim else factor
    known_to_the_bit = low is high
    with np.errstate(all="ignore"):
        low, high = low.astype(F32), high.astype(F32)
        inverse = F32(1) / factor
        for term in range(terms):
            least, most = _magnitudes(low, high)
            ends = [_scale(inverse, largest, term) for largest in (least, most)]
            scale, code = found[..., term, :, :], codes[..., term, :, :]
            undefined = np.isnan(ends[0]) | np.isnan(ends[1])
            fits = np.where(undefined, np.isnan(scale), (ends[0] <= scale) & (scale <= ends[1]))
            require(fits, f"scales of term {term}: {_first(scale, *ends, ~fits)}")
            step = scale.astype(F32) * (F32(1) / inverse)
            multiplier = np.where(step == 0, F32(0), F32(1) / step)
            a, b = (_codes(_blocks(x) * multiplier[..., None]) for x in (low, high))
            a, b = np.fmin(a, b), np.fmax(a, b)
            blocks = _blocks(code)
            known = ~(np.isnan(a) | np.isnan(b) | np.isnan(scale)[..., None])
            fits = ~known | ((a <= blocks) & (blocks <= b))
            require(fits, f"codes of term {term}: {_first(blocks, a, b, ~fits)}")
            if known_to_the_bit:
                require(~known | (np.signbit(a) == np.signbit(blocks)), f"sign in term {term}")
            term_values = (blocks * step.astype(np.float64)[..., None]).reshape(low.shape)
            low, high = ((x.astype(np.float64) - term_values).astype(F32) for x in (low, high))


def linear_scales(
    scales: Tensor, batch: list[int], rows: int, k: int, terms: int, written: bool = False
) -> Float64:
    """Linear scales ``(..., [terms,] M, K/16)``, unblocked; if ``written``, padding must be 0."""
    columns = k // 16
    if terms == 1:
        linear = from_blocked(scales, rows, columns)
        again = oracle.blocked(linear)
    else:
        linear = unstack_scales(scales, terms, rows, columns)
        again = oracle.blocked(oracle.stacked(linear))
    require(again.shape == scales.shape, f"scales: shape {tuple(scales.shape)}")
    equal = torch.equal(again.view(torch.uint8), scales.contiguous().view(torch.uint8))
    require(equal or not written, "scales: padding is not zero")
    return float64(linear)


def fp8_rows(stored: Tensor, low: Float64, high: Float64, scale: Tensor) -> None:
    """Require E4M3 rows of some values between ``low`` and ``high``, ``(..., M, K)``, as stored.

    ``scale`` is ``()`` or ``(..., M)``. If ``low`` and ``high`` are the same array, the values are
    known to the bit.
    """
    *rows, k = low.shape
    padded = (k + 63) // 64 * 64
    require(tuple(stored.shape) == (*rows, padded), f"rows: shape {tuple(stored.shape)}")
    ends = [fp8_oracle.rows(torch.from_numpy(x.astype(F32)), scale) for x in (low, high)]
    if low is high:
        same("rows", stored.view(torch.uint8), ends[0].view(torch.uint8))
        return
    a, b, found = (x.float().numpy() for x in (*ends, stored))
    known = ~(np.isnan(a) | np.isnan(b))
    fits = ~known | ((np.fmin(a, b) <= found) & (found <= np.fmax(a, b)))
    require(fits, f"rows: {_first(found, a, b, ~fits)}")


def row_scales(
    found: Tensor, low: Float64, high: Float64, range_: float = 2688, least_scale: float = 2.0**-118
) -> None:
    """Require one scale per row: ``max|row| / range_``, or 1 for a row of zeros or NaN."""
    with np.errstate(all="ignore"):
        ends = low.astype(F32), high.astype(F32)
        least, most = (x.max(-1) for x in _sorted_magnitudes(*ends))
        ends = [np.maximum(x / F32(range_), F32(least_scale)) for x in (least, most)]
    ends = [np.where(x > 0, scale, F32(1)) for x, scale in zip((least, most), ends, strict=True)]
    low_end, high_end = np.minimum(*ends), np.maximum(*ends)
    within("row_scale", found, low_end.astype(np.float64), high_end.astype(np.float64))


def _sorted_magnitudes(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.abs(low), np.abs(high)
    least = np.where(np.sign(low) * np.sign(high) < 0, F32(0), np.minimum(a, b))
    return least, np.maximum(a, b)


def _magnitudes(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least and largest possible ``max|block|``."""
    least, most = _sorted_magnitudes(low, high)
    return _blocks(least).max(-1, initial=0), _blocks(most).max(-1, initial=0)


def _scale(inverse: np.ndarray, largest: np.ndarray, term: int) -> Float64:
    """E4M3 scale of a block; from the second term on, at least 2⁻⁹ unless the block is zero.

    ``inverse``: reciprocal of the global scale; ``largest``: largest magnitude in the block.
    """
    exact = inverse * (largest * F32(1 / 6))
    exact = np.where(exact > 448, F32(448), exact)  # NaN stays
    if term:
        exact = np.where((largest != 0) & (exact < 2.0**-9), F32(2.0**-9), exact)
    return exact.astype(E4M3).astype(np.float64)


def _codes(scaled: np.ndarray) -> Float64:
    """E2M1 values, saturating; NaN stays."""
    codes = np.clip(scaled, -6, 6)
    grid = np.where(np.isnan(codes), F32(0), codes).astype(E2M1).astype(np.float64)
    return np.where(np.isnan(scaled), np.nan, grid)


def _blocks(x: np.ndarray) -> np.ndarray:
    return x.reshape(*x.shape[:-1], x.shape[-1] // 16, 16)


def _first(found: np.ndarray, low: np.ndarray, high: np.ndarray, off: np.ndarray) -> str:
    at = tuple(np.argwhere(off)[0]) if off.any() else ()
    return f"{found[at]} at {[int(i) for i in at]}, must be from {low[at]} to {high[at]}"
