"""f32 and f64 arithmetic with every rounding and modifier, and the approximate functions."""

from collections.abc import Iterator

from tests.test_emulator.silicon.case import Case, Tolerance
from tests.test_emulator.silicon.cases.banks import FLOAT_LANES, LANES
from tests.test_emulator.silicon.cases.instructions import Op, groups

_ROUNDINGS = (".rn", ".rz", ".rm", ".rp")
_FTZ = ("", ".ftz")
_F32 = Tolerance("f32")  # bit for bit but for payloads of NaN
_F64 = Tolerance("f64")


# An H200 flushes for .ftz before it rounds: 0x00800000 * 0x3f7fffff is 0, not 0x00800000.
def _f32_exact() -> Iterator[Op]:
    for ftz in _FTZ:
        for rounding in ("", *_ROUNDINGS):
            for sat in ("", ".sat"):
                for name in ("add", "sub", "mul"):
                    yield Op(f"{name}{rounding}{ftz}{sat}.f32", "32", "f32 f32", tolerance=_F32)
                if rounding:
                    yield Op(f"fma{rounding}{ftz}{sat}.f32", "32", "f32 f32 f32", tolerance=_F32)
        for name in ("min", "max"):
            for nan in ("", ".NaN"):
                for sign in ("", ".xorsign.abs"):
                    yield Op(f"{name}{ftz}{nan}{sign}.f32", "32", "f32 f32", tolerance=_F32)
        for name in ("abs", "neg"):
            yield Op(f"{name}{ftz}.f32", "32", "f32", tolerance=_F32)
        for rounding in _ROUNDINGS:
            yield Op(f"rcp{rounding}{ftz}.f32", "32", "f32", tolerance=_F32)
            yield Op(f"sqrt{rounding}{ftz}.f32", "32", "f32", tolerance=_F32)
            yield Op(f"div{rounding}{ftz}.f32", "32", "f32 f32", tolerance=_F32)
    yield Op("copysign.f32", "32", "f32 f32", tolerance=_F32)
    for test in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
        yield Op(f"testp.{test}.f32", "p", "f32")


def _f32_approximate() -> Iterator[Op]:
    for ftz in _FTZ:
        for name, ulps in (("rcp", 1), ("sqrt", 2), ("rsqrt", 2), ("ex2", 2)):
            yield Op(f"{name}.approx{ftz}.f32", "32", "f32", tolerance=Tolerance("f32", ulps))
        # Absolute error where the result is close to zero (PTX ISA, lg2).
        yield Op(f"lg2.approx{ftz}.f32", "32", "f32", tolerance=Tolerance("f32", 2, 2.0**-22))
        yield Op(f"div.approx{ftz}.f32", "32", "f32 f32", tolerance=Tolerance("f32", 2))
        yield Op(f"div.full{ftz}.f32", "32", "f32 f32", tolerance=Tolerance("f32", 2))
        for name in ("sin", "cos"):
            near = Tolerance("f32", 2, 2.0**-20)
            yield Op(f"{name}.approx{ftz}.f32", "32", "angle", tolerance=near)
    # Relative error 2^-11 (PTX ISA, tanh).
    yield Op("tanh.approx.f32", "32", "f32", tolerance=Tolerance("f32", 1 << 13))


def _f64() -> Iterator[Op]:
    for rounding in _ROUNDINGS:
        for name in ("add", "sub", "mul", "div"):
            yield Op(f"{name}{rounding}.f64", "64", "f64 f64", tolerance=_F64)
        yield Op(f"fma{rounding}.f64", "64", "f64 f64 f64", tolerance=_F64)
        yield Op(f"rcp{rounding}.f64", "64", "f64", tolerance=_F64)
        yield Op(f"sqrt{rounding}.f64", "64", "f64", tolerance=_F64)
    for name in ("min", "max", "copysign"):
        yield Op(f"{name}.f64", "64", "f64 f64", tolerance=_F64)
    for name in ("abs", "neg"):
        yield Op(f"{name}.f64", "64", "f64", tolerance=_F64)
    for test in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
        yield Op(f"testp.{test}.f64", "p", "f64")


def cases() -> Iterator[Case]:
    yield from groups("f32", _f32_exact(), FLOAT_LANES)
    yield from groups("f32_approximate", _f32_approximate(), FLOAT_LANES)
    yield from groups("f64", _f64(), LANES)
