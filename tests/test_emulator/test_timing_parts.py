"""Parts of the timing model: segments, issue, barriers, timelines and reports."""

import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.emulator.instructions.registry import FAMILIES
from tests.emulator.machine.trace import CtaTrace, Event, WarpTrace
from tests.emulator.ptx.flow import analyse
from tests.emulator.ptx.parser import parse
from tests.emulator.ptx.syntax import Immediate, Instruction
from tests.emulator.timing import B200_TIMING, TimingError, extrapolate, model, speed_of_light
from tests.emulator.timing.barriers import Columns, MBarrier, Meeting, expected_arrivals
from tests.emulator.timing.calibrate import verdict
from tests.emulator.timing.costs import Costs
from tests.emulator.timing.engine import Engine, Server
from tests.emulator.timing.issue import Scheduler
from tests.emulator.timing.microbenchmarks import (
    Microbenchmark,
    copy_loop,
    late_warp,
    multiply_loop,
)
from tests.emulator.timing.perfetto import trace_events, write
from tests.emulator.timing.report import parameter_table, report
from tests.emulator.timing.segments import Segment, segments_of
from tests.emulator.timing.timeline import Timeline

P = B200_TIMING


def segments(body: str) -> list[Segment]:
    text = (
        ".version 8.7\n.target sm_100a\n.address_size 64\n.visible .entry k()\n{\n"
        ".reg .f32 %f<32>;\n.reg .b32 %r<32>;\n.reg .b64 %rd<32>;\n.reg .pred %p<4>;\n"
        f"{body}\nret;\n}}\n"
    )
    kernel = parse(text).kernels["k"]
    return [part for block in segments_of(analyse(kernel), Costs(P)) for part in block]


def test_a_chain_is_scheduled_around_independent_work() -> None:
    chain = "ex2.approx.ftz.f32 %f1, %f2;\nadd.f32 %f3, %f1, %f1;\n"
    filler = "".join(f"fma.rn.f32 %f{n}, %f9, %f9, %f9;\n" for n in range(10, 20))
    (only,) = segments(filler + chain)
    # ex2 goes first, the ten FMAs under its latency, then the dependent add, then ret.
    assert only.length == P.mufu_latency + 2
    assert only.slots == {"issue": 13, "fma": 11, "mufu": P.mufu_interval}


def test_logic_with_one_reader_is_part_of_it() -> None:
    """Logic with one reader is fused, as LOP3: three operands, at most one of them a constant."""

    def pipe(body: str) -> float:
        return segments(body)[0].slots.get("alu", 0.0) / P.integer_interval

    masked = "and.b32 %r1, %r2, {a};\nand.b32 %r3, %r4, {b};\nor.b32 %r5, %r1, %r3;\n"
    assert pipe(masked.format(a="%r6", b="%r6")) == 1
    assert pipe(masked.format(a="255", b="%r4")) == 1
    assert pipe(masked.format(a="255", b="256")) == 2  # LOP3 takes one constant
    assert pipe(masked.format(a="%r6", b="%r7")) == 2
    again = "add.s32 %r8, %r1, %r3;\n"
    assert pipe(masked.format(a="%r6", b="%r6") + again) == 4  # both results have a second reader


def test_left_shifts_go_to_the_multiplier() -> None:
    (only,) = segments("shl.b32 %r1, %r2, 3;\nshr.u32 %r3, %r2, 3;")
    assert only.slots["fma"] == P.multiply_interval
    assert only.slots["alu"] == P.integer_interval


def test_a_segment_ends_where_a_loaded_value_is_used() -> None:
    load = "ld.global.b32 %r1, [%rd1];\n"
    first, second, third = segments(load + "add.s32 %r2, %r3, %r3;\nadd.s32 %r4, %r1, 1;")
    assert first.loads == ("%r1",)
    assert (first.slots["issue"], second.slots["issue"]) == (1, 1)
    assert (second.waits, third.waits) == ((), ("%r1",))


def test_moves_and_widening_are_free() -> None:
    (only,) = segments("mov.b32 %r1, %r2;\ncvt.u64.u32 %rd1, %r1;\nmov.u32 %r3, 7;")
    assert only.slots == {"issue": 1}  # the ret


