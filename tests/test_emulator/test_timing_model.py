"""Tests of the timing model on kernels whose time can be computed by hand."""

from dataclasses import replace

import pytest

from tests.emulator.machine.gpu import Gpu
from tests.emulator.machine.trace import Event
from tests.emulator.timing import B200_TIMING, H200_TIMING, TimingError, model
from tests.emulator.timing.microbenchmarks import (
    Microbenchmark,
    chain,
    copy_loop,
    late_warp,
    multiply_loop,
    store_loop,
    tensor_reads,
    warpgroup_loop,
)
from tests.emulator.timing.model import list_schedule
from tests.emulator.timing.published import (
    COPIES,
    COPIES_CLOCK,
    MMAS,
    MeasuredCopies,
    MeasuredMma,
)
from tests.emulator.timing.tensor_core import MmaShape, completion, interval

P = B200_TIMING
FMA = "fma.rn.f32 %f1, %f1, %f2, %f2;"
EX2 = "ex2.approx.ftz.f32 %f1, %f1;"


def cycles(benchmark: Microbenchmark, **parameters: float) -> float:
    return model(benchmark.run(), replace(P, **parameters)).cycles


@pytest.mark.parametrize("count", [1, 10, 400])
def test_dependent_fmas_take_their_latency_each(count: int) -> None:
    base = cycles(chain(FMA, 0))
    # The last FMA is not waited for: nothing uses its result.
    expected = (count - 1) * P.arithmetic_latency + 1
    assert cycles(chain(FMA, count)) - base == pytest.approx(expected)


def test_latency_is_kept_across_segments() -> None:
    store = "st.shared.b32 [dynamic], %r1;\n"
    benchmark = replace(chain(f"{FMA}\n{store}", 100), shared=1024)
    base = cycles(replace(chain(f"{FMA}\n{store}", 0), shared=1024))
    assert cycles(benchmark) - base == pytest.approx(100 * P.arithmetic_latency, rel=0.05)


def test_a_shared_load_is_waited_for_where_it_is_used() -> None:
    load = "ld.shared.b32 %r3, [dynamic];\n"
    use = "add.s32 %r1, %r3, %r1;\n"
    filler = "add.s32 %r4, %r2, %r2;\n" * 4
    direct = cycles(replace(chain(load + use, 100), shared=1024))
    hidden = cycles(replace(chain(load + filler + use, 100), shared=1024))
    assert direct / 100 == pytest.approx(P.shared_latency + 2, abs=4)
    assert hidden == pytest.approx(direct, rel=0.05)


def test_independent_fmas_issue_every_cycle() -> None:
    body = "".join(f"fma.rn.f32 %f{n % 4 + 4}, %f1, %f2, %f3;\n" for n in range(400))
    assert cycles(Microbenchmark(body)) == pytest.approx(400, abs=20)


def test_two_warps_of_a_scheduler_hide_each_others_latency() -> None:
    alone = cycles(chain(FMA, 400, threads=32))
    # Warps 0 and 4 share a scheduler: together they need half of its issue slots.
    assert cycles(chain(FMA, 400, threads=256)) == pytest.approx(alone, rel=0.01)
    # Eight warps on each scheduler ask for twice the available slots.
    assert cycles(chain(FMA, 400, threads=1024)) == pytest.approx(2 * alone, rel=0.02)


def test_exponentials_are_limited_by_their_unit() -> None:
    # 4 warps on each scheduler, 16 lanes/clk/SM: 8 cycles for each of 4 x 200 warp instructions.
    timing = model(chain(EX2, 200, threads=512).run())
    assert timing.cycles == pytest.approx(4 * 200 * P.mufu_interval, rel=0.01)
    assert timing.busy["mufu"] * P.sms == pytest.approx(1.0, rel=0.01)


def test_warps_wait_at_a_barrier_for_the_last() -> None:
    timing = model(late_warp(500).run())
    first, *others = timing.warps
    meeting = P.barrier_latency + 4 * P.barrier_per_warp
    assert sum(first.waiting.values()) == pytest.approx(meeting)
    assert first.running == pytest.approx(500 * P.arithmetic_latency, abs=60)
    for warp in others:
        ((name, waited),) = warp.waiting.items()
        assert "barrier" in name
        assert waited == pytest.approx(499 * P.arithmetic_latency + meeting, abs=60)


