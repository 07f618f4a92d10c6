"""CTAs of a cluster: no access before a CTA has started, or when it may have exited."""

import numpy as np
import pytest

from tests.emulator import STANDARD, Schedule
from tests.emulator.findings import NarrowScope
from tests.mutants import FINDING, Mutant, noticed
from tests.test_emulator.assemble import Run, global_array

MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
MEET_RELAXED = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;"

# Each CTA stores its rank in the other CTA, which reads the word.
STORE = f"""
    mov.u32 %r1, smem;
    mov.u32 %r2, %cluster_ctarank;
    xor.b32 %r3, %r2, 1;
    mapa.shared::cluster.u32 %r4, %r1, %r3;
    {MEET_RELAXED} // start
    st.shared::cluster.u32 [%r4], %r2;
    {MEET} // end
    ld.shared.u32 %r5, [%r1];
    mad.wide.u32 %rd1, %r2, 4, %rd90;
    st.global.u32 [%rd1], %r5;
"""

# CTA 1 writes a word to CTA 0 and arrives on its mbarrier; CTA 0 waits, reads the word and exits.
MESSAGE = f"""
    mov.u32 %r1, smem;
    mov.u32 %r2, %cluster_ctarank;
    setp.ne.u32 %p1, %r2, 0;
    setp.ne.u32 %p2, %r90, 0;
    or.pred %p3, %p1, %p2;
    @%p3 bra READY;
    mbarrier.init.shared.b64 [%r1], 1;
    fence.mbarrier_init.release.cluster;
READY:
    {MEET} // start
    @%p1 bra SENDER;
WAIT:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p4, [%r1], 0;
    @!%p4 bra WAIT;
    ld.shared.u32 %r5, [%r1+16];
    st.global.u32 [%rd90], %r5;
    bra DONE;
SENDER:
    @%p2 bra DONE;
    mov.u32 %r6, 0;
    mapa.shared::cluster.u32 %r4, %r1, %r6;
    st.shared::cluster.u32 [%r4+16], 7;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4];
DONE:
"""

ALLOCATE = f"""
    mov.u32 %r1, smem;
    {MEET_RELAXED} // start
    tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1], 32;
    tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;
    ld.shared.u32 %r2, [%r1];
    {MEET}
    tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r2, 32;
"""

# CTA 0 copies 64 bytes into both CTAs; each CTA waits for its own bytes, and adds one of its words
# to the result.
MULTICAST = f"""
    mov.u32 %r1, smem;
    setp.ne.u32 %p2, %r90, 0;
    @%p2 bra READY;
    mbarrier.init.shared.b64 [%r1], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 64;
READY:
    {MEET} // start
    mov.u32 %r2, %cluster_ctarank;
    setp.ne.u32 %p1, %r2, 0;
    or.pred %p3, %p1, %p2;
    @%p3 bra WAIT;
    add.u32 %r3, %r1, 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r3], [%rd90], 64, [%r1], 3;
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r1], 0;
    @!%p4 bra WAIT;
"""  # noqa: E501 — one instruction


# The cluster barrier orders the initialisation alone, by the fence before its relaxed arrival.
RELAXED_MESSAGE = MESSAGE.replace(f"{MEET} // start", f"{MEET_RELAXED} // start")


def words(count: int = 16) -> np.ndarray:
    return global_array(np.arange(count, dtype=np.uint32))


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_right_kernels_run_in_every_schedule(schedule: Schedule) -> None:
    pair = Run(grid=2, cluster=2, schedule=schedule)
    out = words(2)
    pair(STORE, out, shared=256)
    assert out.tolist() == [1, 0]
    pair(MESSAGE, out, shared=256)
    assert out[0] == 7
    pair(RELAXED_MESSAGE, out, shared=256)
    pair(ALLOCATE, shared=256)
    pair(MULTICAST, words(), shared=256)


def edited(body: str, right: str, wrong: str, caught: str, match: str) -> Mutant:
    return Mutant.edited(right, wrong, caught, match, on=body)


