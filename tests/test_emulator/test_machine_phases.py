"""Parities of mbarriers: a wait must know that the preceding phase is complete, and end in time."""

import numpy as np
import pytest

from tests.emulator import STANDARD, Schedule
from tests.emulator.findings import DataRace, ParityAliasing, UninitialisedRead
from tests.test_emulator.assemble import Run, global_array

# Warp 0 fills a ring of {stages} words in order or, with {swap} = 1, the second word of each pair
# before the first; warps 1 and 2 take alternate words, six each.
ALTERNATE = """
    mov.u32 %r1, smem;
    setp.ne.u32 %p1, %r90, 0;
    @%p1 bra READY;
    mov.u32 %r2, 0;
INIT:
    shl.b32 %r3, %r2, 4;
    add.u32 %r4, %r1, %r3;
    mbarrier.init.shared.b64 [%r4], 1;
    mbarrier.init.shared.b64 [%r4+8], 1;
    add.u32 %r2, %r2, 1;
    setp.lt.u32 %p2, %r2, {stages};
    @%p2 bra INIT;
READY:
    bar.sync 0;
    shr.u32 %r5, %r90, 5;
    setp.ne.u32 %p3, %r5, 0;
    mov.u32 %r6, 0;
    @!%p3 bra STEP;
    sub.u32 %r6, %r5, 1;
STEP:
    mov.u32 %r15, %r6;
    @!%p3 xor.b32 %r15, %r6, {swap};
    rem.u32 %r7, %r15, {stages};
    div.u32 %r8, %r15, {stages};
    and.b32 %r9, %r8, 1;
    xor.b32 %r10, %r9, 1;
    shl.b32 %r11, %r7, 4;
    add.u32 %r12, %r1, %r11;
    @%p3 bra FULL;
EMPTY:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r12+8], %r10;
    @!%p4 bra EMPTY;
    and.b32 %r13, %r90, 31;
    setp.ne.u32 %p5, %r13, 0;
    @!%p5 st.shared.u32 [%r12+256], %r15;
    @!%p5 mbarrier.arrive.shared.b64 _, [%r12];
    add.u32 %r6, %r6, 1;
    bra NEXT;
FULL:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r12], %r9;
    @!%p4 bra FULL;
    ld.shared.u32 %r14, [%r12+256];
    bar.warp.sync -1;
    and.b32 %r13, %r90, 31;
    setp.ne.u32 %p5, %r13, 0;
    @!%p5 mbarrier.arrive.shared.b64 _, [%r12+8];
    mad.wide.u32 %rd1, %r6, 4, %rd90;
    @!%p5 st.global.u32 [%rd1], %r14;
    add.u32 %r6, %r6, 2;
NEXT:
    setp.lt.u32 %p6, %r6, 12;
    @%p6 bra STEP;
"""


def alternate(stages: int, schedule: Schedule, swap: int = 0, body: str = ALTERNATE) -> None:
    out = global_array(np.zeros(12, np.uint32))
    Run(block=96, schedule=schedule)(body.format(stages=stages, swap=swap), out, shared=512)
    assert out.tolist() == list(range(12))


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
@pytest.mark.parametrize("stages", [2, 4])
def test_a_warp_that_meets_every_phase_of_its_stages(stages: int, schedule: Schedule) -> None:
    alternate(stages, schedule)


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
@pytest.mark.parametrize("swap", [0, 1])
def test_a_warp_that_meets_every_second_phase(swap: int, schedule: Schedule) -> None:
    """Step n must know that n - 5 was filled: warp 0 filled n - 5 before the awaited n - 2."""
    alternate(5, schedule, swap)


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_a_warp_that_does_not_learn_of_the_phase_between(schedule: Schedule) -> None:
    """Step n of warp 2 must know that n - 3 was filled, but warp 0 fills n - 2 first.

    In random schedules warp 2 comes early, and reads a word before warp 0 fills that word.
    """
    alternate(3, schedule)
    with pytest.raises((ParityAliasing, UninitialisedRead)):
        alternate(3, schedule, swap=1)


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_a_warp_that_learns_of_the_phase_between_otherwise(schedule: Schedule) -> None:
    """A barrier in each step tells each reader of the other reader's waits."""
    body = ALTERNATE.replace("bar.warp.sync -1;", "bar.warp.sync -1; bar.sync 1, 64;")
    alternate(3, schedule, swap=1, body=body)


