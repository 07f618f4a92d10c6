"""Conversions between every pair of types that sm_90 has."""

from collections.abc import Iterator

from tests.test_emulator.silicon.case import Case, Tolerance
from tests.test_emulator.silicon.cases.banks import FLOAT_LANES, LANES
from tests.test_emulator.silicon.cases.instructions import Op, groups

_INTEGERS = [f"{sign}{width}" for sign in "us" for width in (8, 16, 32, 64)]
_ROUNDINGS = ("rn", "rz", "rm", "rp")
# Bit for bit but for payloads of NaN, which PTX leaves open for these.
_F16, _BF16, _F32, _F64 = (Tolerance(kind) for kind in ("f16", "bf16", "f32", "f64"))


def _holder(kind: str) -> str:
    """Bank of registers that hold an integer type; 8-bit types are in 16-bit registers."""
    return f"u{max(16, int(kind[1:]))}"


def _width(kind: str) -> str:
    return str(max(16, int(kind[1:])))


def _holds(target: str, source: str) -> bool:
    """Whether ``target`` holds every value of ``source``; both are integer types."""
    wider = int(target[1:]) - int(source[1:])
    if target[0] == source[0]:
        return wider >= 0
    return source[0] == "u" and wider > 0


def _integers() -> Iterator[Op]:
    for source in _INTEGERS:
        for target in _INTEGERS:
            yield Op(f"cvt.{target}.{source}", _width(target), _holder(source))
            if not _holds(target, source):  # .sat is refused where no value can saturate
                yield Op(f"cvt.sat.{target}.{source}", _width(target), _holder(source))
    # Upper bits of registers wider than the type (PTX ISA, operand size exceeding type size).
    for source in ("s8", "u8", "s16"):
        yield Op(f"cvt.{source}.s32", "32", "u32")
    for target in ("u16", "s32"):
        yield Op(f"cvt.{target}.s8", "32", "u32")


def _from_integers() -> Iterator[Op]:
    for source in _INTEGERS:
        for rounding in _ROUNDINGS:
            yield Op(f"cvt.{rounding}.f32.{source}", "32", _holder(source))
            yield Op(f"cvt.{rounding}.f16.{source}", "16", _holder(source))
            yield Op(f"cvt.{rounding}.f64.{source}", "64", _holder(source))
            if source[1:] != "8":  # no conversion between bf16 and 8-bit integers
                yield Op(f"cvt.{rounding}.bf16.{source}", "16", _holder(source))
        yield Op(f"cvt.rn.sat.f32.{source}", "32", _holder(source))


def _to_integers(source: str, bank: str) -> Iterator[Op]:
    for target in _INTEGERS:
        if source == "bf16" and target[1:] == "8":
            continue
        for rounding in ("rni", "rzi", "rmi", "rpi"):
            yield Op(f"cvt.{rounding}.{target}.{source}", _width(target), bank)
        if source == "f32":
            yield Op(f"cvt.rni.ftz.{target}.{source}", _width(target), bank)
            yield Op(f"cvt.rpi.ftz.sat.{target}.{source}", _width(target), bank)
        if source != "bf16":
            yield Op(f"cvt.rni.sat.{target}.{source}", _width(target), bank)
            yield Op(f"cvt.rzi.sat.{target}.{source}", _width(target), bank)


