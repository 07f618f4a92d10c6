"""Races and other faults that hardware does not report, next to the same kernels without faults."""

from functools import partial

import numpy as np
import pytest

from tests.emulator import STANDARD, Schedule
from tests.emulator.findings import (
    DataRace,
    Deadlock,
    EmulatorError,
    RegisterBudget,
    UnfinishedStore,
)
from tests.mutants import FINDING, Mutant, noticed
from tests.test_emulator.assemble import Run, global_array

# Two warps exchange shared memory through barrier 0.
EXCHANGE = """
    shl.b32 %r1, %r90, 2;
    mov.u32 %r2, smem;
    add.u32 %r3, %r2, %r1;
    st.shared.u32 [%r3], %r90;
    bar.sync 0;
    xor.b32 %r4, %r1, 128;
    add.u32 %r5, %r2, %r4;
    ld.shared.u32 %r6, [%r5];
    mad.wide.u32 %rd1, %r90, 4, %rd90;
    st.global.u32 [%rd1], %r6;
"""

# Each thread stores BYTES bytes; the last one of warp 0 and the first one of warp 1 are neighbours
# in a word if BYTES is 1 or 2.
NEIGHBOURS = """
    mov.u32 %r1, smem;
    mad.lo.u32 %r2, %r90, BYTES, %r1;
    mov.b16 %h1, 7;
    st.shared.KIND [%r2+BYTES], VALUES;
"""

# Warp 0 copies in 256 bytes, four times to one buffer; warp 1 reads them.
PIPELINE = """
    mov.u32 %r2, smem;
    add.u32 %r3, %r2, 1024;
    add.u32 %r4, %r2, 1032;
    setp.ne.u32 %p1, %r90, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r3], 1;
    mbarrier.init.shared.b64 [%r4], 32;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
    shr.u32 %r5, %r90, 5;
    setp.ne.u32 %p2, %r5, 0;
    mov.u32 %r6, 0;
    mov.u32 %r7, 0;
    mov.u64 %rd2, %rd90;
    @%p2 bra CONSUME;
    elect.sync _|%p3, -1;
    @!%p3 bra DONE;
PRODUCE:
    xor.b32 %r8, %r6, 1;
EMPTY:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r4], %r8;
    @!%p4 bra EMPTY;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd2], 256, [%r3];
    add.u64 %rd2, %rd2, 256;
    xor.b32 %r6, %r6, 1;
    add.u32 %r7, %r7, 1;
    setp.lt.u32 %p5, %r7, 4;
    @%p5 bra PRODUCE;
    bra DONE;
CONSUME:
    and.b32 %r9, %r90, 31;
    shl.b32 %r10, %r9, 3;
    add.u32 %r11, %r2, %r10;
    cvt.u64.u32 %rd3, %r10;
    add.u64 %rd4, %rd91, %rd3;
NEXT:
FULL:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r3], %r6;
    @!%p4 bra FULL;
    ld.shared.v2.u32 {%r12, %r13}, [%r11];
    mbarrier.arrive.shared.b64 _, [%r4];
    st.global.v2.u32 [%rd4], {%r12, %r13};
    add.u64 %rd4, %rd4, 256;
    xor.b32 %r6, %r6, 1;
    add.u32 %r7, %r7, 1;
    setp.lt.u32 %p5, %r7, 4;
    @%p5 bra NEXT;
DONE:
"""

# Shared memory is written by threads, stored by a bulk copy, written again, stored again.
STORE = """
    mov.u32 %r2, smem;
    shl.b32 %r3, %r90, 2;
    add.u32 %r4, %r2, %r3;
    setp.ne.u32 %p1, %r90, 0;
    mov.u32 %r5, 0;
    mov.u64 %rd2, %rd90;
AGAIN:
    mad.lo.u32 %r6, %r5, 1000, %r90;
    st.shared.u32 [%r4], %r6;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p1 bra SKIP;
    cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r2], 256;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
SKIP:
    bar.sync 0;
    add.u64 %rd2, %rd2, 256;
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p2, %r5, 2;
    @%p2 bra AGAIN;
    @%p1 bra DONE;
    cp.async.bulk.wait_group 0;
DONE:
"""