def test_multiply_loop_reaches_the_tensor_peak() -> None:
    few, many = (model(multiply_loop("f16", 128, 256, n).run()) for n in (8, 72))
    flops = (many.flops - few.flops) / (many.cycles - few.cycles)
    assert flops == pytest.approx(8192, rel=0.001)
    peak = flops * P.sms * P.clock * 1e9
    assert peak == pytest.approx(2.25e15, rel=0.01)  # the datasheet's dense BF16


@pytest.mark.parametrize(
    ("kind", "m", "n", "from_tensor", "each"),
    [
        ("f16", 128, 64, False, 48),  # 4096 + 2048 bytes of operands at 128 a cycle
        ("f16", 128, 64, True, 32),  # A from tensor memory: arithmetic
        ("f16", 64, 64, False, 32),  # half of the rows in the same time
        ("f8f6f4", 128, 128, False, 64),
    ],
)
def test_multiplies_follow_each_other_as_measured(
    kind: str, m: int, n: int, from_tensor: bool, each: int
) -> None:
    few, many = (cycles(multiply_loop(kind, m, n, c, 1, from_tensor)) for c in (8, 40))
    assert (many - few) / 32 == pytest.approx(each)


def test_a_commit_is_waited_for() -> None:
    one, three = (model(multiply_loop("f16", 128, 256, 4, batches=n).run()) for n in (1, 3))
    alone = 3 * 128 + completion(MmaShape("f16", 128, 256, 16, 1, False), P) + P.wake_latency
    assert (three.cycles - one.cycles) / 2 == pytest.approx(alone, rel=0.15)
    (waited,) = (t for name, t in one.warps[0].waiting.items() if "mbarrier" in name)
    assert waited > 300


@pytest.mark.parametrize("row", MMAS, ids=str)
def test_one_multiply_is_within_an_eighth_of_measurements(row: MeasuredMma) -> None:
    shape = MmaShape(row.kind, row.m, row.n, row.k, row.ctas, row.from_tensor)
    assert interval(shape, P) == pytest.approx(row.interval, rel=0.125)
    until = completion(shape, P) + P.wake_latency
    assert until == pytest.approx(row.latency, rel=0.125)


def test_copies_reach_the_bandwidth_of_hbm() -> None:
    few, many = (model(copy_loop(32768, 4, n).run(), clusters=148, footprint=1e15) for n in (8, 24))
    per_sm = 16 * 32768 / (many.cycles - few.cycles)
    assert per_sm * 148 == pytest.approx(P.per_cycle(P.hbm_bandwidth), rel=0.01)
    assert many.busy["HBM"] > 0.8


def test_copies_that_hit_l2_reach_its_bandwidth() -> None:
    few, many = (model(copy_loop(32768, 4, n).run(), clusters=148, footprint=0) for n in (8, 24))
    per_sm = 16 * 32768 / (many.cycles - few.cycles)
    assert per_sm * 148 == pytest.approx(P.per_cycle(P.l2_bandwidth), rel=0.01)


def test_one_sm_alone_is_limited_by_its_copy_engine() -> None:
    few, many = (model(copy_loop(32768, 4, n).run(), clusters=1, footprint=0) for n in (8, 24))
    assert 16 * 32768 / (many.cycles - few.cycles) == pytest.approx(128, rel=0.01)


@pytest.mark.parametrize("row", [row for row in COPIES if row.stages != 1][::2], ids=str)
def test_copy_loops_are_within_a_quarter_of_measurements(row: MeasuredCopies) -> None:
    at = replace(P, clock=COPIES_CLOCK)
    few, many = (
        model(
            copy_loop(row.nbytes, row.stages, n).run(),
            at,
            clusters=148,
            footprint=1e15,
        )
        for n in (8, 24)
    )
    assert (many.cycles - few.cycles) / 16 == pytest.approx(row.cycles, rel=0.25)


def test_tensor_memory_is_read_by_four_warps_at_once() -> None:
    few, many = (model(tensor_reads(32, n).run()) for n in (4, 20))
    assert many.cycles - few.cycles == pytest.approx(16 * 32 * P.tensor_read_interval, rel=0.02)


def test_bulk_stores_are_waited_for() -> None:
    few, many = (model(store_loop(16384, n).run()) for n in (2, 10))
    each = 16384 / P.store_bandwidth + P.tma_store_latency
    assert (many.cycles - few.cycles) / 8 == pytest.approx(each, rel=0.05)
    assert any("copy group" in name for name in many.warps[0].waiting)


