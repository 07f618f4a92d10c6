"""Tests of cp.async and bulk groups, st.async, red.async, and mbarriers that lose participants."""

import numpy as np
import pytest

from tests.emulator import COPIES_LATE, STANDARD, Schedule
from tests.emulator.findings import (
    BarrierMisuse,
    DataRace,
    EmulatorError,
    IllegalInstruction,
    Misaligned,
    MissingProxyFence,
    UninitialisedRead,
    UnknownInstruction,
)
from tests.test_emulator.assemble import Run, global_array, run

# Each CTA of a cluster sends its thread indices, and the indices plus 100, to the other CTA.
_REMOTE = """
    mov.u32 %r1, smem;
    add.u32 %r2, %r1, 1024;
    mov.u32 %r3, %cluster_ctarank;
    xor.b32 %r4, %r3, 1;
    mapa.shared::cluster.u32 %r5, %r1, %r4;
    mapa.shared::cluster.u32 %r6, %r2, %r4;
    mad.lo.u32 %r7, %r90, 8, %r5;
    mad.lo.u32 %r8, %r90, 8, %r1;
    add.u32 %r9, %r90, 100;
    setp.eq.u32 %p1, %r90, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
    @%p1 fence.mbarrier_init.release.cluster;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;
    st.shared.v2.b32 [%r8], {%r90, %r90};
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    SEND
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
    @!%p2 bra WAIT;
    ld.shared.v2.b32 {%r10, %r11}, [%r8];
    mov.u32 %r12, %ctaid.x;
    mad.lo.u32 %r12, %r12, 32, %r90;
    mad.wide.u32 %rd1, %r12, 8, %rd90;
    st.global.v2.b32 [%rd1], {%r10, %r11};
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
"""
_STORE = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r7], {%r90, %r9}, [%r6];"
_ADD = (
    "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32"
    " [%r7], %r9, [%r6]; "
)
_ADD_BOTH = _ADD + _ADD.replace("[%r7]", "[%r7+4]")


def remote(send: str, body: str = _REMOTE, schedule: Schedule = COPIES_LATE) -> np.ndarray:
    out = global_array(np.zeros((2, 32, 2), np.uint32))
    Run(grid=2, cluster=2, schedule=schedule)(body.replace("SEND", send), out, shared=1040)
    return out


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_asynchronous_stores_arrive(schedule: Schedule) -> None:
    expected = [[[t, t + 100] for t in range(32)]] * 2
    assert remote(_STORE, schedule=schedule).tolist() == expected


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_asynchronous_reductions_add_up(schedule: Schedule) -> None:
    expected = [[[2 * t + 100] * 2 for t in range(32)]] * 2
    assert remote(_ADD_BOTH, schedule=schedule).tolist() == expected


_UNWAITED = _REMOTE.replace("    @!%p2 bra WAIT;\n", "")
# A bulk copy then stores the values to global memory.
_FORWARD = _REMOTE.replace(
    "    ld.shared.v2.b32",
    "    cp.async.bulk.global.shared::cta.bulk_group [%rd90], [%r1], 256;\n"
    "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; ld.shared.v2.b32",
)


@pytest.mark.parametrize(
    ("send", "body", "error", "message"),
    [
        (_STORE, _UNWAITED, DataRace, "of shared memory.*nothing orders the two"),
        (_STORE, _FORWARD, MissingProxyFence, "after a st.async write.*fence.proxy.async"),
        (_STORE.replace("[%r7]", "[%r7+4]"), _REMOTE, Misaligned, "multiples of 8"),
        (_STORE.replace("[%r6]", "[%r2]"), _REMOTE, IllegalInstruction, "must be the same CTA"),
        (_STORE.replace("v2.b32", "v2.b16"), _REMOTE, UnknownInstruction, "v2.b16 is not modelled"),
        (_STORE.replace(".shared::cluster", ""), _REMOTE, UnknownInstruction, "not modelled"),
        (_STORE.replace("v2.b32", "v4.b32"), _REMOTE, IllegalInstruction, "v4.b32 of 2 values"),
        (_ADD.replace("add.u32", "add.f32"), _REMOTE, IllegalInstruction, ".add of .f32"),
        (_ADD.replace(".relaxed", ""), _REMOTE, UnknownInstruction, "not modelled"),
        (_ADD.replace("add.u32", "exch.b32"), _REMOTE, UnknownInstruction, "not modelled"),
    ],
)
def test_remote_mutants(send: str, body: str, error: type[EmulatorError], message: str) -> None:
    with pytest.raises(error, match=message):
        remote(send, body)