# The two CTAs of a cluster write into each other's shared memory.
CLUSTER = """
    mov.u32 %r2, smem;
    mov.u32 %r3, %cluster_ctarank;
    xor.b32 %r4, %r3, 1;
    mapa.shared::cluster.u32 %r5, %r2, %r4;
    shl.b32 %r6, %r90, 2;
    add.u32 %r7, %r5, %r6;
    add.u32 %r8, %r2, %r6;
    mad.lo.u32 %r9, %r3, 100, %r90;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    st.shared::cluster.u32 [%r7], %r9;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    ld.shared.u32 %r10, [%r8];
    mov.u32 %r11, %ctaid.x;
    mad.lo.u32 %r12, %r11, 32, %r90;
    mad.wide.u32 %rd1, %r12, 4, %rd90;
    st.global.u32 [%rd1], %r10;
"""

# CTA 0 publishes a value through a flag in global memory; CTA 1 waits for it.
FLAG = """
    mov.u32 %r1, %ctaid.x;
    setp.ne.u32 %p1, %r90, 0;
    @%p1 bra DONE;
    setp.ne.u32 %p2, %r1, 0;
    @%p2 bra READER;
    st.global.u32 [%rd90], 42;
    st.release.gpu.global.u32 [%rd90+4], 1;
    bra DONE;
READER:
    ld.acquire.gpu.global.u32 %r2, [%rd90+4];
    setp.eq.u32 %p3, %r2, 0;
    @%p3 bra READER;
    ld.global.u32 %r3, [%rd90];
    st.global.u32 [%rd90+8], %r3;
DONE:
"""


def exchange(body: str, schedule: Schedule) -> None:
    out = global_array(np.zeros(64, np.uint32))
    Run(block=64, schedule=schedule)(body, out, shared=256)
    np.testing.assert_array_equal(out, np.arange(64) ^ 32)


def pipeline(body: str, schedule: Schedule) -> None:
    data = global_array(np.arange(256, dtype=np.uint32))
    out = global_array(np.zeros(256, np.uint32))
    Run(block=64, schedule=schedule)(body, data, out, shared=2048)
    np.testing.assert_array_equal(out, data)


def store(body: str, schedule: Schedule) -> None:
    out = global_array(np.zeros((2, 64), np.uint32))
    Run(block=64, schedule=schedule)(body, out, shared=256)
    np.testing.assert_array_equal(out, np.arange(64) + np.array([[0], [1000]]))


def cluster(body: str, schedule: Schedule) -> None:
    out = global_array(np.zeros((2, 32), np.uint32))
    Run(grid=2, cluster=2, schedule=schedule)(body, out, shared=128)
    np.testing.assert_array_equal(out, np.arange(32) + np.array([[100], [0]]))


def flag(body: str, schedule: Schedule) -> None:
    out = global_array(np.zeros(4, np.uint32))
    Run(grid=2, schedule=schedule)(body, out)
    assert out.tolist() == [42, 1, 42, 0]


KERNELS = {
    "exchange": (exchange, EXCHANGE),
    "pipeline": (pipeline, PIPELINE),
    "store": (store, STORE),
    "cluster": (cluster, CLUSTER),
    "flag": (flag, FLAG),
}


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_right_kernels_run_in_every_schedule(name: str, schedule: Schedule) -> None:
    check, body = KERNELS[name]
    check(body, schedule)


def edited(kernel: str, right: str, wrong: str, caught: str, match: str) -> Mutant:
    return Mutant.edited(right, wrong, caught, match, on=kernel)


