"""CTAs that share SMs, of one launch or of overlapping launches: resources and waits."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.emulator import EAGER, STANDARD, Gpu, Limits, Schedule, Sharing
from tests.emulator.findings import (
    LaunchError,
    MissingDependencyWait,
    TensorMemoryMisuse,
)
from tests.emulator.machine.launch import Launch
from tests.emulator.machine.residency import Floor, Room, needs_of, registers_of
from tests.mutants import Mutant, noticed
from tests.test_emulator.assemble import assemble, global_array

RELEASE = "griddepcontrol.launch_dependents;"
WAIT = "griddepcontrol.wait;"
RELINQUISH = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
EITHER_PERMIT = [Sharing(), Sharing(exclusive_permit=False)]
OWN_PERMIT = Sharing(exclusive_permit=False)


def allocate(columns: int, then: str = RELINQUISH, base: str = "%r2") -> str:
    return f"""
        tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], {columns};
        {then}
        ld.shared.u32 {base}, [%r1];
    """


def free(columns: int, base: str = "%r2") -> str:
    return f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 {base}, {columns};"


PLACE = """
    mov.u32 %r1, smem;
    mov.u32 %r8, %ctaid.x;
    shl.b32 %r9, %r8, 5;
    add.u32 %r9, %r9, %r90;
    mad.wide.u32 %rd1, %r9, 4, %rd90;
"""
# Each thread adds one to its word, through tensor memory.
ADD = """
    ld.global.u32 %r3, [%rd1];
    add.u32 %r3, %r3, 1;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r3};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r2];
    tcgen05.wait::ld.sync.aligned;
    st.global.u32 [%rd1], %r4;
"""
STORE, LOAD = "st.global.u32 [%rd1], %r90;", "ld.global.u32 %r5, [%rd1];"
TELL = "st.global.u32 [%rd1], %r2;"


@dataclass
class Machine:
    """Stream of kernels "a", "b", ... of one warp per CTA, with a word per thread of 16 CTAs."""

    schedule: Schedule = EAGER
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gpu = Gpu(schedule=self.schedule, **self.options)
        self.words = global_array(np.zeros((16, 32), np.uint32))
        self.gpu.memory.register_array(self.words.view(np.uint8))

    def launch(
        self,
        body: str,
        grid: int = 1,
        name: str = "a",
        dependent: int = 1,
        cluster: int = 1,
        shared: int = 1024,
        stream: int = 0,
        block: int = 32,
    ) -> Launch:
        ptx = assemble((PLACE + body).replace(";", ";\n"), 1, shared).replace(
            ".entry k(", f".entry {name}("
        )
        return self.gpu.launch(
            self.gpu.load(ptx),
            name,
            (grid, 1, 1),
            (block, 1, 1),
            (cluster, 1, 1),
            parameters=[struct.pack("<Q", self.words.ctypes.data)],
            attributes={"programmatic_stream_serialization": dependent},
            stream=stream,
        )

    def chain(
        self, bodies: Sequence[str], grid: int = 1, sharing: Sharing = EITHER_PERMIT[0], **more: int
    ) -> list[Launch]:
        """Launch kernels that overlap one another."""
        with self.gpu.overlapped(sharing):
            return [
                self.launch(body, grid, "abcdef"[number], **more)
                for number, body in enumerate(bodies)
            ]


# --- one launch ------------------------------------------------------------------------------


def test_a_cta_has_an_sm_to_itself_unless_told_otherwise() -> None:
    machine = Machine(STANDARD[-1])
    launch = machine.launch(allocate(128) + TELL + free(128), grid=6)
    assert not machine.words.any()
    assert not launch.counters.neighbours
    assert not launch.counters.waits["tensor memory"]


@pytest.mark.parametrize("sharing", EITHER_PERMIT, ids=["exclusive", "own"])
@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_resident_ctas_have_columns_of_their_own(schedule: Schedule, sharing: Sharing) -> None:
    machine = Machine(schedule)
    with machine.gpu.shared(sharing):
        launch = machine.launch(allocate(128) + ADD + TELL + free(128), grid=6)
        assert launch.counters.neighbours == {0: 15}  # six CTAs with 0 to 5 neighbours each
        bases = set(machine.words[:6, 0].tolist())
        assert {0, 128} <= bases <= {0, 128, 256, 384}
        machine.words[...] = 0
        launch = machine.launch(allocate(512) + ADD + free(512), grid=6, dependent=0)
        assert (machine.words[:6] == 1).all()
        assert not machine.words[6:].any()
        assert launch.counters.waits["tensor memory"] >= 3


# A pair allocates on both of its SMs; each CTA records its columns.
PAIR = """
    barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;
    tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r1], COLUMNS;
    tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;
    ld.shared.u32 %r2, [%r1];
    st.global.u32 [%rd1], %r2;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r2, COLUMNS;
