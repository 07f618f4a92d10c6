"""Programmatic dependent launch: ordering by griddepcontrol.wait, and findings without it."""

import itertools
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.emulator import STANDARD, Gpu, Schedule
from tests.emulator.findings import DataRace, MissingDependencyWait
from tests.emulator.machine.launch import Launch
from tests.test_emulator.assemble import assemble, global_array

if TYPE_CHECKING:
    from tests.devices import KernelDevice

PLACE = """
    mad.wide.u32 %rd1, %r90, 4, %rd90;
    mad.wide.u32 %rd2, %r90, 4, %rd91;
    mad.wide.u32 %rd3, %r90, 4, %rd92;
"""
WAIT = "griddepcontrol.wait;"
RELEASE = "griddepcontrol.launch_dependents;"
WRITE = "add.u32 %r1, %r90, 7; st.global.u32 [%rd1], %r1;"
READ = "ld.global.u32 %r2, [%rd1]; st.global.u32 [%rd2], %r2;"
CONSTANT = "ld.global.u32 %r3, [%rd3];"
NOTHING = ""
NARROW = "setp.eq.u32 %p1, %r90, 99; @%p1 st.global.u8 [%rd1], %r90;"  # never runs; by bytes
BULK = """
    mov.u32 %r5, smem;
    setp.ne.u32 %p1, %r90, 0;
    @%p1 bra FETCHED;
    mbarrier.init.shared.b64 [%r5], 1;
    fence.mbarrier_init.release.cluster;
    fence.proxy.async.shared::cta;
    BEFORE
    mbarrier.arrive.expect_tx.shared.b64 _, [%r5], 256;
    add.u32 %r6, %r5, 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r6], [%rd90], 256, [%r5];
    AFTER
FETCHED:
    bar.sync 0;
POLL:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r5], 0;
    @!%p2 bra POLL;
    shl.b32 %r7, %r90, 2;
    add.u32 %r6, %r5, %r7;
    ld.shared.u32 %r8, [%r6 + 128];
    st.global.u32 [%rd2], %r8;
"""
BULK_PREFETCH = """
    setp.ne.u32 %p3, %r90, 0;
    @%p3 bra PREFETCHED;
    cp.async.bulk.prefetch.L2.global [%rd90], 256;
    prefetch.global.L2 [%rd90];
PREFETCHED:
"""


@dataclass
class Stream:
    """Stream that launches kernels in sequence on three arrays of 64 words.

    Attributes:
        data: array usually written by the first kernel, never by the host.
        out: array written by the other kernels.
        constant: array written by the host.
    """

    schedule: Schedule = STANDARD[0]
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gpu = Gpu(schedule=self.schedule, **self.options)
        self.arrays = [global_array(np.full(64, n, np.uint32)) for n in (0, 0, 5)]
        self.data, self.out, self.constant = self.arrays
        for name, array in zip(("data", "out", "constant"), self.arrays, strict=True):
            initialised = name == "constant"
            raw = array.view(np.uint8)
            self.gpu.memory.register_array(raw, name=name, initialised=initialised)

    def launch(self, name: str, body: str, dependent: int = 1, stream: int = 0) -> Launch:
        """Launch kernel ``name`` with one CTA of two warps."""
        lines = (PLACE + body).replace(";", ";\n")
        ptx = assemble(lines, 3, shared=1024).replace(".entry k(", f".entry {name}(")
        return self.gpu.launch(
            self.gpu.load(ptx),
            name,
            (1, 1, 1),
            (64, 1, 1),
            parameters=[struct.pack("<Q", array.ctypes.data) for array in self.arrays],
            attributes={"programmatic_stream_serialization": dependent},
            stream=stream,
        )