MUTANTS = {
    "barrier left out": edited(
        "exchange", "bar.sync 0;", "", "UninitialisedRead", "at 0x480 that nothing has written"
    ),
    "barrier after the read": edited(
        "exchange",
        "bar.sync 0;\n    xor.b32 %r4, %r1, 128;\n    add.u32 %r5, %r2, %r4;\n"
        "    ld.shared.u32 %r6, [%r5];",
        "xor.b32 %r4, %r1, 128;\n    add.u32 %r5, %r2, %r4;\n    ld.shared.u32 %r6, [%r3];\n"
        "    st.shared.u32 [%r5], %r6;\n    bar.sync 0;",
        "DataRace",
        "nothing orders the two",
    ),
    "barrier of fewer threads": edited(
        "exchange", "bar.sync 0;", "bar.sync 0, 32;", "UninitialisedRead", "nothing has written"
    ),
    "barrier of more threads": edited(
        "exchange", "bar.sync 0;", "bar.sync 0, 96;", "Deadlock", r"barrier 0 .*64 of 96 threads"
    ),
    "barrier of half a warp": edited(
        "exchange", "bar.sync 0;", "bar.sync 0, 48;", "BarrierMisuse", "multiple of 32"
    ),
    "barrier that does not exist": edited(
        "exchange", "bar.sync 0;", "bar.sync 16;", "BarrierMisuse", "0 to 15"
    ),
    "shared memory out of bounds": edited(
        "exchange",
        "st.shared.u32 [%r3]",
        "st.shared.u32 [%r3+256]",
        "ArrayOverrun",
        "shared memory",
    ),
    "misaligned": edited(
        "exchange", "st.shared.u32 [%r3]", "st.shared.u32 [%r3+2]", "Misaligned", "multiple of 4"
    ),
    "full barrier not waited for": edited(
        "pipeline", "@!%p4 bra FULL;", "", FINDING, "read of shared memory"
    ),
    "empty barrier not waited for": edited(
        "pipeline", "@!%p4 bra EMPTY;", "", FINDING, "write of shared memory|more than expected"
    ),
    "expects too few bytes": edited(
        "pipeline",
        "[%r3], 256;\n    cp",
        "[%r3], 128;\n    cp",
        "Deadlock",
        "-128 bytes outstanding",
    ),
    "expects too many bytes": edited(
        "pipeline",
        "[%r3], 256;\n    cp",
        "[%r3], 512;\n    cp",
        "Deadlock",
        "256 bytes outstanding",
    ),
    "expects nothing": edited(
        "pipeline",
        "mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 256;",
        "mbarrier.arrive.shared.b64 _, [%r3];",
        FINDING,
        "read of shared memory|write of shared memory",
    ),
    "consumer does not release": edited(
        "pipeline",
        "mbarrier.arrive.shared.b64 _, [%r4];",
        "",
        "Deadlock",
        "waits for the completion",
    ),
    "consumer releases before it reads": edited(
        "pipeline",
        "ld.shared.v2.u32 {%r12, %r13}, [%r11];\n    mbarrier.arrive.shared.b64 _, [%r4];",
        "mbarrier.arrive.shared.b64 _, [%r4];\n    ld.shared.v2.u32 {%r12, %r13}, [%r11];",
        "DataRace",
        "nothing orders the two",
    ),
    "release without order": edited(
        "pipeline",
        "mbarrier.arrive.shared.b64 _, [%r4];",
        "mbarrier.arrive.relaxed.cta.shared.b64 _, [%r4];",
        "DataRace",
        "nothing orders the two",
    ),
    "wrong arrival count": edited(
        "pipeline", "[%r4], 32;", "[%r4], 33;", "Deadlock", "1 of 33 arrivals"
    ),
    "count too small": edited(
        "pipeline", "[%r4], 32;", "[%r4], 31;", "BarrierMisuse", "its count is too small"
    ),
    "wrong phase at the start": edited(
        "pipeline", "xor.b32 %r8, %r6, 1;", "mov.b32 %r8, %r6;", "Deadlock", "parity 0 of mbarrier"
    ),
    "mbarrier never initialised": edited(
        "pipeline", "mbarrier.init.shared.b64 [%r3], 1;", "", "BarrierMisuse", "no live mbarrier"
    ),
    "initialised twice": edited(
        "pipeline",
        "mbarrier.init.shared.b64 [%r3], 1;",
        "mbarrier.init.shared.b64 [%r3], 1;\n    mbarrier.init.shared.b64 [%r3], 1;",
        "BarrierMisuse",
        "init of a live mbarrier",
    ),
    "initialised while another is in use": edited(
        "pipeline",
        "mbarrier.init.shared.b64 [%r4], 32;",
        "mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 256;\n"
        "    mbarrier.init.shared.b64 [%r4], 32;",
        "LateInitialisation",
        "initialise all mbarriers of the CTA before any is used",
    ),
    "initialised by all lanes": edited(
        "pipeline", "@%p1 bra READY;", "", "BarrierMisuse", "init of a live mbarrier"
    ),
    "initialisation not ordered": edited(
        "pipeline",
        "READY:\n    bar.sync 0;",
        "READY:",
        "BarrierMisuse",
        "nothing orders that|no live",
    ),
    "initialisation not published": edited(
        "pipeline",
        "fence.mbarrier_init.release.cluster;",
        "",
        "MissingProxyFence",
        "fence.mbarrier_init or fence.proxy.async is missing",
    ),
    "mbarrier overwritten": edited(
        "pipeline",
        "mbarrier.arrive.shared.b64 _, [%r4];",
        "st.shared.u32 [%r3], 0;\n    mbarrier.arrive.shared.b64 _, [%r4];",
        "BarrierMisuse",
        "holds a live mbarrier",
    ),
    "copy size not a multiple of 16": edited(
        "pipeline", "[%rd2], 256", "[%rd2], 250", FINDING, "multiples of 16"
    ),
    "copy out of bounds": edited(
        "pipeline",
        "add.u64 %rd2, %rd2, 256;",
        "add.u64 %rd2, %rd2, 512;",
        "OutOfBounds",
        "bulk copy",
    ),
    "no proxy fence before a store": edited(
        "store",
        "fence.proxy.async.shared::cta;",
        "",
        "MissingProxyFence",
        "fence.proxy.async between the two is missing",
    ),
    "write after the proxy fence": edited(
        "store",
        "fence.proxy.async.shared::cta;",
        "fence.proxy.async.shared::cta;\n    st.shared.u32 [%r4], %r6;",
        "MissingProxyFence",
        "fence.proxy.async between the two is missing",
    ),
    "no barrier before a store": edited(
        "store",
        "fence.proxy.async.shared::cta;\n    bar.sync 0;",
        "fence.proxy.async.shared::cta;",
        FINDING,
        "read of shared memory",
    ),
    "store not waited for before its source is written": edited(
        "store",
        "cp.async.bulk.wait_group.read 0;",
        "",
        "DataRace",
        "write of shared memory.*after a bulk copy read",
    ),
    "store waited for with one group too many": edited(
        "store",
        "cp.async.bulk.wait_group.read 0;",
        "cp.async.bulk.wait_group.read 1;",
        "DataRace",
        "after a bulk copy read",
    ),
    "store never committed": edited(
        "store", "cp.async.bulk.commit_group;", "", "DataRace", "after a bulk copy read"
    ),
    "no cluster barrier before a peer is written": edited(
        "cluster",
        "barrier.cluster.arrive.aligned;\n    barrier.cluster.wait.aligned;\n    ld.shared",
        "ld.shared",
        "UninitialisedRead",
        "shared memory of CTA",
    ),
    "cluster barrier without a wait": edited(
        "cluster",
        "barrier.cluster.wait.aligned;\n    ld.shared",
        "ld.shared",
        "UninitialisedRead",
        "shared memory of CTA",
    ),
    "cluster barrier without order": edited(
        "cluster",
        "barrier.cluster.arrive.aligned;\n    barrier.cluster.wait.aligned;\n    ld.shared",
        "barrier.cluster.arrive.relaxed.aligned;\n    barrier.cluster.wait.aligned;\n    ld.shared",
        "DataRace",
        "nothing orders the two",
    ),
    "rank that does not exist": edited(
        "cluster", "xor.b32 %r4, %r3, 1;", "add.u32 %r4, %r3, 1;", "OutOfBounds", "CTA rank 2"
    ),
    "flag without release": edited(
        "flag", "st.release.gpu", "st.relaxed.gpu", "DataRace", "nothing orders the two"
    ),
    "flag without acquire": edited(
        "flag", "ld.acquire.gpu", "ld.relaxed.gpu", "DataRace", "nothing orders the two"
    ),
    "flag that is not strong": edited("flag", "st.release.gpu", "st", "DataRace", "nothing orders"),
}