def test_a_wait_that_the_phase_after_does_not_wait_for() -> None:
    """Warp 0 completes the next phase without waiting for warp 1, which may still wait."""
    body = """
        mov.u32 %r1, smem;
        setp.ne.u32 %p1, %r90, 0;
        @%p1 bra READY;
        mbarrier.init.shared.b64 [%r1], 1;
    READY:
        bar.sync 0;
        setp.lt.u32 %p2, %r90, 32;
        @%p2 bra SEND;
    WAIT:
        mbarrier.try_wait.parity.shared.b64 %p3, [%r1], 0;
        @!%p3 bra WAIT;
        bar.sync 1, 64;
        bra DONE;
    SEND:
        @%p1 bra SENT;
        mbarrier.arrive.shared.b64 _, [%r1];
    SENT:
        bar.sync 1, 64; // answer
        @%p1 bra DONE;
        mbarrier.arrive.shared.b64 _, [%r1];
    DONE:
    """
    for schedule in STANDARD:
        Run(block=64, schedule=schedule)(body, shared=256)
    late = body.replace("bar.sync 1, 64; // answer", "nanosleep.u32 1;").replace(
        "bar.sync 1, 64;\n        bra", "bra"
    )
    for schedule in STANDARD:
        with pytest.raises(ParityAliasing):
            Run(block=64, schedule=schedule)(late, shared=256)


# Thread {first} arrives for phase 0, on which warp 0 does not wait; thread 32 arrives for phase 1,
# on which warp 0 waits.
SIGNALLED = """
    mov.u32 %r1, smem;
    setp.ne.u32 %p1, %r90, 0;
    setp.ne.u32 %p2, %r90, {first};
    setp.ne.u32 %p3, %r90, 32;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r1], {count};
READY:
    bar.sync 0;
    @!%p2 mbarrier.arrive{order}.shared.b64 _, [%r1], {count};
    setp.lt.u32 %p4, %r90, 32;
    bar.sync 0; // signalled
    @%p4 bra WAIT;
    @!%p3 mbarrier.arrive.shared.b64 _, [%r1], {count};
    bra DONE;
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p5, [%r1], 1;
    @!%p5 bra WAIT;
DONE:
"""


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("order", ["", ".relaxed.cta"])
def test_a_phase_that_one_arrival_makes(
    order: str, count: int, first: int, schedule: Schedule
) -> None:
    body = SIGNALLED.format(first=first, count=count, order=order)
    Run(block=64, schedule=schedule)(body, shared=256)


# A lane of each warp arrives for phase 0; warp 1 waits for phase 0 and completes phase 1.
TOGETHER = """
    mov.u32 %r1, smem;
    setp.ne.u32 %p1, %r90, 0;
    and.b32 %r2, %r90, 31;
    setp.ne.u32 %p2, %r2, 1;
    @!%p1 mbarrier.init.shared.b64 [%r1], 2;
    bar.sync 0;
    @!%p2 mbarrier.arrive.shared.b64 _, [%r1], 1;
    setp.lt.u32 %p3, %r90, 32;
    @%p3 bra WAIT;
FIRST:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r1], 0;
    @!%p4 bra FIRST;
    bar.warp.sync -1;
    @!%p2 mbarrier.arrive.shared.b64 _, [%r1], 2;
    bra DONE;
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p5, [%r1], 1;
    @!%p5 bra WAIT;
DONE:
"""


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_a_phase_that_an_arrival_only_ends(schedule: Schedule) -> None:
    """Either of two arrivals may complete phase 0, so warp 0 may wait while phase 0 is pending."""
    with pytest.raises(ParityAliasing, match="knows of 0 that are complete"):
        Run(block=64, schedule=schedule)(TOGETHER, shared=256)


