"""Integer arithmetic, carry chains, shifts, bit fields, permutes and packed 16-bit lanes."""

from collections.abc import Iterator

from tests.test_emulator.silicon.case import Case
from tests.test_emulator.silicon.cases.banks import LANES
from tests.test_emulator.silicon.cases.instructions import Op, groups

_INTEGERS = [f"{sign}{width}" for sign in "us" for width in (16, 32, 64)]


def _bank(kind: str) -> str:
    return "u" + kind[1:]


def _arithmetic() -> Iterator[Op]:
    for kind in _INTEGERS:
        bank, width = _bank(kind), kind[1:]
        for name in ("add", "sub", "mul.lo", "mul.hi", "div", "rem", "min", "max"):
            yield Op(f"{name}.{kind}", width, f"{bank} {bank}")
        for name in ("mad.lo", "mad.hi"):
            yield Op(f"{name}.{kind}", width, f"{bank} {bank} {bank}")
        if width != "64":
            wide = str(2 * int(width))
            yield Op(f"mul.wide.{kind}", wide, f"{bank} {bank}")
            yield Op(f"mad.wide.{kind}", wide, f"{bank} {bank} u{wide}")
        if kind[0] == "s":
            yield Op(f"abs.{kind}", width, bank)
            yield Op(f"neg.{kind}", width, bank)
    for name in ("add.sat", "sub.sat"):
        yield Op(f"{name}.s32", "32", "u32 u32")
    yield Op("mad.hi.sat.s32", "32", "u32 u32 u32")
    for kind in ("u32", "s32"):
        yield Op(f"sad.{kind}", "32", "u32 u32 u32")
        for half in ("lo", "hi"):
            yield Op(f"mul24.{half}.{kind}", "32", "u32 u32")
            yield Op(f"mad24.{half}.{kind}", "32", "u32 u32 u32")
        for other in ("u32", "s32"):
            yield Op(f"dp4a.{kind}.{other}", "32", "u32 u32 u32")
            for half in ("lo", "hi"):
                yield Op(f"dp2a.{half}.{kind}.{other}", "32", "u32 u32 u32")
    yield Op("mad24.hi.sat.s32", "32", "u32 u32 u32")
    for name in ("min.relu", "max.relu"):
        yield Op(f"{name}.s32", "32", "u32 u32")
        yield Op(f"{name}.s16x2", "32", "u16x2 u16x2")
    for kind in ("u16x2", "s16x2"):
        for name in ("add", "min", "max"):
            yield Op(f"{name}.{kind}", "32", "u16x2 u16x2")


def _carries() -> Iterator[Op]:
    for width in ("32", "64"):
        bank = f"u{width}"
        # Carry out of one instruction shows as the carry into the next.
        for first, second in (("add", "addc"), ("sub", "subc")):
            yield Op(
                f"{first}.cc.u{width}; {second}.u{width}",
                f"{width}|{width}",
                f"{bank}:0 {bank}:1 {bank}:2",
                f"{first}.cc.u{width} $d0, $a0, $a1; {second}.u{width} $d1, $a2, $a0;",
            )
            yield Op(
                f"{first}.cc.u{width}; {second}.cc.u{width}; {second}.u{width}",
                f"{width}|{width}|{width}",
                f"{bank}:0 {bank}:1 {bank}:2",
                f"{first}.cc.u{width} $d0, $a0, $a1; {second}.cc.u{width} $d1, $a2, $a1;"
                f" {second}.u{width} $d2, $a0, $a2;",
            )
        for half in ("lo", "hi"):
            yield Op(
                f"mad.{half}.cc.u{width}; madc.{half}.cc.u{width}; addc.u{width}",
                f"{width}|{width}|{width}",
                f"{bank}:0 {bank}:1 {bank}:2",
                f"mad.{half}.cc.u{width} $d0, $a0, $a1, $a2;"
                f" madc.{half}.cc.u{width} $d1, $a1, $a2, $a0;"
                f" addc.u{width} $d2, $a0, 0;",
            )