@pytest.mark.parametrize(("how", "extra"), [(".relaxed", 0), ("", P.device_fence_latency)])
def test_cluster_barriers_take_their_latency(how: str, extra: float) -> None:
    meet = f"barrier.cluster.arrive{how}.aligned;\nbarrier.cluster.wait.aligned;\n"
    few, many = (model(Microbenchmark(meet * n, ctas=2, cluster=2).run()) for n in (2, 12))
    each = P.cluster_barrier_latency + extra
    assert (many.cycles - few.cycles) / 10 == pytest.approx(each, abs=4)


def test_a_peers_mbarrier_is_farther_away() -> None:
    arrive = (
        "mov.u32 %r40, dynamic;\nmov.u32 %r1, %cluster_ctarank;\n"
        "mov.u32 %r2, %tid.x;\nsetp.ne.u32 %p1, %r2, 0;\n@%p1 bra READY;\n"
        "mbarrier.init.shared::cta.b64 [%r40], 1;\nfence.mbarrier_init.release.cluster;\nREADY:\n"
        "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
        "xor.b32 %r4, %r1, {other};\nmapa.shared::cluster.u32 %r3, %r40, %r4;\n@%p1 bra WAIT;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [%r3];\nWAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r40], 0;\n@!%p2 bra WAIT;"
    )
    own, peer = (
        cycles(Microbenchmark(arrive.format(other=n), ctas=2, cluster=2, shared=1024))
        for n in (0, 1)
    )
    # The wait for the own arrival may start after the arrival, and then has no wake-up latency.
    assert P.remote_latency <= peer - own <= P.remote_latency + P.wake_latency


# Four warps send two vectors per thread to each peer; cycles until all peers' have arrived, on an
# H100. An arrival is one per thread and peer; the fence comes once, after all stores.
EXCHANGES = {
    "st.async": (566, 967, 1776),
    "arrivals with release": (1139, 2742, 6148),
    "a fence, relaxed arrivals": (1141, 1990, 2900),
}
ARRIVE = "mbarrier.arrive.{how}.cluster.shared::cluster.b64 _, [%r6];\n"


def exchange(how: str, size: int) -> str:
    """PTX of the exchange; empty sends if ``how`` is "", so that barriers alone are timed."""
    arrivals, asynchronous = 128 * (size - 1), how == "st.async"
    setup = "expect_tx.shared::cta.b64 _, [dynamic], " + str(4096 * (size - 1))
    text = (
        "mov.u32 %r1, %cluster_ctarank;\nmov.u32 %r2, %tid.x;\nshl.b32 %r3, %r2, 4;\n"
        "mov.u32 %r40, dynamic;\nadd.u32 %r4, %r40, %r3;\nsetp.ne.u32 %p1, %r2, 0;\n"
        "@%p1 bra READY;\n"
        f"mbarrier.init.shared::cta.b64 [dynamic], {1 if asynchronous else arrivals};\n"
        "fence.mbarrier_init.release.cluster;\n"
        + (f"mbarrier.arrive.{setup};\n" if asynchronous else "")
        + "READY:\nbarrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
    )
    for distance in range(1, size) if how else ():
        text += f"add.u32 %r5, %r1, {distance};\nand.b32 %r5, %r5, {size - 1};\n"
        text += "mapa.shared::cluster.u32 %r6, %r40, %r5;\n"
        text += "mapa.shared::cluster.u32 %r7, %r4, %r5;\n"
        for vector in range(2):
            place = f"[%r7 + {1024 + 4096 * distance + 2048 * vector}]"
            values = "{%r2, %r2, %r2, %r2}"
            if asynchronous:
                text += (
                    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
                    f"{place}, {values}, [%r6];\n"
                )
            else:
                text += f"st.shared::cluster.v4.b32 {place}, {values};\n"
        text += ARRIVE.format(how="release") if how == "arrivals with release" else ""
    if how.startswith("a fence"):
        text += "fence.acq_rel.cluster;\n"
        for distance in range(1, size):
            text += f"add.u32 %r5, %r1, {distance};\nand.b32 %r5, %r5, {size - 1};\n"
            text += "mapa.shared::cluster.u32 %r6, %r40, %r5;\n" + ARRIVE.format(how="relaxed")
    if how:
        text += (
            "WAIT:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [dynamic], 0;\n"
            "@!%p2 bra WAIT;\n"
        )
    return text


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("how", EXCHANGES)
def test_sums_reach_peers_as_fast_as_on_an_h100(how: str, size: int) -> None:
    barriers, whole = (
        cycles(Microbenchmark(exchange(h, size), 128, size, 64 * 1024, cluster=size))
        for h in ("", how)
    )
    measured = EXCHANGES[how][size.bit_length() - 2]
    # Without st.async, the model lacks the higher price of a kernel's first fence.
    assert whole - barriers == pytest.approx(measured, rel=0.03 if how == "st.async" else 0.3)