def race(launches: Stream, name: str, body: str, **options: int) -> str:
    """Report of a launch's missing wait."""
    with pytest.raises(MissingDependencyWait) as caught:
        launches.launch(name, body, **options)
    assert isinstance(caught.value, DataRace)
    return str(caught.value)


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
@pytest.mark.parametrize("release", [RELEASE + WRITE, WRITE + RELEASE, WRITE])
def test_a_wait_orders(schedule: Schedule, release: str) -> None:
    stream = Stream(schedule)
    stream.launch("producer", release)
    stream.launch("consumer", CONSTANT + BULK_PREFETCH + WAIT + READ)
    np.testing.assert_array_equal(stream.out, np.arange(64) + 7)


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_a_missing_wait_is_reported_with_both_places(schedule: Schedule) -> None:
    stream = Stream(schedule)
    stream.launch("producer", WRITE)
    report = race(stream, "consumer", CONSTANT + READ + WAIT)
    fact, place = report.split("\n")
    assert fact.startswith(
        "read of global memory data by consumer after a generic write by producer at PTX line "
    )
    assert "st.global.u32 [%rd1], %r1;: programmatic stream serialization lets this" in fact
    assert fact.endswith("griddepcontrol.wait before the read is missing")
    assert "at CTA (0, 0, 0) warp " in place
    assert "ld.global.u32 %r2, [%rd1];" in place


@pytest.mark.parametrize(
    ("first", "second", "match"),
    [
        (WRITE, READ, "read of global memory data by b after a generic write by a"),
        (WRITE, WRITE, "write of global memory data by b after a generic write by a"),
        (WRITE + READ, WRITE, "write of global memory data by b after a generic"),
        (
            CONSTANT,
            "st.global.u32 [%rd3], %r90;",
            "write of global memory constant by b after a ge",
        ),
        (WRITE, BULK, "TMA|bulk"),
        (
            BULK.replace("rd90", "rd92"),
            "st.global.u32 [%rd3], %r90;",
            "write of global .* constant",
        ),
        (
            WRITE,
            "red.global.add.u32 [%rd1], %r90;",
            "of global memory data by b after a generic wr",
        ),
    ],
    ids=["RAW", "WAW", "WAR or WAW", "WAR", "RAW bulk", "WAR bulk", "atomic"],
)
def test_every_kind_of_hazard(first: str, second: str, match: str) -> None:
    first, second = (b.replace("BEFORE", "").replace("AFTER", "") for b in (first, second))
    stream = Stream()
    stream.launch("a", first)
    with pytest.raises(MissingDependencyWait, match=match):
        stream.launch("b", second)
    stream = Stream()
    stream.launch("a", first)
    stream.launch("b", WAIT + second)


def test_reads_and_atomics_of_both_are_no_race() -> None:
    stream = Stream()
    atomic = CONSTANT + "red.global.add.u32 [%rd3], 1;"
    stream.launch("a", atomic.removeprefix(CONSTANT))
    stream.launch("b", atomic.removeprefix(CONSTANT))
    assert (stream.constant == 7).all()
    stream = Stream()
    stream.launch("a", CONSTANT)
    stream.launch("b", CONSTANT)


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_a_bulk_copy_must_be_issued_after_the_wait(schedule: Schedule) -> None:
    for before, after in ((WAIT, ""), ("", WAIT)):
        stream = Stream(schedule)
        stream.launch("a", WRITE)
        body = BULK.replace("BEFORE", before).replace("AFTER", after)
        if before:
            stream.launch("b", body)
            np.testing.assert_array_equal(stream.out, np.arange(64) + 7)
        else:
            assert "read of global memory data by b" in race(stream, "b", body)


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_one_warps_wait_orders_others_through_synchronisation_alone(schedule: Schedule) -> None:
    first_warp = "setp.ge.u32 %p1, %r90, 32; @%p1 bra PASSED; griddepcontrol.wait; PASSED:"
    stream = Stream(schedule)
    stream.launch("a", WRITE)
    stream.launch("b", first_warp + "bar.sync 0;" + READ)
    stream = Stream(schedule)
    stream.launch("a", WRITE)
    assert "warp 1" in race(stream, "b", first_warp + READ)
    # The mbarrier of a copy orders warp 1's write after the read by launch a.
    stream = Stream(schedule)
    stream.launch("a", WRITE + "ld.global.u32 %r2, [%rd3];")
    stream.launch("b", BULK.replace("BEFORE", WAIT).replace("AFTER", "").replace("%rd2", "%rd3"))