# Warps 1 and 2 fill a ring of {stages} words alternately; warps 3 and 4 both read and release
# every word in order, but warp {other} takes the second word of each pair before the first. The
# ring drains.
GIVEN_BACK = """
    mov.u32 %r1, smem;
    setp.ne.u32 %p1, %r90, 0;
    @%p1 bra READY;
    mov.u32 %r2, 0;
INIT:
    shl.b32 %r3, %r2, 4;
    add.u32 %r4, %r1, %r3;
    mbarrier.init.shared.b64 [%r4], 1;
    mbarrier.init.shared.b64 [%r4+8], 2;
    add.u32 %r2, %r2, 1;
    setp.lt.u32 %p2, %r2, {stages};
    @%p2 bra INIT;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
    shr.u32 %r5, %r90, 5;
    and.b32 %r13, %r90, 31;
    setp.ne.u32 %p5, %r13, 0;
    setp.eq.u32 %p3, %r5, 0;
    @%p3 bra DONE;
    setp.gt.u32 %p3, %r5, 2;
    setp.eq.u32 %p7, %r5, {other};
    mov.u32 %r6, 0;
    mov.u32 %r17, 16;
    @%p3 bra STEP;
    sub.u32 %r6, %r5, 1;
    add.u32 %r17, %r17, {stages};
STEP:
    mov.u32 %r15, %r6;
    @%p7 xor.b32 %r15, %r6, 1;
    rem.u32 %r7, %r15, {stages};
    div.u32 %r8, %r15, {stages};
    and.b32 %r9, %r8, 1;
    xor.b32 %r10, %r9, 1;
    shl.b32 %r11, %r7, 4;
    add.u32 %r12, %r1, %r11;
    @%p3 bra FULL;
EMPTY:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r12+8], %r10;
    @!%p4 bra EMPTY;
    setp.ge.u32 %p9, %r6, 16;
    @%p9 bra FILLED;
    @!%p5 st.shared.u32 [%r12+256], %r15;
    @!%p5 mbarrier.arrive.shared.b64 _, [%r12];
FILLED:
    add.u32 %r6, %r6, 2;
    bra NEXT;
FULL:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r12], %r9;
    @!%p4 bra FULL;
    ld.shared.u32 %r14, [%r12+256];
    bar.warp.sync -1;
    @!%p5 {arrive};
    mad.wide.u32 %rd1, %r15, 4, %rd90;
    setp.ne.u32 %p8, %r5, 3;
    @%p8 bra READ;
    @!%p5 st.global.u32 [%rd1], %r14;
READ:
    add.u32 %r6, %r6, 1;
NEXT:
    setp.lt.u32 %p6, %r6, %r17;
    @%p6 bra STEP;
DONE:
"""


ARRIVE = "mbarrier.arrive.shared.b64 _, [%r12+8]"
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r12+8]"


def give_back(stages: int, schedule: Schedule, arrive: str = ARRIVE, other: int = 9) -> None:
    """Run ``GIVEN_BACK`` and check its output.

    Warp ``other`` (3 or 4; 9 for none) reads the second word of each pair before the first.
    """
    out = global_array(np.zeros(16, np.uint32))
    body = GIVEN_BACK.format(stages=stages, other=other, arrive=arrive)
    Run(block=160, schedule=schedule)(body, out, shared=512)
    assert out.tolist() == list(range(16))


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
@pytest.mark.parametrize("arrive", [ARRIVE, COMMIT], ids=["arrive", "commit"])
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_several_arrivals_that_are_made_in_order(
    stages: int, arrive: str, schedule: Schedule
) -> None:
    """Fillers of a ring of odd size wait for every second phase of a stage only.

    Step n must know that n - 2 * stages was released. Step n - 2 has waited for the release of
    n - 2 - stages, and both readers release n - 2 * stages before that.
    """
    give_back(stages, schedule, arrive)


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
@pytest.mark.parametrize("arrive", [ARRIVE, COMMIT], ids=["arrive", "commit"])
@pytest.mark.parametrize("other", [3, 4])
def test_an_arrival_of_several_that_is_made_out_of_order(
    other: int, arrive: str, schedule: Schedule
) -> None:
    """Step n of warp 1 knows that n - 5 was released, but a reader releases n - 5 before n - 6."""
    with pytest.raises(ParityAliasing):
        give_back(3, schedule, arrive, other)


