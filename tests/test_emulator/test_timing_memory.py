"""Memory of the timing model: loads, cp.async, prefetches, L1, HBM's queues, tensor memory."""

from dataclasses import replace

import numpy as np
import pytest

from tests.emulator.machine.trace import SECTOR, Event
from tests.emulator.timing import B200_TIMING, Parameters, Timing, TimingError, model
from tests.emulator.timing.caches import L1, distinct_bytes
from tests.emulator.timing.calibrate import stream_rate
from tests.emulator.timing.microbenchmarks import Microbenchmark, async_stream, chain, stream
from tests.emulator.timing.parameters import H200_TIMING
from tests.emulator.timing.published import STREAM_COPY, STREAM_MANY, STREAMS, MeasuredStream
from tests.emulator.tma.tile import Footprint

P = B200_TIMING
PAST_L1 = ".L1::no_allocate"


def part_of(p: Parameters, sms: int) -> Parameters:
    """Parameters of a chip of few SMs with proportional bandwidth, which is faster to simulate."""
    share = sms / p.sms
    bandwidths = {
        "hbm_bandwidth": p.hbm_bandwidth * share,
        "l2_bandwidth": p.l2_bandwidth * share,
    }
    return replace(p, sms=sms, **bandwidths)


SMALL, SMALL_H200 = part_of(P, 16), part_of(H200_TIMING, 12)


def cycles(benchmark: Microbenchmark, **parameters: float) -> float:
    return model(benchmark.run(), replace(P, **parameters)).cycles


def bandwidth(few: Timing, many: Timing, nbytes: float) -> float:
    """Bandwidth in TB/s, from the difference of two runs."""
    return nbytes / (many.microseconds - few.microseconds) / 1e6


# Streams


@pytest.mark.parametrize(
    "row", [row for row in STREAMS if row.threads * row.loads <= 1024], ids=str
)
def test_streams_are_within_a_seventh_of_an_h200(row: MeasuredStream) -> None:
    assert stream_rate(row, SMALL_H200) == pytest.approx(row.rate * 12 / 132, rel=1 / 7)


def test_many_ctas_reach_the_bandwidth_of_hbm() -> None:
    launch = stream(256, 4, 1, ctas=16, hint=PAST_L1).run()
    timing = model(launch, SMALL, clusters=16 * 8 * 40)
    rate = timing.clusters * 256 * 4 * 16 / timing.microseconds / 1e6
    assert rate == pytest.approx(SMALL.hbm_bandwidth, rel=0.03)
    assert timing.limit[0] == "HBM"
    on_h200 = model(launch, SMALL_H200, clusters=12 * 8 * 40)
    rate = on_h200.clusters * 256 * 4 * 16 / on_h200.microseconds / 1e3
    assert rate == pytest.approx(STREAM_MANY * 12 / 132, rel=0.03)


def test_few_bytes_under_way_are_bound_by_latency() -> None:
    few, many = (model(stream(32, 1, n, hint=PAST_L1).run(), clusters=148) for n in (8, 32))
    latency = P.l2_latency + P.hbm_latency + P.hbm_bank_time
    assert (many.cycles - few.cycles) / 24 == pytest.approx(latency, rel=0.05)
    assert many.limit[1] < 0.1


def test_copies_are_slower_than_reads_as_on_an_h200() -> None:
    few, many = (
        model(stream(1024, 4, n, store=True).run(), SMALL_H200, clusters=24) for n in (4, 16)
    )
    rate = bandwidth(few, many, 12 * 2 * 1024 * 4 * 16 * 24) * 1e3
    assert rate == pytest.approx(STREAM_COPY * 12 / 132, rel=0.05)


def test_registers_limit_residency() -> None:
    launch = stream(256, 4, 1, ctas=16, hint=PAST_L1).run()
    whole, half = (model(launch, SMALL, clusters=128, registers=n) for n in (32, 64))
    assert (whole.resident, half.resident) == (128, 64)
    assert (whole.waves, half.waves) == (1, 2)


# cp.async


def test_async_copies_wait_for_their_own_group() -> None:
    one, four = (
        [model(async_stream(32, stages, n).run(), footprint=0).cycles for n in (8, 40)]
        for stages in (1, 4)
    )
    alone = (one[1] - one[0]) / 32
    assert alone == pytest.approx(P.l2_latency + P.async_copy_latency, rel=0.1)
    assert (four[1] - four[0]) / 32 == pytest.approx(alone / 4, rel=0.1)