def test_exit_while_a_store_still_reads() -> None:
    body = """
        mov.u32 %r2, smem;
        shl.b32 %r3, %r90, 2;
        add.u32 %r3, %r3, %r2;
        st.shared.u32 [%r3], %r90;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        elect.sync _|%p1, -1;
        @!%p1 exit;
        cp.async.bulk.global.shared::cta.bulk_group [%rd90], [%r2], 128;
        cp.async.bulk.commit_group;
    """
    out = global_array(np.zeros(32, np.uint32))
    with pytest.raises(UnfinishedStore, match=r"wait_group.read before the exit is missing"):
        Run()(body, out, shared=128)
    Run()(body + "cp.async.bulk.wait_group.read 0;", out, shared=128)
    assert out.tolist() == list(range(32))


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_a_store_outlives_its_cta(schedule: Schedule) -> None:
    body = """
        mov.u32 %r2, smem;
        shl.b32 %r3, %r90, 2;
        add.u32 %r3, %r3, %r2;
        st.shared.u32 [%r3], %r90;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        elect.sync _|%p1, -1;
        @!%p1 exit;
        cp.async.bulk.global.shared::cta.bulk_group [%rd90], [%r2], 128;
        cp.async.bulk.commit_group;
    """
    out = global_array(np.zeros(32, np.uint32))
    options = {"tolerated": (UnfinishedStore,)}
    Run(schedule=schedule, options=options)(body, out, shared=128)
    assert out.tolist() == list(range(32))


