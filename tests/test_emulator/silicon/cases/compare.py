"""Comparisons and selections: setp, set, selp and slct of every type."""

from collections.abc import Iterator

from tests.test_emulator.silicon.case import Case
from tests.test_emulator.silicon.cases.banks import FLOAT_LANES, LANES
from tests.test_emulator.silicon.cases.instructions import Op, groups

_ORDERED = ("eq", "ne", "lt", "le", "gt", "ge")
_FLOATING = (*_ORDERED, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def _integers() -> Iterator[Op]:
    for width in (16, 32, 64):
        bank = f"u{width}"
        for name in _ORDERED:
            yield Op(f"setp.{name}.s{width}", "p", f"{bank} {bank}")
        for name in (*_ORDERED, "lo", "ls", "hi", "hs"):
            yield Op(f"setp.{name}.u{width}", "p", f"{bank} {bank}")
        for name in ("eq", "ne"):
            yield Op(f"setp.{name}.b{width}", "p", f"{bank} {bank}")
        yield Op(f"selp.b{width}", str(width), f"{bank} {bank} p")
        yield Op(f"slct.b{width}.s32", str(width), f"{bank} {bank} u32")
    for name in ("and", "or", "xor"):
        yield Op(f"setp.lt.{name}.s32", "p|p", "u32 u32 p")
        yield Op(f"setp.ge.{name}.u32", "p|p", "u32 u32 p")
    for kind in ("u32", "s32", "f32"):
        yield Op(f"set.lt.{kind}.s32", "32", "u32 u32")
        yield Op(f"set.hi.{kind}.u64", "32", "u64 u64")
        yield Op(f"set.le.and.{kind}.u16", "32", "u16 u16 p")
    yield Op("selp.f32", "32", "u32 u32 p")
    yield Op("selp.f64", "64", "u64 u64 p")


def _floats() -> Iterator[Op]:
    for name in _FLOATING:
        for ftz in ("", ".ftz"):
            yield Op(f"setp.{name}{ftz}.f32", "p", "f32 f32")
            yield Op(f"setp.{name}{ftz}.f16", "p", "f16 f16")
            yield Op(f"setp.{name}{ftz}.f16x2", "p|p", "f16x2 f16x2")
        yield Op(f"setp.{name}.f64", "p", "f64 f64")
        yield Op(f"setp.{name}.bf16", "p", "bf16 bf16")
        yield Op(f"setp.{name}.bf16x2", "p|p", "bf16x2 bf16x2")
    for name in ("ltu", "eq"):
        for ftz in ("", ".ftz"):
            for kind in ("u32", "s32", "f32"):
                yield Op(f"set.{name}{ftz}.{kind}.f32", "32", "f32 f32")
            yield Op(f"set.{name}{ftz}.f16.f16", "16", "f16 f16")
            yield Op(f"set.{name}{ftz}.u32.f16", "32", "f16 f16")
            yield Op(f"set.{name}{ftz}.f16x2.f16x2", "32", "f16x2 f16x2")
        yield Op(f"set.{name}.bf16.bf16", "16", "bf16 bf16")
        yield Op(f"set.{name}.bf16x2.bf16x2", "32", "bf16x2 bf16x2")
        yield Op(f"set.{name}.u32.f64", "32", "f64 f64")
    for name in ("and", "or", "xor"):
        yield Op(f"setp.gt.{name}.f32", "p|p", "f32 f32 p")
    for ftz in ("", ".ftz"):
        yield Op(f"slct{ftz}.f32.f32", "32", "f32 f32 f32")
        yield Op(f"slct{ftz}.b32.f32", "32", "u32 u32 f32")


def cases() -> Iterator[Case]:
    yield from groups("integers", _integers(), LANES)
    yield from groups("floats", _floats(), FLOAT_LANES)
