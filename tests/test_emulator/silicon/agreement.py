"""Row-by-row comparison of outputs with recorded outputs."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tests.test_emulator.silicon.case import Array, Case, Tolerance
from tests.test_emulator.silicon.vectors import Recorded

_MANTISSA = {"f16": 10, "bf16": 7, "f32": 23, "f64": 52}
_LEAST = {"f16": 2.0**-24, "bf16": 2.0**-133, "f32": 2.0**-149, "f64": 2.0**-1074}
_BITS = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}


def _values(bits: Array, kind: str) -> npt.NDArray[np.float64]:
    if kind == "bf16":
        return (bits.astype("u4") << np.uint32(16)).view("f4").astype("f8")
    return bits.view(f"f{_BITS[kind] // 8}").astype("f8")


def close(got: Array, want: Array, tolerance: Tolerance) -> npt.NDArray[np.bool_]:
    """Mask of the elements in which two arrays of floating-point bits agree.

    Infinities must agree exactly, as must zeros if no ulps are allowed, and NaN unless any NaN is
    accepted.
    """
    kind = tolerance.format
    dtype = f"u{_BITS[kind] // 8}"
    with np.errstate(invalid="ignore", over="ignore"):
        mine, theirs = _values(got.view(dtype), kind), _values(want.view(dtype), kind)
        _, exponents = np.frexp(theirs)
        unit = np.maximum(np.ldexp(1.0, exponents - 1 - _MANTISSA[kind]), _LEAST[kind])
        near = np.abs(mine - theirs) <= np.maximum(tolerance.ulps * unit, tolerance.absolute)
    special = ~np.isfinite(theirs) | ((theirs == 0) & (tolerance.ulps == 0))
    exact = got.view(dtype) == want.view(dtype)
    if tolerance.any_nan:
        exact |= np.isnan(mine) & np.isnan(theirs)
    agree = np.where(special, exact, near & np.isfinite(mine))
    per_word = got.dtype.itemsize // np.dtype(dtype).itemsize
    whole: npt.NDArray[np.bool_] = agree.reshape(*got.shape, per_word).all(axis=-1)
    return whole


def row_agrees(got: Array, want: Array, tolerance: Tolerance | None) -> npt.NDArray[np.bool_]:
    """Mask of the elements in which two rows agree: bit for bit, or within the tolerance."""
    same: npt.NDArray[np.bool_] = np.equal(got, want)
    if tolerance is None or same.all():
        return same
    same = same | close(np.ascontiguousarray(got), np.ascontiguousarray(want), tolerance)
    return same


def disagreements(case: Case, result: Recorded, outputs: dict[str, Array]) -> Iterator[str]:
    """One message for each row of each output that differs from the recording."""
    for name, want in result.outputs.items():
        if name == "scratch":
            continue
        got = outputs[name]
        labels = case.rows.get(name, [])
        if want.ndim < 2:
            want, got = want.reshape(1, -1), got.reshape(1, -1)
        for row, (mine, theirs) in enumerate(zip(got, want, strict=True)):
            agree = row_agrees(mine, theirs, case.tolerance.get(name, {}).get(row))
            if agree.all():
                continue
            label = labels[row] if row < len(labels) else f"row {row}"
            places = np.flatnonzero(~agree.reshape(len(mine), -1).all(axis=1))
            shown = ", ".join(
                f"[{at}] {_show(mine[at])} for {_show(theirs[at])}" for at in places[:4]
            )
            yield f"{case.name} {name} {label}: {len(places)} of {len(mine)} differ: {shown}"


def _show(value: Array) -> str:
    return " ".join(f"{int(v):#x}" for v in np.ravel(value))