"""


@pytest.mark.parametrize("columns", [128, 512])
@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_a_pair_has_the_same_columns_on_both_sms(schedule: Schedule, columns: int) -> None:
    """Both CTAs of a pair get equal columns, even if both have waited for columns."""
    machine = Machine(schedule)
    with machine.gpu.shared():
        launch = machine.launch(PAIR.replace("COLUMNS", str(columns)), grid=8, cluster=2)
    bases = machine.words[:8, 0].reshape(4, 2)
    assert (bases[:, 0] == bases[:, 1]).all()
    assert launch.counters.waits["tensor memory"] >= 2
    assert launch.counters.neighbours == {0: 2 * (1 + 2 + 3)}


# --- several launches ------------------------------------------------------------------------

RIGHT = {
    "all at once": [allocate(128) + WAIT + ADD + free(128)] * 3,
    "early releases": [allocate(128) + RELEASE + WAIT + ADD + free(128)] * 3,
    # The second launch waits for columns that the first holds until its end.
    "all columns": [allocate(512) + RELEASE + WAIT + ADD + free(512)] * 3,
    "allocated after the wait": [RELEASE + WAIT + allocate(512) + ADD + free(512)] * 3,
    "without the tensor core": [RELEASE + WAIT + LOAD + "add.u32 %r5, %r5, 1;"
                                "st.global.u32 [%rd1], %r5;"] * 3,
}  # fmt: skip


@pytest.mark.parametrize("sharing", EITHER_PERMIT, ids=["exclusive", "own"])
@pytest.mark.parametrize("schedule", STANDARD, ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_right_launches_overlap(name: str, schedule: Schedule, sharing: Sharing) -> None:
    machine = Machine(schedule)
    launches = machine.chain(RIGHT[name], 2, sharing)
    assert (machine.words[:2] == 3).all()
    met = [set(+launch.counters.neighbours) for launch in launches]
    if "releases" in name or "columns" in name:
        assert 0 in met[1]
        assert {0, 1} & met[2]


# CTA 0 of two writes a word, releases a flag and waits for the other CTA to do the same.
EXCHANGE = """
    xor.b32 %r20, %r8, 1;
    mad.wide.u32 %rd2, %r8, 128, %rd90;
    mad.wide.u32 %rd3, %r20, 128, %rd90;
    st.release.gpu.global.u32 [%rd2+256], 1;
POLL:
    ld.acquire.gpu.global.u32 %r21, [%rd3+256];
    setp.eq.u32 %p1, %r21, 0;
    @%p1 bra POLL;
