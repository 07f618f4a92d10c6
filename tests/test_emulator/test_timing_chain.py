"""Tests of chains of launches in the timing model: overlap, waits, and contents of L2."""

import struct
from dataclasses import replace

import pytest

from tests.emulator.machine.launch import Launch
from tests.emulator.timing import B200_TIMING, Link, OpaqueLink, TimingError, chain, model
from tests.emulator.timing.device import TimedGpu
from tests.emulator.timing.microbenchmarks import Microbenchmark, copy_loop
from tests.emulator.timing.parameters import H200_TIMING
from tests.emulator.timing.prepared import Prepared
from tests.emulator.timing.residency import clusters_at_once
from tests.emulator.timing.spread import spread
from tests.emulator.timing.supply import L2, Operand

P = B200_TIMING
KB = 1024
RELEASE = "griddepcontrol.launch_dependents;\n"
WAIT = "griddepcontrol.wait;\n"
START = "mov.b32 %f1, 0f3F800000;\nmov.b32 %f2, 0f3F800000;\n"
SMALL = replace(P, sms=4, gpcs=2, ctas_per_sm=4)
LONG, SHORT = 4000, 100
FILLING = 220 * KB  # too much for a second CTA beside it


def work(count: int) -> str:
    return "fma.rn.f32 %f1, %f1, %f2, %f2;\n" * count


def us(count: int) -> float:
    """Microseconds of ``count`` dependent FMAs."""
    return P.microseconds(count * P.arithmetic_latency)


def producer(shared: int = 0, body: str = RELEASE + work(LONG)) -> Launch:
    return Microbenchmark(START + body, ctas=4, shared=shared).run()


def consumer(before: str, after: str, shared: int = 0, dependent: bool = True) -> Launch:
    body = START + before + after
    return Microbenchmark(body, ctas=4, shared=shared, dependent=dependent).run()


def ends(*launches: Launch) -> list[float]:
    return [link.ended for link in chain([Link(each) for each in launches], SMALL).links]


def test_a_chain_of_one_is_the_single_launch() -> None:
    for benchmark in (copy_loop(8192, 2, 6), Microbenchmark(START + work(300), 256, cluster=1)):
        launch = benchmark.run()
        single = model(launch, clusters=200, exact=True)
        timing = chain([Link(launch, clusters=200)], gpcs=len(P.gpc_sizes()))
        assert timing.microseconds == pytest.approx(single.microseconds, rel=1e-9)
        assert timing.busy["HBM"] == pytest.approx(single.busy["HBM"], rel=1e-9)


def test_a_grid_repeats_the_clusters_it_is_told_to() -> None:
    launch = producer()
    traced = Prepared(launch, P).traced
    prepared = Prepared(launch, P, clusters=9, repeats=(2, 0, 0))
    assert prepared.repeated(4) == [traced[number] for number in (2, 0, 0, 2)]
    assert prepared.repeat == 3
    alike = chain([Link(launch, clusters=9, repeats=(2, 0, 0))], SMALL)
    assert alike.microseconds == chain([Link(launch, clusters=9)], SMALL).microseconds