# CTA 1 completes a phase of each of two mbarriers of CTA 0, which waits for the second mbarrier,
# and then for the next phase of the first.
REMOTE = """
    mov.u32 %r1, smem;
    mov.u32 %r2, %cluster_ctarank;
    setp.ne.u32 %p1, %r90, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r1], 1;
    mbarrier.init.shared.b64 [%r1+8], 1;
    fence.mbarrier_init.release.cluster;
READY:
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    @%p1 bra DONE;
    setp.eq.u32 %p2, %r2, 0;
    @%p2 bra SECOND;
    mov.u32 %r3, 0;
    mapa.shared::cluster.u32 %r4, %r1, %r3;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4];
    mbarrier.arrive.release.{scope}.shared::cluster.b64 _, [%r4+8];
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r4];
    bra DONE;
SECOND:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r1+8], 0;
    @!%p3 bra SECOND;
FIRST:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r1], 1;
    @!%p3 bra FIRST;
DONE:
"""


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
@pytest.mark.parametrize("strict", [False, True])
def test_a_phase_that_another_cta_tells_of(strict: bool, schedule: Schedule) -> None:
    """Strict scopes: the arrival that vouches for the first phase must have cluster scope."""
    options = {"strict_scopes": strict}
    remote = Run(grid=2, cluster=2, schedule=schedule, options=options)
    remote(REMOTE.format(scope="cluster"), shared=256)
    if not strict:
        remote(REMOTE.format(scope="cta"), shared=256)
        return
    with pytest.raises(ParityAliasing, match="knows of 0 that are complete"):
        remote(REMOTE.format(scope="cta"), shared=256)


# Warp 0 fills 32 words, a lane each, and one lane publishes them; warp 1 reads the words and one
# lane releases them; twice.
ELECTED = """
    mov.u32 %r1, smem;
    setp.ne.u32 %p1, %r90, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r1], 1;
    mbarrier.init.shared.b64 [%r1+8], 1;
READY:
    bar.sync 0;
    and.b32 %r2, %r90, 31;
    setp.ne.u32 %p2, %r2, 5;
    shl.b32 %r3, %r2, 2;
    add.u32 %r4, %r1, %r3;
    shr.u32 %r5, %r90, 5;
    setp.ne.u32 %p3, %r5, 0;
    mov.u32 %r6, 0;
    mov.u32 %r20, 0;
STEP:
    xor.b32 %r7, %r6, 1;
    @%p3 bra READ;
EMPTY:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r1+8], %r7;
    @!%p4 bra EMPTY;
    st.shared.u32 [%r4+64], %r2;
    bar.warp.sync -1; // before full
    @!%p2 mbarrier.arrive.shared.b64 _, [%r1];
    bra NEXT;
READ:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r1], %r6;
    @!%p4 bra READ;
    ld.shared.u32 %r8, [%r4+64];
    add.u32 %r20, %r20, %r8;
    bar.warp.sync -1; // before empty
    @!%p2 mbarrier.arrive.shared.b64 _, [%r1+8];
NEXT:
    add.u32 %r6, %r6, 1;
    setp.lt.u32 %p5, %r6, 2;
    @%p5 bra STEP;
    mad.wide.u32 %rd1, %r2, 4, %rd90;
    @%p3 st.global.u32 [%rd1], %r20;
"""


def elected(body: str, schedule: Schedule) -> None:
    out = global_array(np.zeros(32, np.uint32))
    Run(block=64, schedule=schedule)(body, out, shared=256)
    assert out.tolist() == [2 * n for n in range(32)]


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_a_lane_that_is_elected_releases_what_a_warp_barrier_ordered(schedule: Schedule) -> None:
    elected(ELECTED, schedule)
    every = ELECTED.replace("@!%p2 mbarrier", "mbarrier").replace("b64 [%r1], 1", "b64 [%r1], 32")
    elected(every.replace("b64 [%r1+8], 1", "b64 [%r1+8], 32").replace("bar.warp.sync -1;", ""),
            schedule)  # fmt: skip


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
@pytest.mark.parametrize("side", ["full", "empty"])
def test_a_lane_that_is_elected_does_not_release_the_others(side: str, schedule: Schedule) -> None:
    body = ELECTED.replace(f"bar.warp.sync -1; // before {side}", "")
    with pytest.raises(DataRace, match=r"bar\.warp\.sync is missing"):
        elected(body, schedule)