def test_warps_share_an_issue_slot_equally() -> None:
    engine = Engine()
    scheduler = Scheduler(engine)
    ends: list[float] = []
    busy = Segment(0, length=100, slots={"issue": 100})
    idle = Segment(0, length=100, slots={"issue": 10})
    for part in (busy, busy, idle):
        scheduler.start(part, lambda: ends.append(engine.now))
    engine.run()
    # The idle warp gets the tenth it wants; until it ends, each busy warp gets half of the rest.
    assert ends[0] == pytest.approx(100)
    assert ends[1] == ends[2] == pytest.approx(210)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(1, 50), st.floats(0, 1), st.floats(0, 1), st.floats(0, 60)),
        min_size=1,
        max_size=6,
    )
)
def test_no_pipe_does_more_than_it_can(warps: list[tuple[float, float, float, float]]) -> None:
    engine = Engine()
    scheduler = Scheduler(engine)
    ended: list[float] = []
    for length, fma, alu, start in warps:
        part = Segment(0, length=length, slots={"fma": fma * length, "alu": alu * length})
        engine.at(
            start,
            lambda part=part: scheduler.start(part, lambda: ended.append(engine.now)),  # type: ignore[misc]
        )
    engine.run()
    assert len(ended) == len(warps)
    span = engine.now - min(start for *_, start in warps)
    assert max(scheduler.used.values()) <= span + 1e-3
    assert engine.now >= max(length + start for length, _, _, start in warps) - 1e-3


def test_a_server_does_one_thing_after_the_other() -> None:
    server = Server(rate=2)
    assert server.serve(10, 8) == (10, 14)
    assert server.serve(11, 2) == (14, 15)
    assert server.serve(20, 2) == (20, 21)
    assert (server.busy, server.work) == (6, 12)


def test_an_mbarrier_needs_arrivals_and_bytes() -> None:
    barrier = MBarrier(2)
    woken: list[int] = []
    assert not barrier.wait(0, lambda: woken.append(0))
    assert not barrier.wait(1, lambda: woken.append(1))
    barrier.transact(64)
    barrier.arrive(1)
    barrier.arrive(1)
    assert not woken
    barrier.transact(-64)
    assert woken == [0]
    barrier.arrive(2)
    assert woken == [0, 1]
    assert barrier.wait(1, lambda: None)


def test_a_meeting_wakes_all_at_its_last_arrival() -> None:
    meeting = Meeting(2)
    woken: list[int] = []
    meeting.arrive()
    assert not meeting.wait(lambda: woken.append(1))
    meeting.arrive()
    assert woken == [1]
    assert meeting.wait(lambda: None)


def test_arrival_counts_are_those_of_init() -> None:
    first: WarpTrace = [Event("init", 1, ("b", 2), 7), 0, Event("arrive", 9, ("b", 2), 1)]
    second: WarpTrace = [Event("init", 1, ("b", 3), 1)]
    ctas = [CtaTrace((0, 0, 0), 0, 0, [first, second])]
    assert expected_arrivals(ctas) == {("b", 2): 7, ("b", 3): 1}


def test_dropped_and_additional_arrivals_change_what_phases_need() -> None:
    barrier = MBarrier(3)
    barrier.drop(1)  # drop: an arrival, and one fewer expected from then on
    barrier.arrive(2)
    assert (barrier.phase, barrier.pending) == (1, 2)
    barrier.expect_more(1)
    barrier.arrive(2)
    assert barrier.phase == 1
    barrier.arrive(1)
    assert (barrier.phase, barrier.pending) == (2, 2)


def test_allocations_are_served_in_order() -> None:
    columns = Columns(512)
    woken: list[str] = []
    assert columns.take(512, lambda: woken.append("never"))
    assert not columns.take(256, lambda: woken.append("first"))
    assert not columns.take(512, lambda: woken.append("second"))
    assert not columns.take(128, lambda: woken.append("third"))
    columns.give(512)
    assert woken == ["first"]  # the second does not fit, the third is behind it
    columns.give(256)
    assert woken == ["first", "second"]


def instruction(opcode: str, operands: tuple[Immediate, ...] = ()) -> Instruction:
    return Instruction(opcode, tuple(opcode.split(".")), operands, None, False, 1)


def test_every_instruction_family_has_a_price() -> None:
    costs = Costs(P)
    for name in sorted(FAMILIES.keys() - {"mma"}):
        tail = {"cvt": ".f32.s32", "fence": ".acq_rel.gpu", "ld": ".global.b32"}.get(name, ".f32")
        operands = (Immediate(8),) if name == "nanosleep" else ()
        costs.of(instruction(f"{name}{tail}", operands))
    budget = costs.of(instruction("setmaxnreg.inc.sync.aligned.u32", (Immediate(240),)))
    assert budget.stall == P.register_change_latency
    multiply = instruction("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")
    assert costs.of(multiply).cycles == pytest.approx(16 * 8 * 16 / P.warp_multiply_rate)
    with pytest.raises(TimingError, match=r"wmma\.load.*: has no price"):
        costs.of(instruction("wmma.load.a.sync.aligned"))


@pytest.mark.parametrize("name", ["abs", "neg"])
def test_signs_of_float32_cost_nothing(name: str) -> None:
    """Compilers fold |x| and −x of float32 into the consuming instruction's operand."""
    costs = Costs(P)
    assert costs.of(instruction(f"{name}.f32")).issue == 0
    assert costs.of(instruction(f"{name}.s32")).issue == 1
    assert costs.of(instruction("add.f32")).issue == 1