# Lane t copies words t and t + 32 of array 0 to shared memory, each in a group of its own.
_COPY = """
    mov.u32 %r1, smem;
    mad.lo.u32 %r2, %r90, 4, %r1;
    mad.wide.u32 %rd1, %r90, 4, %rd90;
    mad.wide.u32 %rd2, %r90, 4, %rd91;
    setp.lt.u32 %p1, %r90, 16;
    cp.async.ca.shared.global [%r2], [%rd1], 4;
    cp.async.commit_group;
    cp.async.ca.shared.global [%r2+128], [%rd1+128], 4;
    cp.async.commit_group;
"""
_READ = "ld.shared.b32 %r3, [%r2+{0}]; st.global.b32 [%rd2+{0}], %r3;"


def copied(rest: str, first: str = _COPY, schedule: Schedule = COPIES_LATE) -> list[int]:
    source = global_array(np.arange(64) + 500, np.uint32)
    out = global_array(np.zeros(64), np.uint32)
    Run(schedule=schedule)(first + rest, source, out, shared=512)
    return out.tolist()


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_groups_of_copies(schedule: Schedule) -> None:
    rest = f"cp.async.wait_group 1; {_READ.format(0)} cp.async.wait_group 0; {_READ.format(128)}"
    assert copied(rest, schedule=schedule) == list(range(500, 564))


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_lanes_wait_for_their_own_copies(schedule: Schedule) -> None:
    """Two halves of a warp, one after the other, wait for their own groups."""
    half = (
        "cp.async.ca.shared.global [%r2], [%rd1], 4; cp.async.commit_group;"
        f"cp.async.wait_group 0; {_READ.format(0)}"
    )
    first = _COPY.split("cp.async")[0]
    rest = f"@%p1 bra LOW; {half} bra MEET; LOW: {half} MEET:"
    assert copied(rest, first, schedule=schedule)[:32] == list(range(500, 532))


@pytest.mark.parametrize(
    "rest",
    [
        f"cp.async.wait_group 1; {_READ.format(128)}",
        f"@!%p1 cp.async.wait_group 0; {_READ.format(0)}",
        _READ.format(0),
    ],
    ids=["one group short", "others wait", "nobody waits"],
)
def test_copies_that_nobody_waits_for(rest: str) -> None:
    for schedule in STANDARD:
        with pytest.raises(
            (DataRace, UninitialisedRead), match=r"after a cp.async write|nothing has written"
        ):
            copied(rest, schedule=schedule)


def test_an_arrival_closes_no_group() -> None:
    arrival = """
        add.u32 %r4, %r1, 256; setp.ne.u32 %p2, %r90, 0;
        @!%p2 mbarrier.init.shared::cta.b64 [%r4], 32; bar.warp.sync -1;
        cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r4];
    """
    before, last, _ = _COPY.rpartition("cp.async.commit_group;")
    first = before + arrival + last
    good = copied(f"cp.async.wait_group 1; {_READ.format(0)}", first)
    assert good[:32] == list(range(500, 532))
    with pytest.raises(DataRace, match=r"after a cp.async write"):
        copied(f"cp.async.wait_group 1; {_READ.format(128)}", first, STANDARD[0])


def test_copies_are_the_generic_proxys() -> None:
    store = "cp.async.bulk.global.shared::cta.bulk_group [%rd91], [%r1], 128;"
    end = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    rest = f"cp.async.wait_all; FENCE bar.warp.sync -1; @%p3 bra END; {store} {end} END:"
    rest = "setp.ne.u32 %p3, %r90, 0;" + rest
    assert copied(rest.replace("FENCE", "fence.proxy.async;"))[:32] == list(range(500, 532))
    with pytest.raises(MissingProxyFence, match=r"after a cp.async write"):
        copied(rest.replace("FENCE", ""))


def test_a_source_is_no_longer_than_its_copy() -> None:
    with pytest.raises(IllegalInstruction, match="src-size 5: must be at most 4"):
        copied("cp.async.ca.shared.global [%r2], [%rd1], 4, 5;")
    with pytest.raises(UnknownInstruction, match=r"modifier .evict"):
        copied("cp.async.ca.evict.shared.global [%r2], [%rd1], 4;")


