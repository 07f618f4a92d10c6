"""Atomics: lanes on one address and on several, 128 bits, subnormal numbers, orders."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.emulator.findings import Misaligned, UnknownInstruction
from tests.test_emulator.assemble import Run, global_array, run


def test_lanes_that_meet_take_turns() -> None:
    """Each lane that adds to a word gets the sum of the lanes before it."""
    words, out = global_array(np.zeros(4), np.uint32), global_array(np.zeros(32), np.uint32)
    body = """
        and.b32 %r1, %r90, 3; mad.wide.u32 %rd1, %r1, 4, %rd90;
        atom.global.add.u32 %r2, [%rd1], %r90;
        mad.wide.u32 %rd2, %r90, 4, %rd91; st.global.b32 [%rd2], %r2;
    """
    run(body, words, out)
    assert words.tolist() == [sum(range(w, 32, 4)) for w in range(4)]
    assert out.tolist() == [sum(range(t % 4, t, 4)) for t in range(32)]


MEETING: dict[str, Callable[[int, int], int]] = {
    "add.u32": lambda old, new: (old + new) % 2**32,
    "add.s32": lambda old, new: (old + new) % 2**32,
    "and.b32": lambda old, new: old & new,
    "or.b32": lambda old, new: old | new,
    "xor.b32": lambda old, new: old ^ new,
    "max.u32": max,
    "exch.b32": lambda old, new: new,
    "inc.u32": lambda old, new: 0 if old >= new else old + 1,
}


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("operation", MEETING)
def test_lanes_that_meet_at_one_place(operation: str, space: str) -> None:
    """Lanes on one address act in order; lanes 3 and 31 are inactive."""
    start, factor = 0xF0F1F2F3, 2654435761
    word, out = global_array(np.zeros(1), np.uint32), global_array(np.zeros(32), np.uint32)
    place = "[%rd90]" if space == "global" else "[%r9]"
    body = f"""
        mov.u32 %r9, smem; st.{space}.b32 {place}, {start};
        mul.lo.u32 %r1, %r90, {factor}; mov.u32 %r2, 99;
        setp.eq.u32 %p1, %r90, 3; setp.eq.u32 %p2, %r90, 31;
        or.pred %p1, %p1, %p2;
        @!%p1 atom.{space}.{operation} %r2, {place}, %r1;
        mad.wide.u32 %rd2, %r90, 4, %rd91; st.global.b32 [%rd2], %r2;
        ld.{space}.b32 %r4, {place}; st.global.b32 [%rd90], %r4;
    """
    run(body, word, out, shared=16)
    expected, now = [], start
    for lane in range(32):
        expected.append(99 if lane in (3, 31) else now)
        if lane not in (3, 31):
            now = MEETING[operation](now, lane * factor % 2**32)
    assert out.tolist() == expected
    assert word.tolist() == [now]


def test_lanes_apart_in_two_memories() -> None:
    """Even lanes count in global memory, odd lanes in shared memory; lane 31 is inactive."""
    words, out = global_array(np.full(32, 5), np.uint32), global_array(np.zeros(32), np.uint32)
    body = """
        mov.u32 %r1, smem; mad.lo.u32 %r1, %r90, 4, %r1; st.shared.b32 [%r1], 7;
        cvt.u64.u32 %rd1, %r1; cvta.shared.u64 %rd1, %rd1;
        mad.wide.u32 %rd2, %r90, 4, %rd90; mad.wide.u32 %rd3, %r90, 4, %rd91;
        and.b32 %r2, %r90, 1; setp.eq.u32 %p1, %r2, 0; selp.b64 %rd4, %rd2, %rd1, %p1;
        setp.eq.u32 %p2, %r90, 31; mov.u32 %r3, 99;
        @!%p2 atom.max.u32 %r3, [%rd4], 6;
        st.global.b32 [%rd3], %r3;
    """
    run(body, words, out, shared=128)
    assert words.tolist() == [6, 5] * 16
    assert out.tolist() == [5, 7] * 15 + [5, 99]


@pytest.mark.parametrize("threads", [1, 32])
def test_128_bits(threads: int) -> None:
    """128-bit operands may be uniform; the second cas compares unequal."""
    data, out = global_array([3, 4], np.uint64), global_array(np.zeros((3, 2)), np.uint64)
    body = """
        setp.ne.u32 %p1, %r90, 0; @%p1 bra END;
        mov.u64 %rd1, 3; mov.u64 %rd2, 4; mov.b128 %q1, {%rd1, %rd2};
        mov.u64 %rd3, 1; mov.u64 %rd4, 0xffffffffffffffff; mov.b128 %q2, {%rd3, %rd4};
        atom.global.cas.b128 %q3, [%rd90], %q1, %q2;
        atom.global.cas.b128 %q4, [%rd90], %q1, %q1;
        atom.global.exch.b128 %q5, [%rd90], %q1;
        mov.b128 {%rd5, %rd6}, %q3; st.global.v2.b64 [%rd91], {%rd5, %rd6};
        mov.b128 {%rd5, %rd6}, %q4; st.global.v2.b64 [%rd91+16], {%rd5, %rd6};
        mov.b128 {%rd5, %rd6}, %q5; st.global.v2.b64 [%rd91+32], {%rd5, %rd6};
    END:
    """
    Run(block=threads)(body, data, out)
    assert out.tolist() == [[3, 4], [1, 2**64 - 1], [1, 2**64 - 1]]
    assert data.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("space", "expected"), [("shared", 2), ("shared_generic", 2), ("global", 0), ("generic", 0)]
)
def test_subnormal_sums_are_flushed_in_global_memory_alone(space: str, expected: int) -> None:
    out = global_array(np.full(1, 1), np.uint32)
    place = "%rd91" if space == "shared_generic" else "%rd90" if "g" in space else "%r1"
    atom = "atom." + {"shared": "shared.", "global": "global."}.get(space, "")
    body = f"""
        mov.u32 %r1, smem; st.shared.b32 [%r1], 1;
        cvt.u64.u32 %rd91, %r1; cvta.shared.u64 %rd91, %rd91;
        {atom}add.f32 %r2, [{place}], 0f00000001;
        {"ld.shared.b32 %r3, [%r1]; st.global.b32 [%rd90], %r3;" if "shared" in space else ""}
    """
    Run(block=1)(body, out, shared=16)
    assert out.tolist() == [expected]


def test_what_atomics_do_not_do() -> None:
    out = global_array(np.zeros(8), np.uint32)
    for form in ("add.b32", "min.f32", "inc.u64", "and.u16", "cas.f32", "frob.u32"):
        with pytest.raises(UnknownInstruction, match="is not modelled"):
            run(f"red.global.{form} [%rd90], %r90;", out)
    with pytest.raises(Misaligned, match="not a multiple of 16"):
        run("mov.b128 %q1, {%rd90, %rd90}; atom.global.exch.b128 %q2, [%rd90+8], %q1;", out)
    with pytest.raises(Misaligned, match="not a multiple of 8"):
        run("red.global.add.v2.f32 [%rd90+4], {%r90, %r90};", out)