def test_async_copies_reach_the_bandwidth_of_hbm() -> None:
    few, many = (model(async_stream(1024, 4, n).run(), SMALL, clusters=16) for n in (8, 40))
    rate = bandwidth(few, many, 32 * 1024 * 16 * 16)
    assert rate == pytest.approx(SMALL.hbm_bandwidth, rel=0.05)


@pytest.mark.parametrize(("noinc", "count"), [(".noinc", 32), ("", 1)])
def test_an_mbarrier_completes_when_copies_have_landed(noinc: str, count: int) -> None:
    # .noinc expects 32 lanes; the plain form adds each lane, and lane 0 arrives as well.
    own = "" if noinc else "@!%p1 mbarrier.arrive.shared::cta.b64 _, [%r40];\n"
    body = (
        "ld.param.u64 %rd1, [data];\nmov.u32 %r40, dynamic;\nmov.u32 %r1, %tid.x;\n"
        "setp.ne.u32 %p1, %r1, 0;\n"
        f"@!%p1 mbarrier.init.shared::cta.b64 [%r40], {count};\nbar.sync 0;\n"
        "mad.lo.s32 %r2, %r1, 16, %r40;\nmul.wide.u32 %rd2, %r1, 16;\nadd.u64 %rd1, %rd1, %rd2;\n"
        "cp.async.cg.shared.global [%r2+64], [%rd1], 16;\n"
        f"cp.async.mbarrier.arrive{noinc}.shared::cta.b64 [%r40];\n{own}"
        "WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 %p2, [%r40], 0;\n@!%p2 bra WAIT;"
    )
    timing = model(Microbenchmark(body, shared=1024).run(), footprint=0)
    (waited,) = (time for name, time in timing.warps[0].waiting.items() if "mbarrier" in name)
    landing = P.l2_latency + P.async_copy_latency + P.arrive_latency + P.wake_latency
    assert waited == pytest.approx(landing, abs=40)


def test_zero_filled_async_copies_fetch_nothing() -> None:
    body = (
        "ld.param.u64 %rd1, [data];\nmov.u32 %r40, dynamic;\n"
        "cp.async.cg.shared.global [%r40], [%rd1], 16, 0;\ncp.async.wait_all;"
    )
    timing = model(Microbenchmark(body, shared=1024).run())
    assert timing.read_bytes == 0
    assert timing.cycles < 100


# Prefetches and caches


def test_a_prefetched_load_hits_l2() -> None:
    place = "ld.param.u64 %rd1, [data];\n"
    work = "fma.rn.f32 %f1, %f1, %f2, %f2;\n" * 400
    use = f"ld.global{PAST_L1}.b32 %r1, [%rd1];\nadd.s32 %r2, %r1, %r1;"
    fetch = "prefetch.global.L2 [%rd1];\n"
    start = "mov.b32 %f1, 0f3F800000;\nmov.b32 %f2, 0f3F800000;\n"
    none, early, late = (
        cycles(Microbenchmark(start + body))
        for body in (place + work + use, place + fetch + work + use, place + work + fetch + use)
    )
    saved = P.hbm_latency + P.hbm_bank_time
    assert none - early == pytest.approx(saved, abs=5)
    assert none - late == pytest.approx(0, abs=10)  # the load waits for the prefetch


def test_bulk_prefetches_take_the_bytes_from_hbm() -> None:
    body = (
        "ld.param.u64 %rd1, [data];\nmov.u32 %r1, %tid.x;\nsetp.ne.u32 %p1, %r1, 0;\n"
        "@!%p1 cp.async.bulk.prefetch.L2.global [%rd1], 4096;\n"
    )
    timing = model(Microbenchmark(body).run())
    assert timing.hbm_bytes == 4096


def test_lines_that_l1_holds_are_not_asked_of_l2() -> None:
    load = "ld.global{how}.b32 %r1, [%rd1];\nadd.s32 %r2, %r1, %r1;\n"
    times = {}
    for how in ("", ".cg"):
        body = "ld.param.u64 %rd1, [data];\n" + load.format(how=how) * 10
        times[how] = model(Microbenchmark(body).run(), footprint=0)
    assert times[""].read_bytes == SECTOR
    assert times[".cg"].read_bytes == 10 * SECTOR
    each = (times[".cg"].cycles - times[""].cycles) / 9
    assert each == pytest.approx(P.l2_latency - P.l1_latency, rel=0.05)


def test_l1_forgets_what_was_used_longest_ago() -> None:
    cache = L1(3 * SECTOR)
    cache.fill([1, 2, 3], 50.0)
    assert cache.look([(1, 1)]) == ([], 50.0)
    cache.fill([4], 70.0)
    assert cache.look([(1, 4)]) == ([2], 70.0)