def _f32_narrowing() -> Iterator[Op]:
    # An H200 keeps subnormal inputs of f16 conversions with .ftz, against the PTX ISA.
    for rounding in _ROUNDINGS:
        for ftz in ("", ".ftz"):
            for sat in ("", ".sat"):
                yield Op(f"cvt.{rounding}{ftz}{sat}.f16.f32", "16", "narrow")
    for kind, width in (("f16", "16"), ("bf16", "16")):
        for rounding in ("rn", "rz"):
            for relu in ("", ".relu"):
                yield Op(f"cvt.{rounding}{relu}.{kind}.f32", width, "narrow")
                yield Op(f"cvt.{rounding}{relu}.{kind}x2.f32", "32", "narrow narrow")
    for rounding in ("rm", "rp"):
        yield Op(f"cvt.{rounding}.bf16.f32", "16", "narrow")
    # rna rounds NaN like numbers, 0x7f800001 to infinity; rn and rz return 0x7fffe000.
    yield Op("cvt.rna.tf32.f32", "32", "narrow", tolerance=_F32)
    for rounding in ("rn", "rz"):
        for relu in ("", ".relu"):
            yield Op(f"cvt.{rounding}{relu}.tf32.f32", "32", "narrow", tolerance=_F32)
    for kind in ("e4m3x2", "e5m2x2"):
        for relu in ("", ".relu"):
            yield Op(f"cvt.rn.satfinite{relu}.{kind}.f32", "16", "narrow narrow")
    for rounding in ("rni", "rzi", "rmi", "rpi"):
        for ftz in ("", ".ftz"):
            for sat in ("", ".sat"):
                yield Op(f"cvt.{rounding}{ftz}{sat}.f32.f32", "32", "narrow")
    yield Op("cvt.ftz.f32.f32", "32", "f32")
    yield Op("cvt.sat.f32.f32", "32", "f32")
    yield Op("cvt.f64.f32", "64", "f32", tolerance=_F64)
    yield Op("cvt.ftz.f64.f32", "64", "f32", tolerance=_F64)
    yield Op("cvt.sat.f64.f32", "64", "f32", tolerance=_F64)


def _f64() -> Iterator[Op]:
    for rounding in _ROUNDINGS:
        yield Op(f"cvt.{rounding}.f32.f64", "32", "f64", tolerance=_F32)
        yield Op(f"cvt.{rounding}.ftz.f32.f64", "32", "f64", tolerance=_F32)
        yield Op(f"cvt.{rounding}.sat.f32.f64", "32", "f64", tolerance=_F32)
        yield Op(f"cvt.{rounding}.f16.f64", "16", "f64", tolerance=_F16)
        yield Op(f"cvt.{rounding}.bf16.f64", "16", "f64", tolerance=_BF16)
    for rounding in ("rni", "rzi", "rmi", "rpi"):
        yield Op(f"cvt.{rounding}.f64.f64", "64", "f64", tolerance=_F64)


def _half_sources() -> Iterator[Op]:
    """Conversions from 16 bits, for all 65536 patterns."""
    for kind in ("f16", "bf16"):
        yield Op(f"cvt.f32.{kind}", "32", "all", tolerance=_F32)
        yield Op(f"cvt.f64.{kind}", "64", "all", tolerance=_F64)
    yield Op("cvt.ftz.f32.f16", "32", "all")
    yield Op("cvt.sat.f32.f16", "32", "all")
    yield Op("cvt.ftz.f32.bf16", "32", "all")
    for rounding in _ROUNDINGS:
        yield Op(f"cvt.{rounding}.bf16.f16", "16", "all")
        yield Op(f"cvt.{rounding}.f16.bf16", "16", "all")
    for rounding in ("rni", "rzi", "rmi", "rpi"):
        yield Op(f"cvt.{rounding}.f16.f16", "16", "all")
        yield Op(f"cvt.{rounding}.bf16.bf16", "16", "all")
    for kind in ("e4m3x2", "e5m2x2"):
        for relu in ("", ".relu"):
            yield Op(f"cvt.rn{relu}.f16x2.{kind}", "32", "all")
            yield Op(f"cvt.rn.satfinite{relu}.{kind}.f16x2", "16", "all2")


def cases() -> Iterator[Case]:
    yield from groups("integers", _integers(), LANES)
    yield from groups("from_integers", _from_integers(), LANES)
    for source, bank in (("f32", "narrow"), ("f16", "f16"), ("bf16", "bf16"), ("f64", "f64")):
        yield from groups(f"{source}_to_integers", _to_integers(source, bank), FLOAT_LANES)
    yield from groups("narrowing", _f32_narrowing(), FLOAT_LANES)
    yield from groups("f64", _f64(), LANES)
    yield from groups("exhaustive", _half_sources(), 1 << 16)