def test_slices_that_continue_one_another_join() -> None:
    timeline = Timeline("SM 0")
    timeline.add("warp", "a", 0, 5)
    timeline.add("other", "x", 1, 2)
    timeline.add("warp", "a", 5, 9)
    timeline.add("warp", "b", 9, 9)
    timeline.add("warp", "a", 10, 11)
    found = [(s.track, s.name, s.start, s.end) for s in timeline.slices]
    assert found == [("warp", "a", 0, 9), ("other", "x", 1, 2), ("warp", "a", 10, 11)]


def check_schema(document: dict[str, object]) -> None:
    """Check Chrome's trace event format, as far as viewers require it."""
    events = document["traceEvents"]
    assert isinstance(events, list)
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    begun: dict[tuple[object, object], float] = {}
    ends: dict[tuple[int, int], float] = {}
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        phase = event["ph"]
        if phase == "M":
            assert isinstance(event["args"], dict)
            continue
        track = (event["pid"], event["tid"])
        assert track in named
        assert event["ts"] >= 0
        if phase == "X":
            assert event["dur"] > 0
            # Slices of a track nest or follow each other; these follow.
            assert event["ts"] >= ends.get(track, 0.0) - 1e-9
            ends[track] = event["ts"] + event["dur"]
        elif phase == "b":
            begun[event["cat"], event["id"]] = event["ts"]
        else:
            assert phase == "e"
            assert begun.pop((event["cat"], event["id"])) <= event["ts"]
    assert not begun


@pytest.mark.parametrize(
    "benchmark", [copy_loop(4096, 3, 8), multiply_loop("f16", 128, 64, 8, 2), late_warp(20)]
)
def test_timelines_are_valid_trace_events(benchmark: Microbenchmark, tmp_path: Path) -> None:
    timing = model(benchmark.run())
    path = tmp_path / "timeline.json"
    write(timing, path)
    document = json.loads(path.read_text())
    check_schema(document)
    titles = {e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert any("warp 0" in title for title in titles)


def test_a_timeline_shows_copies_under_way_together() -> None:
    document = trace_events(model(copy_loop(4096, 3, 8).run()))
    starts = sorted(e["ts"] for e in document["traceEvents"] if e["ph"] == "b")
    first_end = min(e["ts"] for e in document["traceEvents"] if e["ph"] == "e")
    assert starts[2] < first_end


def test_a_schema_violation_is_seen() -> None:
    document = trace_events(model(late_warp(20).run()))
    broken = next(e for e in document["traceEvents"] if e["ph"] == "X")
    broken["dur"] = -1
    with pytest.raises(AssertionError):
        check_schema(document)


def test_the_report_names_time_units_and_waits() -> None:
    text = io.StringIO()
    console = Console(width=160, file=text)
    least = speed_of_light(1e6, 1e6, kind="f16")
    console.print(report(model(multiply_loop("f16", 128, 256, 16).run()), least))
    console.print(parameter_table(P))
    for part in ("µs", "TFLOP/s", "tensor core", "mbarrier", "speed of light", "hbm_bandwidth"):
        assert part in text.getvalue()


def test_a_longer_run_follows_from_two_shorter_ones() -> None:
    few, many, most = (model(copy_loop(16384, 4, n).run(), clusters=148) for n in (16, 32, 96))
    found = extrapolate(few, many, (16, 32, 96))
    assert found.cycles == pytest.approx(most.cycles, rel=0.05)
    assert found.busy["TMA"] == pytest.approx(most.busy["TMA"], rel=0.05)
    assert found.read_bytes == pytest.approx(most.read_bytes)
    with pytest.raises(ValueError, match=r"steps: \(32, 16, 96\), accepted numbers from 1"):
        extrapolate(many, few, (32, 16, 96))
    with pytest.raises(ValueError, match=r"many: 1 clusters, accepted 148 as in few"):
        extrapolate(few, model(copy_loop(16384, 4, 32).run()), (16, 32, 96))


def test_speed_of_light_is_arithmetic_or_bytes() -> None:
    assert speed_of_light(2 * 8192**3, 1e6, kind="f16").microseconds == pytest.approx(490, rel=0.01)
    least = speed_of_light(1e6, 7.26e6, 7.26e6 / P.hbm_write_cost)
    assert least.limit == "HBM"
    assert least.microseconds == pytest.approx(2.0)
    with pytest.raises(ValueError, match="kind: 'fp4', accepted f16, tf32"):
        speed_of_light(1, 1, kind="fp4")


def test_a_verdict_says_so_when_the_model_is_far_off() -> None:
    assert verdict(110, 100) == "+10%"
    assert verdict(45, 100) == "-55% OFF BY MORE THAN 2x"
    assert "OFF BY" in verdict(200, 100)