@pytest.mark.parametrize("leaves", [0, 1])
def test_a_barrier_for_all_threads_lets_go_of_those_that_exit(leaves: int) -> None:
    body = f"""
        shr.u32 %r1, %r90, 5;
        setp.eq.u32 %p1, %r1, {leaves};
        @%p1 exit;
        bar.sync 0;
        bar.sync 0;
        mad.wide.u32 %rd1, %r90, 4, %rd90;
        st.global.u32 [%rd1], 7;
    """
    out = global_array(np.zeros(96, np.uint32))
    Run(block=96)(body, out)
    assert out.reshape(3, 32).any(1).tolist() == [warp != leaves for warp in range(3)]
    with pytest.raises(Deadlock, match="64 of 96 threads"):
        Run(block=96)(body.replace("bar.sync 0;", "bar.sync 0, 96;"), out)


NEIGHBOUR = """
    mov.u32 %r1, smem;
    shl.b32 %r2, %r90, 2;
    add.u32 %r3, %r1, %r2;
    st.shared.u32 [%r3], %r90;
    bar.warp.sync -1;
    xor.b32 %r4, %r2, 4;
    add.u32 %r5, %r1, %r4;
    ld.shared.u32 %r6, [%r5];
    mad.wide.u32 %rd1, %r90, 4, %rd90;
    st.global.u32 [%rd1], %r6;
"""
BROADCAST = """
    mov.u32 %r1, smem;
    setp.ne.u32 %p1, %r90, 5;
    @%p1 bra WRITTEN;
    st.shared.u32 [%r1], 7;
WRITTEN:
    bar.warp.sync -1;
    ld.shared.u32 %r6, [%r1];
    mad.wide.u32 %rd1, %r90, 4, %rd90;
    st.global.u32 [%rd1], %r6;
"""
HAND_OVER = """
    mov.u32 %r1, smem;
    shl.b32 %r2, %r90, 2;
    add.u32 %r3, %r1, %r2;
    st.shared.u32 [%r3], %r90;
    fence.proxy.async.shared::cta;
    bar.warp.sync -1;
    elect.sync _|%p1, -1;
    @!%p1 exit;
    cp.async.bulk.global.shared::cta.bulk_group [%rd90], [%r1], 128;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
"""