@pytest.mark.parametrize(("prefetched", "extra"), [(False, P.map_fetch_latency), (True, 0)])
def test_the_first_box_waits_for_its_tensor_map(prefetched: bool, extra: float) -> None:
    spin = "mov.b32 %f1, 0f3F800000;\nmov.b32 %f2, 0f3F800000;\n" + f"{FMA}\n" * 100
    loop = copy_loop(1024, 1, 4)
    loop = replace(loop, body=spin + loop.body)
    plain, mapped = loop.run(), loop.run()
    assert mapped.traces is not None
    for cta in mapped.traces:
        for warp in cta.warps:
            for index, item in enumerate(warp):
                if isinstance(item, Event) and item.kind == "copy":
                    warp[index] = item._replace(key=("map", 7))
        if prefetched:
            cta.warps[0].insert(0, Event("map", 0, ("map", 7)))
    assert model(mapped).cycles - model(plain).cycles == pytest.approx(extra)


def test_a_fence_waits_for_the_stores_of_its_warp() -> None:
    """A fence takes longer after a store of its warp than without stores."""
    store = "ld.param.u64 %rd1, [data];\n" + "st.global.v4.b32 [%rd1], {%r1, %r1, %r1, %r1};\n"
    fence = "fence.acq_rel.gpu;\n"
    none, alone, after = (
        model(Microbenchmark(body).run()).cycles for body in (store, fence, store + fence)
    )
    assert after - none > alone
    assert after >= P.store_visible_latency + P.device_fence_latency


@pytest.mark.parametrize(
    ("n", "threads", "each"),
    [(128, 128, 64), (32, 128, H200_TIMING.warpgroup_least), (128, 256, 128)],
)
def test_warpgroups_share_the_tensor_core(n: int, threads: int, each: float) -> None:
    """Warpgroups of 64 rows take N/2 cycles, or a minimum for small N; two take twice as long."""
    few, many = (model(warpgroup_loop(n, c, threads).run(), H200_TIMING) for c in (8, 40))
    assert (many.cycles - few.cycles) / 32 == pytest.approx(each)
    assert many.flops - few.flops == 32 * 2 * 64 * n * 16 * threads // 128


def test_a_wait_leaves_the_last_groups_under_way() -> None:
    none, three = (model(warpgroup_loop(128, 16, pending=n).run(), H200_TIMING) for n in (0, 3))
    assert none.cycles - three.cycles == pytest.approx(3 * 64)
    assert any("wgmma" in name for name in none.warps[0].waiting)


def test_a_named_barrier_waits_for_its_own_warps_alone() -> None:
    """Warps 2 and 3 meet at barrier 1 long before warps 0 and 1 end."""
    late = "fma.rn.f32 %f1, %f1, %f2, %f2;\n" * 500
    benchmark = Microbenchmark(
        "mov.b32 %f1, 0f3F800000;\nmov.b32 %f2, 0f3F800000;\nmov.u32 %r1, %tid.x;\n"
        f"setp.ge.u32 %p1, %r1, 64;\n@%p1 bra MEET;\n{late}bra END;\nMEET:\nbar.sync 1, 64;\n"
        "END:\n",
        128,
    )
    timing = model(benchmark.run(), H200_TIMING)
    assert [warp.total > 2000 for warp in timing.warps] == [True, True, False, False]
    waited = sum(timing.warps[2].waiting.values())
    assert waited == pytest.approx(P.barrier_latency + 2 * P.barrier_per_warp, abs=4)


def test_waves_and_tail() -> None:
    launch = chain(FMA, 2000, threads=1024).run()  # two such CTAs fill an SM
    one = model(launch, clusters=1)
    full = model(launch, clusters=296)
    tail = model(launch, clusters=297)
    assert (one.waves, full.waves, tail.waves) == (1, 1, 2)
    # Two CTAs share an SM's issue slots; the 297th runs after them, alone on its SM.
    assert full.cycles == pytest.approx(2 * one.cycles, rel=0.02)
    assert tail.cycles == pytest.approx(full.cycles + P.cta_launch + one.cycles, rel=0.02)