@pytest.mark.parametrize("attribute", [0, 1])
def test_without_the_attribute_or_a_launch_before_there_is_nothing_to_wait_for(
    attribute: int,
) -> None:
    stream = Stream()
    if attribute == 0:
        stream.launch("a", WRITE)
        launch = stream.launch("b", RELEASE + READ + WAIT, dependent=0)
        np.testing.assert_array_equal(stream.out, np.arange(64) + 7)
        assert launch.counters.waits["griddepcontrol.wait"] == 2
    else:
        stream.launch("a", WRITE + READ + WAIT)


# a writes data, b does not touch it, c reads it: may c do so?
@pytest.mark.parametrize(
    ("b", "c", "match"),
    [
        (WAIT, WAIT + READ, ""),
        (WAIT, READ, ""),
        (WAIT + RELEASE, READ, ""),
        (RELEASE + WAIT, WAIT + READ, ""),
        (RELEASE + WAIT, READ, "by a at .* lets this launch start before that one"),
        (NOTHING, READ, "b, launched between the two, executes no griddepcontrol.wait"),
        (NOTHING, WAIT + READ, "by a at .* b, launched between .*: .* not say that the other has"),
        (RELEASE, WAIT + READ, "b, launched between the two, executes no griddepcontrol.wait"),
        # Warp 0 has waited; warp 1 may release dependents without having waited.
        (
            "setp.ge.u32 %p1, %r90, 32; @%p1 bra R; griddepcontrol.wait; R:" + RELEASE,
            READ,
            "griddepcontrol.wait before the read is missing",
        ),
        (
            "setp.ge.u32 %p1, %r90, 32; @%p1 bra R; griddepcontrol.wait; R: bar.sync 0;" + RELEASE,
            READ,
            "",
        ),
    ],
)
def test_transitivity(b: str, c: str, match: str) -> None:
    stream = Stream()
    stream.launch("a", WRITE)
    stream.launch("b", b)
    if match:
        with pytest.raises(MissingDependencyWait, match=match):
            stream.launch("c", c)
    else:
        stream.launch("c", c)
        np.testing.assert_array_equal(stream.out, np.arange(64) + 7)


def test_only_a_stream_join_reaches_what_a_kernel_without_wait_hides() -> None:
    for d in ({"dependent": 0}, {}):
        stream = Stream()
        stream.launch("a", WRITE)
        stream.launch("b", NOTHING)
        stream.launch("c", WAIT + RELEASE)
        if d:
            stream.launch("d", READ, **d)
            stream.launch("e", "ld.global.u32 %r2, [%rd1];")
        else:
            assert "b, launched between the two" in race(stream, "d", WAIT + READ)


def test_the_latest_write_counts() -> None:
    stream = Stream()
    stream.launch("a", WRITE)
    stream.launch("b", RELEASE + WAIT + WRITE)
    assert "by b at" in race(stream, "c", READ)


@pytest.mark.parametrize("read", [CONSTANT, NARROW + CONSTANT.replace("u32", "u8")])
def test_every_reader_counts(read: str) -> None:
    stream = Stream()
    stream.launch("a", read)
    stream.launch("b", read)  # without a wait
    write = WAIT + "st.global.u32 [%rd3], %r90;"
    assert "generic read by a at" in race(stream, "c", write)
    stream = Stream()
    stream.launch("a", read)
    stream.launch("b", read + WAIT)
    stream.launch("c", write)


def test_a_long_chain_keeps_what_its_launches_may_still_meet_alone() -> None:
    stream = Stream()
    for _ in range(20):
        stream.launch("a", RELEASE + WAIT + WRITE + READ + CONSTANT)
    history = stream.gpu.history
    assert len(history._accesses) == 4  # the last launch reads its own write of data
    assert sum(map(len, history._running.values())) == 1
    stream.launch("b", NOTHING, dependent=0)
    assert not history._accesses