@pytest.mark.parametrize(
    ("body", "expected", "lane"),
    [
        (NEIGHBOUR, [t ^ 1 for t in range(32)], 1),
        (BROADCAST, [7] * 32, 5),
        (HAND_OVER, list(range(32)), 1),
    ],
    ids=["neighbour", "broadcast", "hand over to a copy"],
)
def test_lanes_of_a_warp_need_order_too(body: str, expected: list[int], lane: int) -> None:
    out = global_array(np.zeros(32, np.uint32))
    Run()(body, out, shared=128)
    assert out.tolist() == expected
    without = body.replace("bar.warp.sync -1;", "")
    with pytest.raises(DataRace, match=rf"lane {lane} of the same warp .*bar.warp.sync"):
        Run()(without, out, shared=128)


# Each lane writes its word again, after one neighbour or several lanes have read it.
AGAIN = NEIGHBOUR.replace(
    "    mad", "    bar.warp.sync 0xffffffff;\n    st.shared.u32 [%r3], 9;\n    mad"
)
AGAIN_FROM_ONE = BROADCAST.replace(
    "    mad", "    bar.warp.sync 0xffffffff;\n    @!%p1 st.shared.u32 [%r1], 9;\n    mad"
)
COPIED_OVER = """
    mov.u32 %r1, smem;
    shl.b32 %r2, %r90, 4;
    add.u32 %r3, %r1, %r2;
    st.shared.v4.u32 [%r3], {%r90, %r90, %r90, %r90};
    bar.warp.sync -1;
    xor.b32 %r4, %r2, 16;
    add.u32 %r5, %r1, %r4;
    ld.shared.u32 %r6, [%r5];
    bar.warp.sync 0xffffffff;
    cp.async.cg.shared.global [%r3], [%rd90], 16;
    cp.async.wait_all;
    mad.wide.u32 %rd1, %r90, 4, %rd90;
    st.global.u32 [%rd1], %r6;
"""
WRITTEN_TWICE = """
    mov.u32 %r1, smem;
    setp.eq.u32 %p1, %r90, 5;
    @%p1 st.shared.u32 [%r1], 7;
    bar.warp.sync 0xffffffff;
    setp.eq.u32 %p2, %r90, 6;
    @%p2 st.shared.u32 [%r1], 8;
    bar.warp.sync -1;
    ld.shared.u32 %r6, [%r1];
    mad.wide.u32 %rd1, %r90, 4, %rd90;
    st.global.u32 [%rd1], %r6;
"""


@pytest.mark.parametrize(
    ("body", "expected", "who"),
    [
        (AGAIN, [t ^ 1 for t in range(32)], "lane 1"),
        (AGAIN_FROM_ONE, [7] * 32, "several lanes"),
        (COPIED_OVER, [t ^ 1 for t in range(32)], "lane 1"),
        (WRITTEN_TWICE, [8] * 32, "lane 5"),
    ],
    ids=["after a neighbour", "after all", "by a copy", "after a write"],
)
def test_lanes_of_a_warp_overwrite_in_order(body: str, expected: list[int], who: str) -> None:
    out = global_array(np.zeros(32, np.uint32))
    Run()(body, out, shared=512)
    assert out.tolist() == expected
    without = body.replace("bar.warp.sync 0xffffffff;", "")
    with pytest.raises(DataRace, match=rf"write of .* of {who} of the same warp .*bar.warp.sync"):
        Run()(without, out, shared=512)


def test_a_lane_overwrites_what_it_alone_has_read() -> None:
    out = global_array(np.zeros(32, np.uint32))
    own = AGAIN.replace("bar.warp.sync 0xffffffff;", "").replace("%r2, 4;", "%r2, 0;")
    Run()(own, out, shared=128)
    assert out.tolist() == list(range(32))