def test_distinct_bytes_count_each_sector_once() -> None:
    region = Footprint(64, (3, 2, 40), (1024, 128, 1), 2 * 1024 + 128 + 40)
    runs = [(0, 2), (1, 4), (100, 1), (100, 1)]
    memory = np.zeros(8192, bool)
    for first, count in runs:
        memory[first * SECTOR : (first + count) * SECTOR] = True
    region.of(memory[64:])[...] = True
    sectors = memory.reshape(-1, SECTOR).any(1).sum()
    assert distinct_bytes([tuple(runs), (region,), (region,)]) == sectors * SECTOR
    assert distinct_bytes([]) == 0


def test_strided_loads_keep_the_way_to_l1_busy() -> None:
    def warps(stride: int) -> float:
        body = (
            "ld.param.u64 %rd1, [data];\nmov.u32 %r1, %laneid;\n"
            f"mul.wide.u32 %rd2, %r1, {stride};\nadd.u64 %rd1, %rd1, %rd2;\n"
            + "ld.global.b32 %r2, [%rd1];\n"
            * 20
        )
        return model(Microbenchmark(body, threads=512, data=1 << 14).run(), footprint=0).cycles

    # 16 warps, one line of 128 bytes a cycle: 32 lines instead of one (H200, hopper_memory.cu).
    assert warps(128) - warps(4) == pytest.approx(16 * 20 * 31, rel=0.15)


@pytest.mark.parametrize(("stride", "each"), [(32, 40.9), (64, 48.8), (128, 64.8)])
def test_scattered_stores_are_as_slow_as_on_an_h200(stride: int, each: float) -> None:
    body = (
        "ld.param.u64 %rd1, [data];\nmov.u32 %r1, %laneid;\n"
        f"mul.wide.u32 %rd2, %r1, {stride};\nadd.u64 %rd1, %rd1, %rd2;\n"
    )
    few, many = (
        cycles(Microbenchmark(body + "st.global.b32 [%rd1], %r1;\n" * n, threads=512))
        for n in (8, 24)
    )
    assert (many - few) / (16 * 16) == pytest.approx(each, rel=0.03)


def test_local_memory_takes_the_latency_of_l1() -> None:
    spill = "st.local.b32 [own], %r1;\nld.local.b32 %r1, [own];\nadd.s32 %r1, %r1, 1;\n"
    head = ".local .align 4 .b8 own[16];\nmov.b32 %r1, 1;\n"
    few, many = (cycles(Microbenchmark(head + spill * n)) for n in (4, 24))
    assert (many - few) / 20 == pytest.approx(P.l1_latency, abs=8)


# Instructions that stall, and events without a model


@pytest.mark.parametrize(
    ("instruction", "each"),
    [
        ("fence.acq_rel.gpu;", P.device_fence_latency),
        ("fence.proxy.async.shared::cta;", P.proxy_fence_latency),
        ("fence.proxy.tensormap::generic.release.gpu;", P.device_fence_latency),
        ("nanosleep.u32 100;", 100 * P.clock),
    ],
)
def test_fences_and_sleeps_hold_their_warp(instruction: str, each: float) -> None:
    few, many = (cycles(chain(instruction, n)) for n in (10, 110))
    assert (many - few) / 100 == pytest.approx(each)


def test_an_event_without_a_model_is_refused() -> None:
    launch = chain("add.s32 %r1, %r1, %r2;", 3).run()
    assert launch.traces is not None
    launch.traces[0].warps[0].append(Event("teleport", 7))
    with pytest.raises(TimingError, match="'teleport' of PTX line 7: has no model"):
        model(launch)


# Tensor memory


def test_an_allocation_waits_for_the_other_ctas_columns() -> None:
    hold = "fma.rn.f32 %f1, %f1, %f2, %f2;\n" * 1000
    body = (
        "mov.b32 %f1, 0f3F800000;\nmov.b32 %f2, 0f3F800000;\nmov.u32 %r40, dynamic;\n"
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r40], {columns};\n"
        "ld.shared.b32 %r30, [%r40];\n"
        f"{hold}tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, {{columns}};"
    )
    half, all_of_them = (
        model(Microbenchmark(body.format(columns=n), ctas=2, shared=1024).run(), replace(P, sms=1))
        for n in (256, 512)
    )
    held = 1000 * P.arithmetic_latency
    assert half.cycles == pytest.approx(held, rel=0.1)
    assert all_of_them.cycles == pytest.approx(2 * held, rel=0.1)