def test_other_streams_do_not_join() -> None:
    stream = Stream()
    stream.launch("a", WRITE, stream=1)
    stream.launch("x", READ, stream=2)  # order within other streams is ignored
    stream.launch("y", CONSTANT, stream=2, dependent=0)
    assert len(stream.gpu.history._accesses) == 2  # x has ended for y; a has not ended for b
    assert "write by a" in race(stream, "b", READ, stream=1)


@pytest.mark.parametrize("synchronised", [0, 1, None])
def test_a_synchronised_stream_has_nothing_to_overlap(synchronised: int | None) -> None:
    stream = Stream()
    stream.launch("a", WRITE)
    stream.gpu.synchronise(synchronised)
    if synchronised == 1:
        race(stream, "b", READ)
    else:
        stream.launch("b", READ)


@pytest.mark.parametrize(
    ("first", "array"),
    [
        *itertools.product(["st.global.u32", "st.global.u8"], [0, 2]),
        ("ld.global.u32", 2),
        ("ld.global.u8", 2),
    ],
)
@pytest.mark.parametrize("second", ["st.global.u32", "st.global.u8"])
def test_accesses_of_other_widths(first: str, second: str, array: int) -> None:
    def by_one_thread(opcode: str) -> str:
        operands = [f"[%rd9{array} + {0 if '32' in opcode else 1}]", "%r90"]
        ordered = operands if opcode.startswith("st") else reversed(operands)
        narrow = NARROW if "u8" in opcode else ""
        return f"{narrow} setp.eq.u32 %p1, %r90, 0; @%p1 {opcode} {', '.join(ordered)};"

    stream = Stream()
    stream.launch("a", by_one_thread(first))
    with pytest.raises(MissingDependencyWait, match=r"by b after a generic .* by a"):
        stream.launch("b", by_one_thread(second))


def test_findings_can_be_tolerated_and_nothing_sticks() -> None:
    stream = Stream(options={"tolerated": (MissingDependencyWait,)})
    stream.launch("a", WRITE)
    found = stream.launch("b", READ).findings
    assert [type(f) for f in found] == [MissingDependencyWait]
    stream = Stream()
    stream.launch("a", WRITE)
    race(stream, "b", "st.global.u32 [%rd2], %r90;" * 9 + READ)
    stream.launch("b", READ + "ld.global.u32 %r2, [%rd2];")  # nothing is in flight any more


def test_bytes_of_a_dependent_launch_are_its_own() -> None:
    stream = Stream()
    stream.launch("a", CONSTANT)
    for body, read, written in (
        (CONSTANT, 256, 0),
        (WAIT, 0, 0),
        (WAIT + CONSTANT + WRITE, 256, 256),
    ):
        counted = stream.launch("b", body).counters.nbytes
        assert counted["HBM read, each byte once"] == read
        assert counted["HBM write, each byte once"] == written


@pytest.mark.parametrize(("waits", "use_pdl"), [(True, True), (False, True), (False, False)])
def test_cute_dsl_kernels(device: "KernelDevice", waits: bool, use_pdl: bool) -> None:
    import torch

    from tests.devices import Emulated
    from tests.test_emulator.kernels.dependent import THREADS, square_and_add

    x = torch.arange(2 * THREADS, dtype=torch.int32)
    y = device.output("y", x)
    if use_pdl and not waits:
        if not isinstance(device, Emulated):
            pytest.skip("a GPU does not report what is missing")
        with pytest.raises(MissingDependencyWait, match=r"read of global memory y by .*_add.*wait"):
            square_and_add(device.put("x", x), y, waits, use_pdl)
    else:
        square_and_add(device.put("x", x), y, waits, use_pdl)
        assert torch.equal(y.cpu(), x * x + x)