# Lane 0 stores shared memory by a bulk copy; then every lane writes that memory.
_BULK = """
    mov.u32 %r1, smem;
    mad.lo.u32 %r2, %r90, 4, %r1;
    st.shared.b32 [%r2], %r90;
    fence.proxy.async;
    bar.warp.sync -1;
    setp.eq.u32 %p1, %r90, 0;
    setp.eq.u32 %p2, %r90, 1;
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd90], [%r1], 128;
    COMMIT cp.async.bulk.commit_group;
    WAIT cp.async.bulk.wait_group.read 0;
    bar.warp.sync -1;
    st.shared.b32 [%r2], 7;
    cp.async.bulk.wait_group 0;
"""


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
@pytest.mark.parametrize(("commit", "wait"), [("@%p1", "@%p1"), ("", "@%p1"), ("@%p1", "")])
def test_the_lane_that_stores_waits(commit: str, wait: str, schedule: Schedule) -> None:
    out = global_array(np.zeros(32), np.uint32)
    body = _BULK.replace("COMMIT", commit).replace("WAIT", wait)
    Run(schedule=schedule)(body, out, shared=128)
    assert out.tolist() == list(range(32))


@pytest.mark.parametrize(("commit", "wait"), [("@%p1", "@%p2"), ("@%p2", ""), ("@%p2", "@%p2")])
def test_another_lanes_commit_or_wait_does_not_count(commit: str, wait: str) -> None:
    out = global_array(np.zeros(32), np.uint32)
    body = _BULK.replace("COMMIT", commit).replace("WAIT", wait)
    with pytest.raises(DataRace, match=r"write of shared memory.*after a bulk copy read"):
        run(body, out, shared=128)


# A barrier of 6 at %r2; %p1 is true in lane 0.
_BARRIER = """
    mov.u32 %r2, smem;
    setp.ne.u32 %p1, %r90, 0;
    @%p1 bra END;
    mbarrier.init.shared::cta.b64 [%r2], 6;
"""


def test_drops_lower_later_phases() -> None:
    out = global_array(np.zeros(2), np.uint32)
    body = """
        mbarrier.arrive_drop.shared::cta.b64 %rd1, [%r2], 3;
        mbarrier.arrive_drop.noComplete.shared::cta.b64 %rd2, [%r2], 1;
        mbarrier.arrive.shared::cta.b64 %rd3, [%r2], 2;
        mbarrier.arrive.shared::cta.b64 %rd4, [%r2], 2;
        mbarrier.test_wait.shared::cta.b64 %p2, [%r2], %rd4;
        mbarrier.pending_count.b64 %r3, %rd4;
        selp.b32 %r4, 1, 0, %p2;
        st.global.v2.b32 [%rd90], {%r3, %r4};
    END:
    """
    run(_BARRIER + body, out, shared=16)
    assert out.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("arrive.noComplete.shared::cta.b64 %rd1, [%r2], 6", ".noComplete completes phase 0"),
        ("arrive_drop.noComplete.shared::cta.b64 %rd1, [%r2], 6", ".noComplete completes phase 0"),
        ("arrive_drop.shared::cta.b64 %rd1, [%r2], 7", "arrive_drop of 7 on mbarrier"),
        ("arrive.shared::cta.b64 %rd1, [%r2], 7", r"7 arrival\(s\) more than expected"),
    ],
)
def test_arrivals_beyond_the_count(body: str, message: str) -> None:
    with pytest.raises(BarrierMisuse, match=message):
        run(f"{_BARRIER} mbarrier.{body}; END:", shared=16)


def test_copies_of_no_bytes_do_nothing() -> None:
    source, out = global_array(np.arange(32), np.uint32), global_array(np.zeros(32), np.uint32)
    body = f"""{_BARRIER}
        mov.u32 %r3, 0; add.u32 %r4, %r2, 16; fence.proxy.async;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
            [%r4], [%rd90], %r3, [%r2];
        cp.async.bulk.global.shared::cta.bulk_group [%rd91], [%r4], %r3;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
        mbarrier.arrive.shared::cta.b64 %rd1, [%r2], 6;
    END:
    """
    Run(schedule=COPIES_LATE)(body, source, out, shared=128)
    assert not out.any()