MUTANTS = {
    "initialisation published to the async proxy alone": edited(
        RELAXED_MESSAGE,
        "fence.mbarrier_init.release.cluster;",
        "fence.proxy.async.shared::cta;",
        "BarrierMisuse",
        "nothing orders that after its mbarrier.init",
    ),
    "store to a CTA that may not be there": edited(
        STORE, f"{MEET_RELAXED} // start", "", "UnstartedPeer", "reaches for CTA",
    ),
    "allocation beside a CTA that may not be there": edited(
        ALLOCATE, f"{MEET_RELAXED} // start", "", "UnstartedPeer", "tcgen05.alloc",
    ),
    "multicast to a CTA that may not be there": edited(
        MULTICAST, f"{MEET} // start", "bar.sync 0;", FINDING, "CTA|live mbarrier",
    ),
    "store that the target's exit does not wait for": edited(
        STORE, f"{MEET} // end\n    ld.shared.u32 %r5, [%r1];", "mov.u32 %r5, 1;",
        "ExitedPeer", "generic write of CTA .*exit",
    ),
    "message that the target's exit does not wait for": edited(
        MESSAGE, MESSAGE[MESSAGE.index("WAIT:"):MESSAGE.index("st.global")], "mov.u32 %r5, 7;",
        "ExitedPeer", "of CTA .*exit",
    ),
    "copy that the target's exit does not wait for": edited(
        MULTICAST, MULTICAST[MULTICAST.index("    mbarrier.try"):], "",
        "ExitedPeer", "bulk copy of CTA .*exit",
    ),
    "release at the scope of the sender's CTA": edited(
        MESSAGE, "arrive.release.cluster.shared::cluster", "arrive.release.cta.shared::cluster",
        "NarrowScope", "leaves out the other's CTA",
    ),
    "release at no scope": edited(
        MESSAGE, "arrive.release.cluster.shared::cluster", "arrive.shared::cluster",
        "NarrowScope", "leaves out the other's CTA",
    ),
    "acquire at the scope of the receiver's CTA": edited(
        MESSAGE, "try_wait.parity.acquire.cluster", "try_wait.parity.acquire.cta",
        "NarrowScope", "generic write at CTA \\(1",
    ),
    "acquire without order": edited(
        MESSAGE, "try_wait.parity.acquire.cluster", "try_wait.parity.relaxed.cluster",
        "DataRace", "nothing orders the two",
    ),
}  # fmt: skip


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_reported(name: str, schedule: Schedule) -> None:
    mutant = MUTANTS[name]
    run = Run(grid=2, cluster=2, schedule=schedule)
    arrays = [] if mutant.on is ALLOCATE else [words()]
    mutant.check(noticed(lambda: run(mutant.change(mutant.on), *arrays, shared=256)))


# CTA 0 copies 64 bytes to CTA 1, which reads a word and releases the buffer; then 64 other bytes.
COPIES = f"""
    mov.u32 %r1, smem;
    setp.ne.u32 %p2, %r90, 0;
    @%p2 bra READY;
    mbarrier.init.shared.b64 [%r1], 1;
    mbarrier.init.shared.b64 [%r1+8], 1;
    fence.mbarrier_init.release.cluster;
READY:
    {MEET} // start
    @%p2 bra DONE;
    mov.u32 %r2, %cluster_ctarank;
    xor.b32 %r3, %r2, 1;
    mapa.shared::cluster.u32 %r4, %r1, %r3;
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra RECEIVER;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4+128], [%rd90], 64, [%r4];
EMPTY:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p4, [%r1+8], 0;
    @!%p4 bra EMPTY;
    add.u64 %rd1, %rd90, 64;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r4+128], [%rd1], 64, [%r4];
    bra DONE;
RECEIVER:
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 64;
FIRST:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r1], 0;
    @!%p4 bra FIRST;
    ld.shared.u32 %r5, [%r1+132];
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 64;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4+8];
SECOND:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r1], 1;
    @!%p4 bra SECOND;
    ld.shared.u32 %r6, [%r1+132];
    mad.lo.u32 %r5, %r5, 100, %r6;
    st.global.u32 [%rd90], %r5;
DONE:
"""


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
@pytest.mark.parametrize("order", ["arrive.release", "parity.acquire", ""])
def test_scopes_of_what_orders_copies(order: str, schedule: Schedule) -> None:
    """Strict scopes: CTA scope does not order TMA writes to another CTA."""
    body = COPIES.replace(f"{order}.cluster", f"{order}.cta") if order else COPIES
    out = words(32)
    Run(grid=2, cluster=2, schedule=schedule)(body, out, shared=256)
    assert out[0] == 117
    strict = Run(grid=2, cluster=2, schedule=schedule, options={"strict_scopes": True})
    if not order:
        strict(body, words(32), shared=256)
        return
    with pytest.raises(NarrowScope, match="leaves out"):
        strict(body, words(32), shared=256)