def test_a_few_clusters_are_of_all_parts_of_a_grid() -> None:
    """Samples are spread, as the first CTAs of a persistent grid may have more work."""
    prepared = Prepared(producer(), P)
    first, second = prepared.some(2)
    assert first in prepared.traced[:2]
    assert second in prepared.traced[2:]
    assert prepared.some(9) == prepared.repeated(9)
    numbers = spread(1000, 300)
    assert all(1000 * n // 300 <= each < 1000 * (n + 1) // 300 for n, each in enumerate(numbers))


def test_a_device_runs_a_part_of_a_grid() -> None:
    """A device runs a sample of clusters, each of which knows the size of the whole grid."""
    gpu = TimedGpu()
    gpu.most = 3
    launch = Microbenchmark(START + work(2), ctas=12, cluster=2).run(gpu)
    assert launch.traces is not None
    assert [trace.cluster for trace in launch.traces[::2]] == spread(6, 3)
    assert launch.grid == (12, 1, 1)
    gpu.backwards = True
    launch = Microbenchmark(START + work(2), ctas=12, cluster=2).run(gpu)
    assert launch.traces is not None
    assert [trace.cluster for trace in launch.traces[::2]] == spread(6, 3)[::-1]
    gpu.most = None
    assert Microbenchmark(START + work(2), ctas=12, cluster=2).run(gpu).clusters == 6


def test_a_prologue_is_hidden_under_the_launch_before() -> None:
    prologue = consumer(work(LONG // 2), WAIT + work(SHORT))
    first, second = ends(producer(), prologue)
    assert second - first == pytest.approx(P.grid_flush + us(SHORT), rel=0.02)
    _, late = ends(producer(), consumer(work(LONG // 2), WAIT + work(SHORT), dependent=False))
    assert late - first == pytest.approx(P.grid_launch + us(LONG // 2 + SHORT), rel=0.02)


def test_a_launch_that_finds_no_shared_memory_hides_nothing() -> None:
    second = consumer(work(LONG // 2), WAIT + work(SHORT), FILLING)
    first, blocked = ends(producer(FILLING), second)
    alone = P.microseconds(P.cta_launch) + us(LONG // 2 + SHORT)
    assert blocked - first == pytest.approx(alone, rel=0.02)
    first, beside = ends(producer(), second)
    assert beside - first == pytest.approx(P.grid_flush + us(SHORT), rel=0.02)


def test_a_launch_known_by_its_time_alone() -> None:
    """An opaque launch takes its given time; the next launch starts as after any other."""
    prologue = consumer(work(LONG // 2), WAIT + work(SHORT))
    pause = OpaqueLink("pause", 5.0)
    timing = chain([Link(producer()), pause, Link(prologue)], SMALL)
    first, paused, last = timing.links
    assert paused.kernel == "pause"
    assert paused.ended - first.ended == pytest.approx(P.grid_launch + 5.0)
    assert last.begun - paused.ended == pytest.approx(P.dependent_launch)
    late = P.dependent_launch + us(LONG // 2 + SHORT)
    assert last.ended - paused.ended == pytest.approx(late, rel=0.02)


def test_a_dependent_launch_known_by_its_time_alone_lets_the_next_one_open() -> None:
    prologue = consumer(work(LONG // 2), WAIT + work(SHORT))
    pause = OpaqueLink("pause", 5.0, dependent=True)
    first, paused, last = chain([Link(producer()), pause, Link(prologue)], SMALL).links
    assert paused.opened < first.ended
    assert paused.ended - first.ended == pytest.approx(P.grid_flush + 5.0)
    assert last.ended - paused.ended == pytest.approx(P.grid_flush + us(SHORT), rel=0.02)


def test_l2_holds_what_a_launch_known_by_its_time_alone_has_written() -> None:
    read = Operand("x", 0, 1024, 1024.0)
    pause = OpaqueLink("pause", 1.0, operands=(read,))
    written = replace(pause, writes={"x": 1024.0})
    assert [link.hbm_bytes for link in chain([pause, pause]).links] == [1024.0, 0.0]
    other = replace(pause, operands=(replace(read, name="y"),), writes={"x": 1024.0})
    assert [link.hbm_bytes for link in chain([other, written]).links] == [1024.0, 0.0]


def test_registers_keep_a_launch_out() -> None:
    launches = [producer(), consumer(work(LONG // 2), WAIT + work(SHORT))]

    def last(registers: int) -> float:
        parameters = replace(SMALL, registers_per_sm=32 * 200)
        links = [Link(each, registers=registers) for each in launches]
        return chain(links, parameters).microseconds

    assert last(104) - last(96) == pytest.approx(us(LONG // 2) - P.grid_flush, rel=0.2)


@pytest.mark.parametrize("wait", [WAIT, ""])
def test_a_wait_is_over_once_the_grid_before_is_flushed(wait: str) -> None:
    first, second = ends(producer(), consumer(wait, work(SHORT)))
    if wait:
        assert second == pytest.approx(first + P.grid_flush + us(SHORT), rel=0.01)
    else:
        assert second == pytest.approx(P.dependent_launch + us(SHORT), rel=0.1)


def test_a_launch_starts_when_the_last_cta_has_let_it() -> None:
    """Every CTA but the first releases the dependent launch only by exiting."""
    body = (
        "mov.u32 %r1, %ctaid.x;\nsetp.ne.u32 %p1, %r1, 0;\n@%p1 bra GO;\n" + RELEASE + "GO:\n"
    ) + work(LONG)
    prologue = consumer("", work(SHORT))
    first, second = ends(producer(body=body), prologue)
    assert second == pytest.approx(first + P.dependent_launch + us(SHORT), rel=0.02)


def test_three_launches_overlap_if_the_middle_one_releases_before_it_waits() -> None:
    middle = consumer(RELEASE + WAIT, work(SHORT))
    last = consumer(work(LONG // 2), WAIT + work(SHORT))
    _, two, three = ends(producer(), middle, last)
    assert three - two == pytest.approx(P.grid_flush + us(SHORT), rel=0.02)
    late = consumer(WAIT + RELEASE, work(SHORT))
    _, two, three = ends(producer(), late, last)
    assert three - two == pytest.approx(us(LONG // 2) + P.dependent_launch, rel=0.1)


@pytest.mark.parametrize(("columns", "blocked"), [(256, False), (512, True)])
def test_tensor_memory_is_shared_with_the_launch_before(columns: int, blocked: bool) -> None:
    allocate = f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [dynamic], {columns};\n"
    free = (
        "ld.shared.b32 %r30, [dynamic];\n"
        f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, {columns};\n"
    )
    first = producer(KB, RELEASE + allocate + work(LONG) + free)
    second = consumer(allocate + work(LONG // 2), WAIT + work(SHORT) + free, KB)
    one, two = ends(first, second)
    hidden = P.grid_flush + us(SHORT)
    assert two - one == pytest.approx(us(LONG // 2 + SHORT) if blocked else hidden, rel=0.05)


def whole(name: str, launch: Launch, nbytes: float) -> Operand:
    (address,) = struct.unpack("<Q", launch.parameters[:8])
    return Operand(name, address, 16 * KB, nbytes)


def test_loads_before_the_wait_share_the_bandwidth() -> None:
    """Two launches that read at the same time take as long as all their bytes take."""
    loop = copy_loop(16 * KB, 2, 24)
    both = [replace(loop, body=RELEASE + loop.body), replace(loop, dependent=True)]
    at = replace(P, dependent_launch=0.0, shared_per_sm=P.shared_per_sm * 2)
    launches = [each.run() for each in both]
    links = [
        Link(each, 148, (whole(f"x{number}", each, 148 * 24 * 16.0 * KB),))
        for number, each in enumerate(launches)
    ]
    alone, together = (chain(links[:count], at, gpcs=8) for count in (1, 2))
    assert together.links[1].opened < 0.2 * alone.microseconds
    assert together.microseconds == pytest.approx(2 * alone.microseconds, rel=0.15)
    assert together.busy["HBM"] > 0.85


def test_l2_keeps_what_the_launch_before_wrote() -> None:
    launch = copy_loop(16 * KB, 2, 8).run()
    nbytes = 148 * 8 * 16.0 * KB
    reads = Link(launch, 148, (whole("x", launch, nbytes),))
    writes = Link(producer(), writes={"x": nbytes})
    cold, warm = chain([reads]), chain([writes, reads])
    assert cold.links[0].hbm_bytes == pytest.approx(nbytes)
    assert warm.links[1].hbm_bytes == 0
    assert warm.period(1) < 0.7 * cold.microseconds
    little = chain([writes, reads], replace(P, l2_bytes=nbytes / 4))
    assert little.links[1].hbm_bytes == pytest.approx(0.75 * nbytes)


def test_l2_gives_up_what_was_used_longest_ago() -> None:
    l2 = L2(100)

    def read(name: str, nbytes: float, streamed: bool = False) -> float:
        return l2.read(Operand(name, 0, 0, nbytes, streamed))

    assert (read("a", 60), read("b", 40), read("a", 60)) == (60, 40, 0)
    assert (read("weights", 90, True), read("weights", 90, True), read("a", 60)) == (90, 90, 0)
    l2.write("c", 50)  # takes the room of b, and 10 of a's
    assert (read("c", 50), read("a", 60), read("b", 40)) == (0, 10, 40)


def test_operands_that_overlap_are_refused() -> None:
    launch = copy_loop(16 * KB, 2, 2).run()
    twice = (whole("x", launch, 1.0), whole("y", launch, 1.0))
    with pytest.raises(TimingError, match="'x' and 'y' overlap"):
        chain([Link(launch, 148, twice)])


def test_no_cluster_reaches_beyond_its_gpc() -> None:
    assert P.gpc_sizes() == (18,) * 6 + (20,) * 2
    assert H200_TIMING.gpc_sizes() == (16,) * 6 + (18,) * 2
    assert clusters_at_once(P.gpc_sizes(), 4) == 34  # there are 37 groups of four SMs
    two = replace(P, sms=12, gpcs=2)  # of six SMs each: one cluster of four in either
    launch = Microbenchmark(START + work(400), ctas=12, cluster=4, shared=FILLING).run()
    timing = model(launch, two)
    one = model(launch, replace(two, gpcs=1))
    assert (timing.resident, timing.waves) == (2, 2)
    assert (one.resident, one.waves) == (3, 1)
    assert timing.cycles == pytest.approx(2 * one.cycles + P.cta_launch, rel=0.01)
    with pytest.raises(TimingError, match="4 CTAs, a GPC has 2 SMs"):
        model(launch, replace(P, sms=12, gpcs=6))


@pytest.mark.parametrize("clusters", [148, 20])  # 20: rounded up from 2.4 on one GPC
def test_one_gpc_stands_for_all(clusters: int) -> None:
    loop = copy_loop(16 * KB, 4, 12)
    launches = [loop.run(), replace(loop, dependent=True).run()] * 2
    links = [
        Link(each, clusters, (whole(f"x{number}", each, clusters * 12 * 16.0 * KB),))
        for number, each in enumerate(launches)
    ]
    whole_chip = chain(links, gpcs=8)
    assert whole_chip.gpcs == P.gpc_sizes()
    part = chain(links, gpcs=1)
    assert part.gpcs == (18,)
    assert part.microseconds == pytest.approx(whole_chip.microseconds, rel=0.05)
    assert part.busy["HBM"] == pytest.approx(whole_chip.busy["HBM"], rel=0.05)


def test_a_chain_says_what_it_lacks() -> None:
    with pytest.raises(TimingError, match="links: none"):
        chain([])
    with pytest.raises(ValueError, match="count: 1, accepted 1 to 0"):
        chain([Link(producer())], SMALL).period(1)
