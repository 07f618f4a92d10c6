"""wgmma: layouts of B and A in shared memory, fragments, signs, and rounding of sums."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from tests.test_emulator.silicon.case import Array, Case, Tolerance, random_array
from tests.test_emulator.silicon.ptx_text import PROLOGUE, module, shared_array, upload

_THREADS = 128
_SIZE = 32768
_TYPES = ("bf16", "f16")
_DEPTHS = {"bf16": 16, "f16": 16, "e4m3": 32}
_MODES = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
_SPANS = {"128B": 128, "64B": 64, "32B": 32}


def _encoded(numbers: Array, kind: str) -> Array:
    """Patterns for float32 values, as 16-bit words; bf16 takes the upper half, not rounded."""
    if kind == "e4m3":
        return numbers.astype(ml_dtypes.float8_e4m3fn).view("u2")
    if kind == "f16":
        return numbers.astype("f2").view("u2")
    return (numbers.view("u4") >> np.uint32(16)).astype("u2")


def _small(seed: str, count: int, kind: str) -> Array:
    """Words of integers from -4 to 4: their products and sums are exact in any order."""
    count *= 2 if kind == "e4m3" else 1
    numbers = (random_array(seed, (count,), "u1") % 9).astype("f4") - 4
    return _encoded(numbers, kind)


def _descriptor(mode: str, leading: int, stride: int, start: int = 0) -> int:
    return _MODES[mode] << 62 | stride >> 4 << 32 | leading >> 4 << 16 | start >> 4


def _body(n: int, kind: str, b: int, a: int | None, flags: str) -> list[str]:
    count = n // 2
    registers = ", ".join(f"%c{i}" for i in range(count))
    first = "{%w0, %w1, %w2, %w3}" if a is None else "%d1"
    adds, signs = flags.split(", ", 1)
    return [
        PROLOGUE,
        f".reg .b32 %w<4>; .reg .f32 %c<{count}>;",
        upload(_SIZE, _THREADS, "%source"),
        "fence.proxy.async.shared::cta; bar.sync 0;",
        "mad.wide.u32 %at, %tid_x, 16, %fragments;",
        "ld.global.v4.b32 {%w0, %w1, %w2, %w3}, [%at];",
        "mad.wide.u32 %at, %tid_x, 4, %before;",
        *(f"ld.global.f32 %c{i}, [%at+{512 * i}];" for i in range(count)),
        "shr.u32 %step, %base, 4; cvt.u64.u32 %d0, %step;",
        f"add.u64 %d1, %d0, {a or 0}; add.u64 %d2, %d0, {b};",
        f"setp.{'lt' if adds == '1' else 'gt'}.u32 %p0, %tid_x, {_THREADS};",
        "wgmma.fence.sync.aligned;",
        f"wgmma.mma_async.sync.aligned.m64n{n}k{_DEPTHS[kind]}.f32.{kind}.{kind} "
        f"{{{registers}}}, {first}, %d2, "
        f"%p0, {signs};",
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;",
        "mad.wide.u32 %at, %tid_x, 4, %after;",
        *(f"st.global.f32 [%at+{512 * i}], %c{i};" for i in range(count)),
    ]


def _case(
    name: str,
    n: int,
    kind: str,
    b: int,
    a: int | None = None,
    flags: str = "1, 1, 1",
    turns: str = "0",
    arrays: tuple[Array, Array, Array] | None = None,
) -> Case:
    if arrays is None:
        before = (random_array(f"{name} c", (n // 2, _THREADS), "u1") % 32).astype("f4").view("u4")
        source = _small(f"{name} b", _SIZE // 2, kind)
        arrays = source, _small(f"{name} a", 8 * _THREADS, kind), before
    source, fragments, before = arrays
    names = ("source", "fragments", "before", "after")
    turns = turns if a is None else f"{turns}, 0" if len(turns) == 1 else turns
    flags = flags if kind == "e4m3" else f"{flags}, {turns}"
    return Case(
        name,
        module(names, _body(n, kind, b, a, flags), declarations=shared_array(_SIZE)),
        {"source": source, "fragments": fragments, "before": before},
        {"after": np.full((n // 2, _THREADS), 0x7FC00000, "u4")},
        block=(_THREADS, 1, 1),
        rows={"after": [f"register {i}" for i in range(n // 2)]},
    )


def _layouts() -> Iterator[Case]:
    """Layouts of B along K and N, and of A along K and M, with every swizzle."""
    for n in (8, 16, 24, 64, 136, 256):
        for mode, span in _SPANS.items():
            yield _case(f"b_{mode}_{n}", n, "bf16", _descriptor(mode, 16, 8 * span))
        yield _case(f"b_none_{n}", n, "f16", _descriptor("none", 128, 256))
    for mode, span in _SPANS.items():
        # Steps along K within a row, and groups of 8 rows further apart.
        for start in range(0, span, 32):
            yield _case(f"k_{mode}_{start}", 32, "f16", _descriptor(mode, 16, 10 * span, start))
        turned = _descriptor(mode, 16 * span, 8 * span)
        for n in (8, 64, 128):
            yield _case(f"b_turned_{mode}_{n}", n, "bf16", turned, turns="1")
        plain = _descriptor(mode, 16, 8 * span, 16384)
        yield _case(f"a_{mode}", 32, "bf16", _descriptor(mode, 16, 8 * span), plain)
        away = _descriptor(mode, 16 * span, 8 * span, 16384)
        yield _case(f"a_turned_{mode}", 32, "f16", _descriptor(mode, 16, 8 * span), away, turns="1")
        yield _case(f"both_turned_{mode}", 64, "f16", turned, away, turns="1, 1")
    yield _case("b_turned_none", 64, "bf16", _descriptor("none", 256, 1024), turns="1")
    none = _descriptor("none", 128, 256)
    yield _case("a_none", 32, "bf16", none, _descriptor("none", 1024, 128, 16384))
    yield _case("a_turned_none", 32, "f16", none, _descriptor("none", 256, 1024, 8192), turns="1")


def _flags() -> Iterator[Case]:
    """Flags: scale-d of 0, and both signs of A and B."""
    b = _descriptor("128B", 16, 1024)
    for name, flags in {
        "cleared": "0, 1, 1",
        "minus_a": "1, -1, 1",
        "minus_b": "1, 1, -1",
        "minus_both": "0, -1, -1",
    }.items():
        yield _case(name, 16, "bf16", b, flags=flags)
        yield _case(f"{name}_a", 16, "f16", b, _descriptor("128B", 16, 1024, 16384), flags)


def _rounded() -> Iterator[Case]:
    """Products whose sums are inexact in float32."""
    for kind in _TYPES:
        bits = random_array(f"rounded {kind}", (_SIZE // 2 + 8 * _THREADS,), "i2")
        numbers = _encoded(bits.astype("f4") / 2**14, kind)
        before = (random_array("sums", (32, _THREADS), "i2").astype("f4") / 2**13).view("u4")
        arrays = numbers[: _SIZE // 2], numbers[_SIZE // 2 :], before
        case = _case(f"rounded_{kind}", 64, kind, _descriptor("128B", 16, 1024), arrays=arrays)
        case.tolerance["after"] = {row: Tolerance("f32", absolute=ROUNDING) for row in range(32)}
        yield case


def _e4m3() -> Iterator[Case]:
    """E4M3: layouts, flags, and sums that are inexact in the tensor core."""
    for n in (8, 64, 136, 256):
        for mode, span in _SPANS.items():
            yield _case(f"e4m3_{mode}_{n}", n, "e4m3", _descriptor(mode, 16, 8 * span))
    b = _descriptor("128B", 16, 1024)
    for start in (32, 64, 96):
        yield _case(f"e4m3_k_{start}", 32, "e4m3", _descriptor("128B", 16, 1024, start))
    yield _case("e4m3_a", 32, "e4m3", b, _descriptor("128B", 16, 1024, 16384))
    yield _case("e4m3_cleared", 16, "e4m3", b, flags="0, 1, 1")
    yield _case("e4m3_minus_a", 16, "e4m3", b, flags="1, -1, 1")
    for name, least in {"like": 0, "wide": -9}.items():
        # Exponents of the factors: within 2 of one another, or over E4M3's range.
        count = _SIZE + 16 * _THREADS
        mantissas = 8 + random_array(f"e4m3 {name} m", (count,), "u1") % 8
        exponents = random_array(f"e4m3 {name} e", (count,), "u1").astype("i4") % (2 - least)
        signs = 1 - 2 * (random_array(f"e4m3 {name} s", (count,), "u1") % 2).astype("f4")
        numbers = signs * np.ldexp(mantissas.astype("f4") / 8, exponents + least)
        words = _encoded(numbers.astype("f4"), "e4m3")
        before = (random_array(f"e4m3 {name}", (32, _THREADS), "i2").astype("f4") / 2**12).view(
            "u4"
        )
        arrays = words[: _SIZE // 2], words[_SIZE // 2 :], before
        case = _case(f"e4m3_rounded_{name}", 64, "e4m3", b, arrays=arrays)
        case.tolerance["after"] = {
            row: Tolerance("f32", absolute=E4M3_ROUNDING) for row in range(32)
        }
        yield case


# The bound for E4M3: 33 terms and their sum, each truncated 13 bits below its largest, below 128.
E4M3_ROUNDING = (33 * 16 + 128) * 2.0**-13
# An ulp of the largest sum: 16 products and their addend, each below 4.
ROUNDING = 2.0**-17


def cases() -> Iterator[Case]:
    yield from _layouts()
    yield from _flags()
    yield from _rounded()
    yield from _e4m3()