"""
ALL = {str(schedule) for schedule in STANDARD}
IN_ORDER = {str(schedule) for schedule in STANDARD if schedule.warps == "in_order"}
FIRST = {str(schedule) for schedule in STANDARD if schedule.successor_first}


def overlapped(
    bodies: list[str],
    caught: str,
    match: str,
    schedules: set[str],
    grid: int = 1,
    sharing: Sharing = EITHER_PERMIT[0],
    **options: Any,
) -> Mutant:
    """Mutant: overlapping launches with a fault that ``schedules`` must report, and others may."""

    def run(schedule: Schedule) -> None:
        Machine(schedule, options).chain(bodies, grid, sharing)

    return Mutant(run, caught, (bodies, schedules), match)


LATE = RELEASE + allocate(512) + WAIT + ADD + free(512)
EARLY = allocate(512) + WAIT + ADD + free(512)
MUTANTS = {
    "allocated after dependents were released": overlapped(
        [LATE, EARLY], "Deadlock",
        r"\[0, 512\) by CTA \(0, 0, 0\) of b\n.*remedy: in a, allocate before griddepcontrol"
        r"\.launch_dependents: b starts(?s:.*)a: CTA (?s:.*)b: CTA .*\n *waits for the end of a",
        FIRST,
    ),
    "the same, of the second and the third": overlapped(
        [allocate(512) + RELEASE + WAIT + ADD + free(512), LATE, EARLY], "Deadlock",
        r"remedy: in b, allocate before .*: c starts", FIRST,
    ),
    "not freed": overlapped(
        [allocate(512) + ADD] * 2, "TensorMemoryMisuse", "tcgen05.dealloc is missing", ALL
    ),
    "not freed, and no matter": overlapped(
        [allocate(512) + RELEASE + ADD, EARLY], "Deadlock",
        r"by CTA \(0, 0, 0\) of a, which has exited\n.*remedy: tcgen05.dealloc before", ALL,
        tolerated=(TensorMemoryMisuse,),
    ),
    "permit kept by a CTA that waits for its neighbour": overlapped(
        [allocate(128, "") + EXCHANGE + free(128)], "Deadlock",
        r"keeps the permit to allocate\n.*remedy: in a, execute tcgen05.relinquish", ALL, 2,
    ),
    "permit kept by a launch that waits for the one before": overlapped(
        [RELEASE + allocate(128) + WAIT + ADD + free(128),
         allocate(128, "") + WAIT + ADD + free(128)], "Deadlock",
        r"remedy: in b, execute tcgen05.relinquish", FIRST,
    ),
    "two allocations each, more than there is": overlapped(
        [allocate(256, "") + allocate(256, base="%r6") + ADD + free(256) + free(256, "%r6")],
        "Deadlock", r"which wants 256 more, .*which wants 256 more\n.*remedy: allocate once",
        IN_ORDER, 2, OWN_PERMIT,
    ),
    "columns from 0 on": overlapped(
        [allocate(128) + "mov.u32 %r6, %r2; mov.u32 %r2, 0;" + ADD + free(128, "%r6")],
        "TensorMemoryMisuse",
        r"columns \[0, 1\): allocated are \[(128|256|384), ", IN_ORDER, 3,
    ),
    "a neighbour's columns": overlapped(
        [allocate(128) + "mov.u32 %r6, %r2; xor.b32 %r2, %r2, 128;" + ADD + free(128, "%r6")],
        "TensorMemoryMisuse", r"columns \[\d+, \d+\): allocated are ", ALL, 3,
    ),
    "what a neighbour has left behind": overlapped(
        [allocate(512) + "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r4}, [%r2];"
         "tcgen05.wait::ld.sync.aligned;" + ADD + free(512)],
        "UninitialisedRead", "tensor memory", ALL, 2,
    ),
    "no wait before a read": overlapped(
        [RELEASE + STORE, LOAD], "MissingDependencyWait",
        "griddepcontrol.wait before the (generic )?read is missing", ALL,
    ),
    "no wait before a write": overlapped(
        [RELEASE + LOAD, STORE], "MissingDependencyWait",
        "griddepcontrol.wait before the (generic )?write is missing", ALL,
    ),
    "no wait in between": overlapped(
        [RELEASE + STORE, RELEASE, WAIT + LOAD], "MissingDependencyWait", "by a", ALL
    ),
    "released before the wait": overlapped(
        [RELEASE + STORE, RELEASE + WAIT, LOAD], "MissingDependencyWait", "by a", ALL
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_reported(name: str) -> None:
    mutant = MUTANTS[name]
    _, schedules = mutant.on
    found = {str(s): noticed(partial(mutant.change, s)) for s in STANDARD}
    reports = {schedule: report for schedule, report in found.items() if report}
    assert reports.keys() >= schedules
    for report in reports.values():
        mutant.check(report)


def test_a_finding_names_the_neighbour() -> None:
    with pytest.raises(
        TensorMemoryMisuse, match=r"; CTA \(1, 0, 0\) of a, on the same SM, has some"
    ):
        Machine().chain(MUTANTS["a neighbour's columns"].on[0], 2)


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_a_launch_starts_once_all_ctas_before_it_let_it(schedule: Schedule) -> None:
    """One CTA releases dependents; the other CTA only exits, after a wait for columns."""
    machine = Machine(schedule)
    hold = "setp.ne.u32 %p1, %r8, 0; @%p1 bra HELD;" + RELEASE + "HELD:"
    first = allocate(512) + hold + ADD + free(512)
    launches = machine.chain([first, WAIT + allocate(512) + ADD + free(512)], 2)
    assert (machine.words[:2] == 2).all()
    assert launches[0].counters.neighbours == {0: 1}
    assert launches[1].counters.neighbours[0] <= 1  # one of the preceding CTAs had to exit


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_an_ordinary_launch_comes_after_all_before_it(schedule: Schedule) -> None:
    machine = Machine(schedule)
    with machine.gpu.overlapped():
        machine.launch(RELEASE + STORE, name="a")
        machine.launch(RELEASE, name="b")  # may end before the first launch
        last = machine.launch(LOAD + TELL.replace("%r2", "%r5"), name="c", dependent=0)
        assert not machine.words.any()  # nothing has run yet
    assert machine.words[0].tolist() == list(range(32))
    assert not +last.counters.neighbours


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_a_launch_sees_what_another_one_sets(schedule: Schedule) -> None:
    """A dependent may poll its predecessor's flag, which orders no other access."""
    flag = "mov.u32 %r7, 1; setp.ne.u32 %p1, %r90, 0;"
    told = flag + RELEASE + "@%p1 bra DONE; st.release.gpu.global.u32 [%rd90], %r7; DONE:"
    poll = "POLL: ld.acquire.gpu.global.u32 %r6, [%rd90]; setp.eq.u32 %p2, %r6, 0; @%p2 bra POLL;"
    machine = Machine(schedule)
    machine.chain([told, poll])
    with pytest.raises(MissingDependencyWait, match=r"before the (generic )?write is missing"):
        Machine(schedule).chain([told.replace(RELEASE, RELEASE + LOAD), poll + STORE])