# Lane 5 writes and arrives on an mbarrier; all lanes wait for that mbarrier.
ARRIVAL = """
    mov.u32 %r1, smem;
    setp.ne.u32 %p1, %r90, 5;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r1+64], 1;
READY:
    bar.warp.sync -1;
    @%p1 bra WRITTEN;
    st.shared.u32 [%r1], 7;
    mbarrier.arrive.shared.b64 _, [%r1+64];
WRITTEN:
WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1+64], 0;
    @!%p2 bra WAIT;
    ld.shared.u32 %r6, [%r1];
    mad.wide.u32 %rd1, %r90, 4, %rd90;
    st.global.u32 [%rd1], %r6;
"""


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_an_mbarrier_orders_the_lanes_of_a_warp(schedule: Schedule) -> None:
    out = global_array(np.zeros(32, np.uint32))
    Run(schedule=schedule)(ARRIVAL, out, shared=128)
    assert out.tolist() == [7] * 32


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mbarrier.arrive.shared", "mbarrier.arrive.relaxed.cta.shared"),
        ("parity.shared", "parity.relaxed.cta.shared"),
        (
            "    mbarrier.arrive.shared.b64 _, [%r1+64];\nWRITTEN:\n",
            "WRITTEN:\n    setp.ne.u32 %p3, %r90, 0;\n    @%p3 bra WAIT;\n"
            "    mbarrier.arrive.shared.b64 _, [%r1+64];\n",
        ),
    ],
    ids=["relaxed arrival", "relaxed wait", "another lane arrives"],
)
def test_an_mbarrier_orders_what_has_been_handed_over(old: str, new: str) -> None:
    assert ARRIVAL.count(old) == 1
    out = global_array(np.zeros(32, np.uint32))
    with pytest.raises(DataRace, match=r"lane 5 of the same warp .*bar.warp.sync"):
        Run()(ARRIVAL.replace(old, new), out, shared=128)


def test_a_lane_sees_what_it_wrote_itself() -> None:
    out = global_array(np.zeros(32, np.uint32))
    Run()(NEIGHBOUR.replace("bar.warp.sync -1;", "").replace("%r2, 4;", "%r2, 0;"), out, shared=128)
    assert out.tolist() == list(range(32))


@pytest.mark.parametrize(
    ("kind", "elements", "nbytes"),
    [("u8", 1, 1), ("v2.b8", 2, 2), ("b16", 1, 2), ("v4.b8", 4, 4), ("v2.b16", 2, 4)],
)
def test_neighbours_in_a_word_do_not_race(kind: str, elements: int, nbytes: int) -> None:
    values = f"{{{', '.join(['%h1'] * elements)}}}" if elements > 1 else "%h1"
    body = NEIGHBOURS.replace("KIND", kind).replace("VALUES", values)
    Run(block=64)(body.replace("BYTES", str(nbytes)), shared=512)
    at_one_place = body.replace("%r90, BYTES", "%r90, 0").replace("BYTES", str(nbytes))
    with pytest.raises(DataRace):
        Run(block=64)(at_one_place, shared=512)


def test_a_register_budget_is_the_warpgroups() -> None:
    every = "setmaxnreg.dec.sync.aligned.u32 40;"
    Run(block=128)(every)
    one = f"""
        shr.u32 %r1, %r90, 5;
        setp.ne.u32 %p1, %r1, 0;
        @%p1 bra DONE;
        {every}
    DONE:
    """
    with pytest.raises(RegisterBudget, match=r"warps \[0, 1, 2, 3\] of CTA"):
        Run(block=128)(one)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_reported(name: str) -> None:
    """Some schedule reports the mutant, and every report is the expected finding."""
    mutant = MUTANTS[name]
    check, body = KERNELS[mutant.on]
    wrong = mutant.change(body)
    found = [noticed(partial(check, wrong, s)) for s in STANDARD]
    reports = [report for report in found if isinstance(report, EmulatorError)]
    assert reports, "no schedule reported it"
    for report in reports:
        assert report.where is not None or isinstance(report, Deadlock)
    mutant.check(reports[0])