def _bits() -> Iterator[Op]:
    for width in ("16", "32", "64"):
        bank = f"u{width}"
        for name in ("and", "or", "xor"):
            yield Op(f"{name}.b{width}", width, f"{bank} {bank}")
        for name in ("not", "cnot"):
            yield Op(f"{name}.b{width}", width, bank)
        yield Op(f"shl.b{width}", width, f"{bank} shift:1")
        for kind in ("u", "s", "b"):
            yield Op(f"shr.{kind}{width}", width, f"{bank} shift:1")
    for width in ("32", "64"):
        bank = f"u{width}"
        # PTX does not define operands beyond 255: 32-bit forms read 8 bits, 64-bit forms all bits.
        field = "field8"
        yield Op(f"popc.b{width}", "32", bank)
        yield Op(f"clz.b{width}", "32", bank)
        yield Op(f"brev.b{width}", width, bank)
        yield Op(f"bfi.b{width}", width, f"{bank} {bank} {field}:0 {field}:1")
        for sign in "us":
            yield Op(f"bfind.{sign}{width}", "32", bank)
            yield Op(f"bfind.shiftamt.{sign}{width}", "32", bank)
            yield Op(f"bfe.{sign}{width}", width, f"{bank} {field}:0 {field}:1")
    for side in ("l", "r"):
        for mode in ("clamp", "wrap"):
            yield Op(f"shf.{side}.{mode}.b32", "32", "u32 u32 shift:1")
    for mode in ("clamp", "wrap"):
        yield Op(f"bmsk.{mode}.b32", "32", "field:0 field:1")
        for kind in ("u32", "s32"):
            yield Op(f"szext.{mode}.{kind}", "32", "u32 shift:1")
    for table in (0x00, 0x96, 0xE8, 0xCA, 0x80, 0xFE, 0x3C, 0x1B, 0x6A, 0xFF, 0x0F, 0x55):
        yield Op("lop3.b32", "32", f"u32 u32 u32 =0x{table:02x}")
    # A register as selector, so that ptxas cannot fold the result.
    yield Op("prmt.b32", "32", "u32 u32 u32")
    for mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
        yield Op(f"prmt.b32.{mode}", "32", "u32 u32 field:0")
    yield Op(
        "fns.b32",
        "32",
        "u32:1 shift:1 shift:2",
        "{ .reg .b32 %base, %off; and.b32 %base, $a1, 31; and.b32 %off, $a2, 15;"
        " sub.s32 %off, %off, 7; fns.b32 $d0, $a0, %base, %off; }",
    )


def _packs() -> Iterator[Op]:
    for kind in ("u16", "s16"):
        yield Op(f"cvt.pack.sat.{kind}.s32", "32", "u32 u32")
    for kind in ("u8", "s8", "u4", "s4", "u2", "s2"):
        yield Op(f"cvt.pack.sat.{kind}.s32.b32", "32", "u32 u32 u32")
    yield Op("mov.b32 of b16", "32", "u16 u16", "mov.b32 $d0, {$a0, $a1};")
    yield Op("mov.b64 of b32", "64", "u32 u32", "mov.b64 $d0, {$a0, $a1};")
    yield Op("mov.b64 of b16", "64", "u16:0 u16:1 u16:2 u16:0",
             "mov.b64 $d0, {$a0, $a1, $a2, $a3};")  # fmt: skip
    yield Op("mov.b32 to b16", "16|16", "u32", "mov.b32 {$d0, $d1}, $a0;")
    yield Op("mov.b64 to b32", "32|32", "u64", "mov.b64 {$d0, $d1}, $a0;")
    yield Op("mov.b64 to b16", "16|16|16|16", "u64", "mov.b64 {$d0, $d1, $d2, $d3}, $a0;")


def cases() -> Iterator[Case]:
    yield from groups("arithmetic", _arithmetic(), LANES)
    yield from groups("carry", _carries(), LANES)
    yield from groups("bits", _bits(), LANES)
    yield from groups("packs", _packs(), LANES)