# CTA 0 writes a word and releases a flag; CTA 1 acquires the flag and releases another for CTA 2.
HAND_ON = """
    mov.u32 %r1, %ctaid.x;
    setp.ne.u32 %p1, %r90, 0;
    @%p1 bra DONE;
    setp.eq.u32 %p2, %r1, 0;
    @%p2 st.global.u32 [%rd90], 42;
    @%p2 bra SEND;
    mad.wide.u32 %rd1, %r1, 16, %rd90;
POLL:
    ld.acquire.gpu.global.u32 %r2, [%rd1];
    setp.eq.u32 %p3, %r2, 0;
    @%p3 bra POLL;
    ld.global.u32 %r3, [%rd90];
    st.global.u32 [%rd1+4], %r3;
SEND:
    add.u32 %r4, %r1, 1;
    mad.wide.u32 %rd2, %r4, 16, %rd90;
    st.release.gpu.global.u32 [%rd2], 1;
DONE:
"""


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
@pytest.mark.parametrize("scope", ["gpu", "sys"])
@pytest.mark.parametrize("lanes", [False, True])
def test_a_value_is_handed_on_through_global_memory(
    lanes: bool, scope: str, schedule: Schedule
) -> None:
    """Values pass between CTAs by one lane, or by all lanes at separate addresses."""
    body = HAND_ON.replace(".gpu", f".{scope}")
    if lanes:
        body = body.replace("@%p1 bra DONE;", "mul.wide.u32 %rd3, %r90, 128; "
                            "add.u64 %rd90, %rd90, %rd3;")  # fmt: skip
    out = global_array(np.zeros((32, 32), np.uint32))
    Run(grid=3, schedule=schedule)(body, out)
    rows = 32 if lanes else 1
    assert (out[:rows, [5, 9]] == 42).all()


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
@pytest.mark.parametrize("order", ["ld.acquire.gpu", "st.release.gpu"])
def test_a_scope_of_one_cta_hands_on_nothing(order: str, schedule: Schedule) -> None:
    out = global_array(np.zeros((32, 32), np.uint32))
    with pytest.raises(NarrowScope, match="leaves out"):
        Run(grid=3, schedule=schedule)(HAND_ON.replace(order, order.replace("gpu", "cta")), out)


FENCED = (
    HAND_ON.replace("st.release.gpu.global.u32", "fence.acq_rel.gpu; st.relaxed.gpu.global.u32")
    .replace("ld.acquire", "ld.relaxed")
    .replace("ld.global.u32 %r3", "fence.acq_rel.gpu; ld.global.u32 %r3")
)


@pytest.mark.parametrize("narrow", [None, 0, 1])
def test_fences_have_scopes(narrow: int | None) -> None:
    parts = FENCED.split("fence.acq_rel.gpu")
    scopes = ["cta" if narrow == n else "gpu" for n in range(2)]
    body = parts[0] + "".join(
        f"fence.acq_rel.{s}{p}" for s, p in zip(scopes, parts[1:], strict=True)
    )
    out = global_array(np.zeros((32, 32), np.uint32))
    if narrow is None:
        Run(grid=3)(body, out)
        assert (out[0, [5, 9]] == 42).all()
    else:
        with pytest.raises(NarrowScope, match="leaves out"):
            Run(grid=3)(body, out)


def test_a_poll_wakes_when_somebody_writes() -> None:
    """100 CTAs in a row: each sleeps until its predecessor has written."""
    out = global_array(np.zeros((101, 4), np.uint32))
    launch = Run(grid=100, schedule=STANDARD[-1])(HAND_ON, out)
    assert (out[1:100, 1] == 42).all()
    polls = sum(v for k, v in launch.counters.nbytes.items() if k == "global read")
    assert polls < 100 * 4 * 16
