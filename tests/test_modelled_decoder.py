"""Modelled decoder layers: lists of launches, timelines, and bars."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.emulator.timing import B200_TIMING, Link, OpaqueLink, chain
from tests.emulator.timing.microbenchmarks import copy_loop
from tests.modelled import layer_timeline, prices
from tests.modelled.launches import TODAY, VARIANTS, Kind, Switches, launches, vllm_launches
from tests.modelled.paged import walk
from tests.test_modelled_terms import modelled

RECORDED = Path(__file__).parents[1] / "examples" / "results"
SPLIT = Kind(split=True)
KINDS = [
    Kind(), SPLIT, Kind(ranks=4), Kind(ranks=4, fused_all_reduce=False),
    Kind(experts=True, qk_norm=True),
]  # fmt: skip


def names(switches: Switches, kind: Kind = Kind()) -> list[str]:  # noqa: B008 — frozen
    return [step.name for step in launches(switches, kind)]


def test_what_the_plugin_launches_today() -> None:
    """The list of launches; ``test_fused_engine`` compares it with an engine."""
    today = [
        "add_rms_norm_quantize", "qkv_proj",
        "rotary_attention", "o_proj",
        "add_rms_norm_quantize", "gate_up_proj", "down_proj",
    ]  # fmt: skip
    assert names(TODAY) == names(TODAY, SPLIT) == today
    assert len(names(VARIANTS["unfused"])) == 13
    assert len(vllm_launches()) == 13


def test_what_it_launches_over_several_gpus() -> None:
    """Both lists of launches; ``test_reduction_engine`` compares them with engines of two ranks."""
    norms = {"add_rms_norm_quantize": "all_reduce_add_rms_norm_quantize"}
    assert names(TODAY, Kind(ranks=4)) == [norms.get(name, name) for name in names(TODAY)]
    apart = names(TODAY, Kind(ranks=4, fused_all_reduce=False))
    assert Counter(apart) == Counter(names(TODAY)) + Counter({"all_reduce": 2})
    assert [apart.index("all_reduce"), apart.index("add_rms_norm_quantize")] == [0, 1]
    assert len(vllm_launches(Kind(ranks=4))) == 11


@pytest.mark.parametrize(
    ("variant", "between", "merges"),
    [
        ("norm+mlp", ["rotary_embedding", "store", "paged_attention", "quantize"], 1),
        ("norm+mlp+quantize", ["rotary_embedding", "store", "paged_attention"], 1),
        ("vllm_rotation", ["rotary_embedding", "store", "paged_attention"], 0),
        ("rotary_store", ["rotary_store", "paged_attention"], 0),
        ("today", ["rotary_attention"], 0),
    ],
)
def test_what_variants_launch(variant: str, between: list[str], merges: int) -> None:
    others = {"add_rms_norm_quantize": 2, "qkv_proj": 1, "o_proj": 1}
    others |= {"gate_up_proj": 1, "down_proj": 1}
    expected = Counter(others) + Counter(between)
    assert Counter(names(VARIANTS[variant])) == expected
    merge = Counter({"merge_segments": merges})
    assert Counter(names(VARIANTS[variant], SPLIT)) == expected + merge


def test_prompts_are_stored_before_attention_reads_them() -> None:
    prompts = Kind(decode=False)
    assert names(TODAY, prompts) == names(VARIANTS["rotary_store"], prompts)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_reads_what_one_before_it_has_written(variant: str, kind: Kind) -> None:
    written = {"x"}
    for step in launches(VARIANTS[variant], kind):
        assert step.reads in written, step
        written.add(step.writes)
    assert "x" in written


def test_every_priced_step_has_a_price() -> None:
    sizes = prices.Sizes(1, 4096, 14336, 32, 8, 128, 1024)
    steps = [step for kind in KINDS for step in vllm_launches(kind)]
    steps += [step for kind in KINDS for v in VARIANTS.values() for step in launches(v, kind)]
    assert all(prices.body(s, sizes, 4096) > 0 for s in steps if s.source != "traced")


# Timelines


def checked(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Launch slices of a trace, after a check that the trace is well-formed."""
    events = trace["traceEvents"]
    tracks = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    begun: Counter[Any] = Counter()
    for event in events:
        assert event["pid"] in processes
        match event["ph"]:
            case "X":
                assert event["ts"] >= 0, event
                assert event["dur"] >= 0, event
                assert event["pid"] == layer_timeline.LAUNCHES or (
                    (event["pid"], event["tid"]) in tracks
                )
            case "b" | "e":
                key = event["pid"], event["tid"], event["cat"], event["name"], event["id"]
                begun[key] += 1 if event["ph"] == "b" else -1
            case other:
                assert other == "M"
    assert not any(begun.values())
    return [
        e for e in events
        if e["ph"] == "X" and e["pid"] == layer_timeline.LAUNCHES and e["args"]
    ]  # fmt: skip


def test_a_timeline_is_well_formed(tmp_path: Path) -> None:
    copy = Link(copy_loop(8192, 2, 6).run(), clusters=8, label="copy")
    timing = chain([copy, copy, OpaqueLink("pause", 3.0), copy])
    said = [{"label": name} for name in ("copy", "pause", "copy")]
    path = tmp_path / "layer.json"
    layer_timeline.write(timing, said, B200_TIMING.clock, path)
    shown = checked(json.loads(path.read_text()))
    assert [each["name"] for each in shown] == ["copy", "pause", "copy"]
    assert shown[1]["dur"] == 3.0
    period = timing.links[-1].ended - timing.links[0].ended
    assert shown[-1]["ts"] + shown[-1]["dur"] == pytest.approx(period, abs=0.01)


def test_the_recorded_timeline() -> None:
    path = RECORDED / "llama_8b_layer_1_token.json"
    assert path.stat().st_size < 400_000
    shown = checked(json.loads(path.read_text()))
    assert [each["name"] for each in shown] == names(TODAY, SPLIT)


# Work tiles of attention

PLACES = 148


@pytest.mark.parametrize("parts", [1, 2, 5, 16])
@pytest.mark.parametrize("heads", [8, 148, 160, 296, 512, 600, 2048])
def test_traced_ctas_walk_as_far_as_those_of_the_grid(heads: int, parts: int) -> None:
    """Traced CTAs process as many tiles as the grid's CTAs, of which the first have the most."""
    found = walk(heads, parts, PLACES, 1)
    works = heads * parts
    assert len(found.repeats) == found.clusters == min(works, PLACES)
    traced = found.sequences * parts
    ctas = found.ctas or traced
    lengths = [len(range(cta, traced, ctas)) for cta in range(ctas)]
    walked = [lengths[cta] for cta in found.repeats]
    assert walked == sorted(walked, reverse=True)
    assert sum(walked) == pytest.approx(works, rel=0.12)


# Bars


@pytest.mark.slow
def test_decode_of_one_token() -> None:
    """A layer of Llama 8B takes at most 30 µs; reading weights and keys alone takes 17.5 µs."""
    output = modelled("decoder_layer", "--tokens", "1", "--variant", "today")
    [us] = re.findall(r"([\d.]+) µs", output)
    assert float(us) <= 30.0