def test_exact_and_representative_agree_on_equal_clusters() -> None:
    launch = chain(FMA, 300).run()
    grid = Microbenchmark(chain(FMA, 300).body, ctas=20).run()
    exact, extrapolated = model(grid, exact=True), model(grid, exact=False)
    assert exact.exact
    assert not extrapolated.exact
    assert exact.cycles == pytest.approx(extrapolated.cycles)
    assert exact.cycles == pytest.approx(model(launch).cycles, rel=0.05)


def test_every_cluster_gets_its_turn() -> None:
    grid = Microbenchmark(chain(FMA, 300).body, ctas=5).run()
    small = replace(P, sms=2, ctas_per_sm=1)
    one = model(grid, replace(P, sms=5)).cycles
    found = [model(grid, small, exact=exact) for exact in (True, False)]
    for timing in found:
        assert timing.cycles == pytest.approx(3 * one + 2 * P.cta_launch)
        assert timing.waves == 3
    assert found[0].busy["fma"] == pytest.approx(found[1].busy["fma"])


def test_list_schedule_fills_the_first_free_slot() -> None:
    assert list_schedule([5, 1, 1, 1], slots=2, between=0) == 5
    assert list_schedule([1, 1, 1, 5], slots=2, between=0) == 6
    assert list_schedule([2, 2, 2], slots=1, between=10) == 26


SLOWER = [
    ("arithmetic_latency", chain(FMA, 100)),
    ("mufu_interval", chain(EX2, 60, threads=512)),
    ("mma_latency", multiply_loop("f16", 128, 128, 2, batches=2)),
    ("wake_latency", multiply_loop("f16", 128, 128, 2, batches=2)),
    ("l2_latency", copy_loop(4096, 1, 4)),
    ("hbm_latency", copy_loop(4096, 1, 4)),
    ("tma_row_interval", copy_loop(32768, 1, 4)),
    ("barrier_latency", late_warp(10)),
]


@pytest.mark.parametrize(("name", "benchmark"), SLOWER, ids=[name for name, _ in SLOWER])
def test_a_slower_unit_makes_no_kernel_faster(name: str, benchmark: Microbenchmark) -> None:
    launch = benchmark.run()
    times = [
        model(launch, replace(P, **{name: factor * getattr(P, name)}), footprint=1e15).cycles
        for factor in (1, 2, 4)
    ]
    assert times[0] < times[1] < times[2]


@pytest.mark.parametrize("name", ["hbm_bandwidth", "l2_bandwidth", "shared_bandwidth", "clock"])
def test_more_bandwidth_makes_no_kernel_slower(name: str) -> None:
    for benchmark in (copy_loop(16384, 2, 6), multiply_loop("f16", 128, 64, 12)):
        launch = benchmark.run()
        times = [
            model(
                launch,
                replace(P, **{name: factor * getattr(P, name)}),
                clusters=148,
                footprint=1e15,
            ).microseconds
            for factor in (1, 2, 4)
        ]
        assert times[0] >= times[1] >= times[2]


def test_an_untraced_launch_is_refused() -> None:
    gpu = Gpu()
    module = gpu.load(
        ".version 8.7\n.target sm_100a\n.address_size 64\n.visible .entry k()\n{\nret;\n}\n"
    )
    launch = gpu.launch(module, "k", (1, 1, 1), (32, 1, 1))
    with pytest.raises(TimingError, match="run it with traced=True"):
        model(launch)


def test_a_replay_that_cannot_end_says_who_waits() -> None:
    launch = multiply_loop("f16", 128, 128, 1).run()
    assert launch.traces is not None
    trace = launch.traces[0].warps[0]
    trace[:] = [e for e in trace if isinstance(e, int) or e.kind != "commit"]
    waits = next(e for e in trace if not isinstance(e, int) and e.kind == "wait")
    trace.append(waits._replace(kind="arrive", amount=1))
    with pytest.raises(TimingError, match=r"deadlock\n.*warp 0 waits at PTX line \d+ for phase 0"):
        model(launch)


def test_every_parameter_says_where_it_comes_from() -> None:
    rows = P.rows()
    assert len(rows) > 40
    assert all(row.source and row.unit for row in rows)
    assert H200_TIMING.rows() != rows
    assert all(row.source and row.unit for row in H200_TIMING.rows())
    assert {row.name for row in rows if not row.assumed} >= {"sms", "mma_columns", "hbm_bandwidth"}