CANCEL = """
    setp.ne.u32 %p1, %r90, 0;
    @%p1 bra DONE;
    mbarrier.init.shared.b64 [%r1+16], 1;
    fence.proxy.async.shared::cta;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1+16], 16;
    add.u32 %r10, %r1, 16;
    clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r1], [%r10];
POLL:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r1+16], 0;
    @!%p2 bra POLL;
    st.global.u32 [%rd1], 1;
DONE:
"""  # noqa: E501 — one instruction


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_a_cancelled_cluster_keeps_nobody_waiting(schedule: Schedule) -> None:
    machine = Machine(schedule, {"limits": Limits(sms=1, gpcs=1)})
    launches = machine.chain([CANCEL, WAIT + LOAD], 4, shared=200_000)
    assert machine.words[:4, 0].sum() == 2  # each of two CTAs has stolen another CTA's work
    assert all(launch.link.done for launch in launches)


# --- capacity ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shared", "block", "most"), [(1024, 32, 32), (75_000, 32, 3), (120_000, 32, 1), (64, 1024, 2)]
)
def test_an_sm_holds_what_its_memory_threads_and_slots_allow(
    shared: int, block: int, most: int
) -> None:
    """CTAs are co-resident as far as they fit; the rest start as others end."""
    machine = Machine(options={"limits": Limits(sms=1, gpcs=1)})
    meet = allocate(32) + free(32) if block == 32 else "bar.sync 0;"
    with machine.gpu.shared():
        launch = machine.launch(meet, 40, shared=shared, block=block)
    neighbours = launch.counters.neighbours[0]
    first = most * (most - 1) // 2
    assert first <= neighbours <= first + (40 - most) * (most - 1)
    assert launch.needs.per_sm(machine.gpu.limits) == most


def test_clusters_have_sms_of_one_gpc() -> None:
    limits = Limits(sms=8, gpcs=2)
    machine = Machine(options={"limits": limits})
    with machine.gpu.shared():
        launch = machine.launch(PAIR.replace("COLUMNS", "64"), 8, cluster=4)
        assert launch.counters.neighbours == {0: 4}
        with pytest.raises(LaunchError, match="cluster: 8 CTAs, a GPC has 4 SMs"):
            machine.launch(PAIR.replace("COLUMNS", "64"), 8, cluster=8)


@dataclass
class Square:
    """Stand-in for an SM, with its GPC and free resources."""

    gpc: int
    room: Room


@pytest.mark.parametrize(("packed", "expected"), [(True, [2, 0, 0, 0]), (False, [1, 1, 0, 0])])
def test_packed_or_spread(packed: bool, expected: list[int]) -> None:
    limits = Limits()
    sms = [Square(n // 2, Room(limits)) for n in range(4)]
    floor = Floor(sms, packed)
    needs = needs_of(Machine().launch(""))
    for _ in range(2):
        assert floor.take(1, needs)
    assert sorted((sm.room.ctas for sm in sms), reverse=True) == expected
    pair = floor.take(2, needs)
    assert pair is not None
    assert pair[0].gpc == pair[1].gpc


def test_registers_are_what_is_known_of_them() -> None:
    gpu = Gpu()

    def registers(directives: str, body: str = "", **declared: int) -> int:
        text = assemble(body, 0).replace(".entry k()", f".entry k() {directives}")
        return registers_of(gpu.load(text).kernels["k"], declared, gpu.limits)

    budget = "setmaxnreg.dec.sync.aligned.u32 40;"
    assert registers("") == registers(".maxntid 384") == registers("", budget) == 0
    assert registers(".maxnreg 96") == 96
    assert registers(".maxnreg 96", k=128) == 128
    assert registers(".maxntid 384, 1, 1", budget) == 168
    assert registers(".maxntid 384, 1, 1 .minnctapersm 2", budget) == 80
    assert registers(".reqntid 128, 1, 1", budget) == 248


@pytest.mark.parametrize(("registers", "together"), [(0, True), (168, True), (255, False)])
def test_registers_keep_a_launch_out(registers: int, together: bool) -> None:
    """Two CTAs of 160 threads with 255 registers exceed an SM's registers."""
    machine = Machine(options={"limits": Limits(sms=1, gpcs=1)})
    sharing = Sharing(registers=dict.fromkeys("ab", registers))
    bodies = [RELEASE + "bar.sync 0;", WAIT]
    launches = machine.chain(bodies, 1, sharing, block=160)
    assert launches[1].counters.neighbours[0] == (1 if together else 0)


# --- refused -------------------------------------------------------------------------------


def test_launches_that_overlap_are_of_one_stream() -> None:
    machine = Machine()
    with machine.gpu.overlapped():
        machine.launch(STORE)
        with pytest.raises(LaunchError, match=r"stream: 0x1, .* of one stream, 0x0; synchronise"):
            machine.launch(STORE, stream=1)
        machine.gpu.synchronise()
        assert machine.words[0].any()
        machine.launch(LOAD, stream=1)


def test_overlapped_is_not_nested() -> None:
    machine = Machine()
    with machine.gpu.overlapped():
        with pytest.raises(LaunchError, match="within another one"), machine.gpu.overlapped():
            pass
        machine.launch(STORE)
    assert machine.words[0].any()


def test_an_error_within_runs_nothing() -> None:
    machine = Machine()

    def fail() -> None:
        with machine.gpu.overlapped():
            machine.launch(STORE)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not machine.words.any()
    assert machine.gpu.sharing is None
    machine.launch(STORE)
    assert machine.words[0].any()


def test_whoever_follows_comes_after_all_that_overlapped() -> None:
    machine = Machine()
    machine.chain([RELEASE + STORE, WAIT + STORE])
    machine.launch(LOAD)


def test_time_is_not_of_launches_that_overlap_here() -> None:
    from tests.emulator.timing.device import TimedGpu

    with pytest.raises(LaunchError, match=r"use timing\.chain"), TimedGpu().overlapped():
        pass
