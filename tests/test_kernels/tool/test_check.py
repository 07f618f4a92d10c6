"""``python -m nvfp4_kernels check``: every task is reported, whatever a kernel does."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from nvfp4_kernels.__main__ import app
from nvfp4_kernels.activation import SILU, Activation
from nvfp4_kernels.gemm.sm100.tile import Tile
from nvfp4_kernels.tool import (
    attention_case,
    check,
    cuda_machine,
    forced_product_case,
    fused_attention_case,
    indexer_case,
    rotary_store_case,
    sparse_attention_case,
    tensor_map_case,
    timed,
)
from nvfp4_kernels.tool import task as task_module
from nvfp4_kernels.tool.attention_case import AttentionCase
from nvfp4_kernels.tool.check import Device, WrongDevice, correctness, markdown, run_all, timings
from nvfp4_kernels.tool.doubts import DEPTHS, LAUNCHES, doubts
from nvfp4_kernels.tool.forced_product_case import BATCH, ForcedProductCase
from nvfp4_kernels.tool.forced_scores_case import ForcedScoresCase
from nvfp4_kernels.tool.fused_attention_case import FusedAttentionCase
from nvfp4_kernels.tool.grouped_case import GroupedCase, grouped_cases
from nvfp4_kernels.tool.indexer_case import IndexerCase
from nvfp4_kernels.tool.product_case import ProductCase, compare_bound, compare_exact
from nvfp4_kernels.tool.quantize_case import FORMS, QuantizeCase
from nvfp4_kernels.tool.rotary_store_case import RotaryStoreCase, TimedRotaryStore
from nvfp4_kernels.tool.routed_case import OPS as ROUTED_OPS
from nvfp4_kernels.tool.routed_case import RoutedCase
from nvfp4_kernels.tool.scoring import ScoreShape
from nvfp4_kernels.tool.shapes import CONTEST, given_shape
from nvfp4_kernels.tool.single_dimension_case import SingleDimensionCase
from nvfp4_kernels.tool.sparse_attention_case import SparseAttentionCase
from nvfp4_kernels.tool.task import Figures, Isolated, Machine, Mismatch, Outcome, Task, run_task
from nvfp4_kernels.tool.tensor_map_case import SmallMapsCase
from nvfp4_kernels.tool.timed import TimedProduct, TimedQuantize, cold_sets
from nvfp4_kernels.tool.timed_attention import TimedAttention
from nvfp4_kernels.tool.timed_scoring import TimedScoring

FP16 = torch.float16
DEVICE = Device("B200", "sm_100", 148, 192.0, "CUDA 13.0", "13.0", "2.11", "4.8.0", "Linux x86_64")


class StandIn:
    """A machine on the CPU, where every call takes a microsecond."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.calls: list[int] = []

    def l2_bytes(self) -> int:
        return 1 << 20

    def sms(self) -> int:
        return 148

    def seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        self.calls.append(len(calls))
        calls[0]()
        return 1e-6


# --- correctness, on the emulator -------------------------------------------------------------

LENGTHS = ((1, 150), (3, 20))
SWIGLU_OAI = Activation("swigluoai_uninterleave", 1.5, 1.702, 1.0)
PAIR = Tile(64, two_cta=True, cluster_m=2)
CASES: list[Task] = [
    *(
        case
        for exact in (True, False)
        for case in (
            ProductCase("gemv", 5, 64, 128, exact=exact),
            ProductCase("gemv", 3, 64, 128, batch=2, exact=exact),
            ProductCase(
                "gemm",
                40,
                72,
                128,
                exact=exact,
                shards=3,
                row_scale=True,
                bias=True,
                out_dtype=FP16,
            ),
            ProductCase("silu_mul_gemm", 9, 64, 128, exact=exact, row_scale=True),
        )
    ),
    ProductCase("silu_mul_gemm", 9, 64, 128, quantized=True),
    *(QuantizeCase(*form, 5, 64) for form in FORMS),
    *(RoutedCase(op, 7, 4, 6, 8) for op in ROUTED_OPS),
    RoutedCase("moe_route_quantize", 9, 4, 6, 32, terms=3, weighted=True),
    GroupedCase(8, 80, 544, SILU, gated=True, bias=True, tile=Tile(8, swap_ab=True, split_k=2)),
    GroupedCase(64, 80, 96, tile=Tile(64, swap_ab=True, two_cta=True, cluster_m=2)),
    GroupedCase(8, 48, 64, SWIGLU_OAI, gated=True, exact=False, bias=True),
    GroupedCase(8, 48, 64, Activation("relu2"), exact=False, quantized=True, row_scale=True),
    RotaryStoreCase(9, 3, 1, 48, 32, neox=False, norms=True, fp8=True),
    AttentionCase(LENGTHS, head_dim=16, sinks=True),
    AttentionCase(LENGTHS, head_dim=64, fp8=True),
    FusedAttentionCase(AttentionCase(LENGTHS, head_dim=64, fp8=True)),
    FusedAttentionCase(AttentionCase(((1, 600), (2, 20)), head_dim=32), rotated=True),
    IndexerCase("nvfp4", (70, 3), 2, heads=8, head_dim=64),
    IndexerCase("fp8", (70, 3), 2, heads=8, head_dim=64, page_size=0),
    SparseAttentionCase(LENGTHS, head_dim=16),
    *(
        ForcedProductCase("sets", (Tile(64, scale_sets=sets),), 40, 72, 1024, launches=2)
        for sets in (1, 2)
    ),
    *(
        ForcedProductCase(
            "terms",
            (Tile(m, swap_ab=True, collects=collects),),
            m,
            72,
            1024,
            launches=2,
            terms=terms,
        )
        for m, terms, collects in ((8, 2, True), (32, 3, True), (8, 3, False))
    ),
    *(
        ForcedProductCase("split", (Tile(8, swap_ab=True, split_k=parts),), 8, 72, 2048, launches=2)
        for parts in (2, 8)
    ),
    ForcedProductCase("columns", (Tile(32, swap_ab=True),), 96, 136, 512, launches=2),
    FusedAttentionCase(AttentionCase(((1, 40), (1, 3)), head_dim=32), rotated=True, launches=3),
    ForcedProductCase("staggered", (PAIR, Tile(64)), 300, 72, 256, launches=3),
    SmallMapsCase(),
    *(SingleDimensionCase(op) for op in ("attention", "sparse attention", "indexer")),
    *(
        ForcedScoresCase("nvfp4", (700, 1), heads=8, head_dim=64, max_stages=n, scale_sets=sets)
        for n, sets in ((3, 1), (5, 1), (3, 2))
    ),
]


@pytest.mark.arch("sm_100")
@pytest.mark.schedules("random 1")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_pass(case: Task, op_device: torch.device) -> None:
    assert case.run(StandIn(op_device))["values"]


def wrong(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap ``op`` so that one value is far off."""

    def run(*arguments: object, **options: object) -> torch.Tensor:
        out = op(*arguments, **options)
        out[..., -1, -1] += 1 + out[..., -1, -1].abs() / 4
        return out

    return run


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "random"])
@pytest.mark.parametrize("op", ["gemm", "silu_mul_gemm"])
def test_one_wrong_value_is_found(op: str, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "nvfp4_kernels.tool.product_case"
    case = ProductCase(op, 9, 64, 128, exact=exact)  # type: ignore[arg-type]
    assert case.run(StandIn())
    from nvfp4_kernels.tool import product_case

    monkeypatch.setattr(f"{module}.{op}", wrong(getattr(product_case, op)))
    with pytest.raises(Mismatch, match=r"1 of 576 values are wrong, the first at \(8, 63\)"):
        case.run(StandIn())


@pytest.mark.parametrize("sparse", [False, True], ids=["", "sparse"])
@pytest.mark.parametrize("output", [0, 1], ids=["out", "lse"])
def test_one_wrong_row_of_attention_is_found(
    output: int, sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = SparseAttentionCase if sparse else AttentionCase
    module = sparse_attention_case if sparse else attention_case
    name = "sparse_attention" if sparse else "paged_attention"
    case = kind(LENGTHS, head_dim=16)
    assert case.run(StandIn())["off"] == 0
    right = getattr(module, name)

    def wrong(**given: Any) -> tuple[torch.Tensor, ...]:
        found = right(**given)
        found[output][-1, -1] += 1
        return found

    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(Mismatch, match=("out", "lse")[output] + ": off by"):
        case.run(StandIn())


@pytest.mark.parametrize("where", ["result", "cache"])
def test_one_wrong_value_that_is_rotated_or_stored_is_found(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = RotaryStoreCase(3, 2, 1, 16, 16)
    assert case.run(StandIn())["values"] == 3 * 2 * 16 + 2 * 16 * 32
    right = rotary_store_case.rotary_store

    def wrong(**given: Any) -> torch.Tensor:
        out = right(**given)
        (out if where == "result" else given["kv_cache"])[-1, -1, -1] += 1
        return out

    monkeypatch.setattr(rotary_store_case, "rotary_store", wrong)
    with pytest.raises(Mismatch, match=r"values are wrong, the first at"):
        case.run(StandIn())


@pytest.mark.parametrize("where", ["codes", "scales", "lse", "cache", "counters"])
def test_one_wrong_value_of_fused_attention_is_found(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = FusedAttentionCase(AttentionCase(LENGTHS, head_dim=32), rotated=True)
    assert case.run(StandIn())["values"]
    right = fused_attention_case.rotary_attention

    def wrong(**given: Any) -> tuple[torch.Tensor, ...]:
        found = right(**given)
        of = dict(zip(("codes", "scales", "lse"), found, strict=True))
        of |= {"cache": given["kv_cache"], "counters": given["counters"]}
        of[where].view(torch.uint8).flatten()[0] ^= 1
        return found

    monkeypatch.setattr(fused_attention_case, "rotary_attention", wrong)
    with pytest.raises(Mismatch, match=r"values are wrong|counters: are not zeros"):
        case.run(StandIn())


@pytest.mark.parametrize("value", [0.0, float("-inf")])
def test_one_wrong_score_is_found(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    case = IndexerCase("bf16", (9, 20), heads=4, head_dim=64)
    assert case.run(StandIn())["off"] == 0
    right = indexer_case.indexer_logits

    def wrong(**given: Any) -> torch.Tensor:
        found = right(**given)
        found[-1, -1] = value
        return found

    monkeypatch.setattr(indexer_case, "indexer_logits", wrong)
    with pytest.raises(Mismatch, match=r"logits: (off by|not finite)"):
        case.run(StandIn())


@pytest.mark.parametrize("op", ROUTED_OPS)
def test_one_wrong_row_of_experts_is_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import nvfp4_kernels

    case = RoutedCase(op, 7, 4, 6, 8)
    assert case.run(StandIn())["tiles"]
    right = getattr(nvfp4_kernels, case.function)

    def wrong(*arguments: Any) -> Any:
        found = right(*arguments)
        last = found
        if not isinstance(found, torch.Tensor):
            last = found.data if case.function == "moe_dispatch" else found[-1]
        last.view(torch.uint8)[0] ^= 1  # the first tile, or token
        return found

    monkeypatch.setattr(nvfp4_kernels, case.function, wrong)
    with pytest.raises(Mismatch, match="values are wrong"):
        case.run(StandIn())


@pytest.mark.parametrize("quantized", [False, True], ids=["", "quantized"])
@pytest.mark.parametrize("gated", [False, True], ids=["one", "gated"])
def test_one_wrong_value_of_experts_is_found(
    gated: bool, quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nvfp4_kernels

    activation = SILU if gated else None
    case = GroupedCase(8, 48, 64, activation, gated, exact=False, quantized=quantized)
    assert case.run(StandIn())["values"] == 6 * 8 * 48
    right = getattr(nvfp4_kernels, case.op)

    def wrong(*arguments: Any, **options: Any) -> Any:
        found = right(*arguments, **options)
        if isinstance(found, tuple):
            found[0][5, -1, -1] ^= 1
        elif not quantized:
            found[5, -1, -1] += 1 + found[5, -1, -1].abs() / 4
        return found

    monkeypatch.setattr(nvfp4_kernels, case.op, wrong)
    with pytest.raises(Mismatch, match=r"1 of .* values are wrong"):
        case.run(StandIn())


def test_every_kind_of_tile_of_experts_has_a_row() -> None:
    few, all_ = ({case.name for case in grouped_cases(quick)} for quick in (True, False))
    assert few < all_
    for op in ("grouped_gemm, ", "grouped_silu_mul_gemm, "):
        for word in ("swap_ab", "split-K", "2cta", "swap_ab.*2cta", "cluster 1×2"):
            assert any(name.startswith(op) and re.search(word, name) for name in few), (op, word)


def test_nan_is_found() -> None:
    result = torch.tensor([1.0, torch.nan])
    with pytest.raises(Mismatch, match="1 of 2 values are wrong"):
        compare_bound(result, torch.ones(2).double(), torch.ones(2).double())
    with pytest.raises(Mismatch, match="1 of 2 values are wrong"):
        compare_exact(result, torch.ones(2))
    with pytest.raises(Mismatch, match=r"result is torch.float32 \(2,\), must be torch.float16"):
        compare_exact(result, torch.ones(2, dtype=FP16))


@pytest.mark.parametrize(
    ("op", "per_token"),
    [("quantize", False), ("silu_mul_quantize", False), ("rms_norm_quantize", True)],
)
def test_wrong_codes_are_found(op: str, per_token: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import nvfp4_kernels

    right = getattr(nvfp4_kernels, op)
    monkeypatch.setattr(nvfp4_kernels, op, lambda *a: (right(*a)[0] ^ 0x11, *right(*a)[1:]))
    with pytest.raises(Mismatch, match=r"values are wrong|bytes differ"):
        QuantizeCase(op, per_token, 5, 64).run(StandIn())


def test_wrong_scales_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import nvfp4_kernels

    right = nvfp4_kernels.silu_mul_quantize
    monkeypatch.setattr(
        nvfp4_kernels,
        "silu_mul_quantize",
        lambda *a: (right(*a)[0], (right(*a)[1].float() * 4).to(torch.float8_e4m3fn)),
    )
    with pytest.raises(Mismatch, match=r"a value is .* steps off, may be 3 at the most"):
        QuantizeCase("silu_mul_quantize", False, 5, 64).run(StandIn())


# --- hardware questions -------------------------------------------------------------------------


def test_every_doubt_has_a_row() -> None:
    names = [task.name for task in doubts()]
    assert {task.section for task in doubts()} == {"silicon"}
    for words, count in {
        "one scale set, ": 4,
        "two scale sets, ": 4,
        "scales at odd columns, ": 3,
        "terms from the collector buffer, ": 6,
        "terms without the collector buffer, ": 6,
        "partial sums by st.async, ": 3,
        "rotary_attention, ": 2,
        "staggered cluster starts, ": 4,
        "small tensor maps": 1,
        "dimensions of size 1, ": 3,
        "ring of 3, ": 2,
        "ring of 5, ": 2,
    }.items():
        assert sum(name.startswith(words) for name in names) == count, words
    assert sum(f"{LAUNCHES} launches" in name for name in names) == 9
    rings = [task for task in doubts() if isinstance(task, ForcedScoresCase)]
    asked = [task.tile for task in rings if task.what.startswith("ring")]
    assert [tile.stages for tile in asked if tile.fmt == "nvfp4"] == list(DEPTHS)
    assert [task.tile.scale_sets for task in rings] == [1, 2, 1, 1, 1, 1]


@pytest.mark.arch("sm_100")
@pytest.mark.schedules("random 1")
def test_one_wrong_launch_is_found(
    op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nvfp4_kernels.gemm.sm100 import launch

    right, launches = launch.gemm, []

    def wrong(*arguments: Any, **options: Any) -> tuple[torch.Tensor, None]:
        out, _ = right(*arguments, **options)
        launches.append(out)
        out[0, 0] += len(launches) == 3
        return out, None

    monkeypatch.setattr(launch, "gemm", wrong)
    case = ForcedProductCase("staggered", (Tile(64),), 5, 64, 256, launches=4)
    with pytest.raises(Mismatch, match="1 of 320 values are wrong"):
        case.run(StandIn(op_device))
    assert len(launches) == 3


class Replays:
    """Stand-in for a captured CUDA graph of one step."""

    def __init__(self, steps: Sequence[Callable[[], object]], launches: int) -> None:
        steps[0]()
        for number in range(launches):
            steps[number % len(steps)]()
        self.graph, self.launches, self.replays = self, launches, 0

    def replay(self) -> None:
        self.replays += 1


def test_graphs_are_replayed_until_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        made.append(torch.zeros(1))
        return made[-1]

    graphs: list[Replays] = []

    def captured(steps: Sequence[Callable[[], object]], launches: int) -> Replays:
        graphs.append(Replays(steps, launches))
        return graphs[-1]

    monkeypatch.setattr(forced_product_case, "captured", captured)
    machine = StandIn()
    machine.device = torch.device("cuda")
    results = list(forced_product_case._results(machine, [step, step], 4 * BATCH))
    assert len(results) == 2 + 4 * BATCH
    assert graphs[0].replays == 4
    assert not results[0].isnan()
    assert all(result.isnan() for result in results[2:])  # poisoned: the graph does nothing


@pytest.mark.parametrize(
    ("version", "bits", "error"),
    [
        (13010, (True, False), ""),
        (13010, (False, False), ""),
        (13020, (False, False), ""),
        (13020, (True, True), ""),
        (13020, (True, False), "driver of CUDA 13020: sets bit 21 of a small tensor map's"),
    ],
)
def test_maps_of_a_driver(
    version: int, bits: tuple[bool, bool], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, cpu = SmallMapsCase(), torch.device("cpu")
    mended = 131072 if version <= 13010 else 0
    monkeypatch.setattr(tensor_map_case, "driver_version", lambda: version)
    monkeypatch.setattr(tensor_map_case, "defective_map_bytes", lambda device: mended)
    monkeypatch.setattr(
        tensor_map_case,
        "driver_map",
        lambda x: [0, bits[x.nbytes >= 131072] << 21],
    )
    if error:
        with pytest.raises(Mismatch, match=error):
            case._compare(cpu)
    else:
        seen = {"small": str(bits[0]), "large": str(bits[1]), "mended": str(mended > 0)}
        assert case._compare(cpu) == seen


# --- failing tasks ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Acts:
    """Task that acts as its name says."""

    name: str
    section: str = "acts"

    def run(self, machine: Machine) -> Figures:
        if self.name == "hangs":
            time.sleep(600)
        if self.name == "dies":
            os._exit(3)
        if self.name == "prints":
            print("as libraries do")
        if self.name == "raises":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return {"process": float(os.getpid())}


@pytest.fixture
def isolated() -> Iterator[Isolated]:
    runner = Isolated(StandIn, limit=60)
    yield runner
    runner.close()


@pytest.mark.processes
def test_a_task_may_raise_or_die(isolated: Isolated) -> None:
    tasks = [Acts(n) for n in ("works", "works again", "raises", "dies", "works at last")]
    outcomes = run_all(tasks, isolated)
    errors = [outcome.error for outcome in outcomes]
    assert errors[0] == errors[1] == errors[4] == ""
    assert "RuntimeError: CUDA error: an illegal memory access was encountered" in errors[2]
    assert errors[3] == "its process died with exit code 3"
    first, second, *_, last = (outcome.figures.get("process") for outcome in outcomes)
    assert first == second
    assert last not in (first, os.getpid())


class NoMachine:
    """Machine whose process dies before the first task, as where CUDA cannot start."""

    def __init__(self) -> None:
        os._exit(4)


@pytest.mark.processes
def test_a_process_may_die_before_its_task() -> None:
    runner = Isolated(NoMachine, limit=60)
    outcomes = run_all([Acts("first"), Acts("second")], runner)
    assert [o.error for o in outcomes] == ["its process died with exit code 4"] * 2


@pytest.mark.processes
def test_a_task_may_hang(isolated: Isolated) -> None:
    assert not isolated(Acts("works")).error
    isolated._limit = 0.5  # only now, as the process has started
    assert isolated(Acts("hangs")).error == "no answer within 0.5 s: it hangs"


def test_an_interrupt_keeps_what_is_done() -> None:
    def run(task: Task) -> Outcome:
        if task.name == "second":
            raise KeyboardInterrupt
        return run_task(task, StandIn())

    outcomes = run_all([Acts("first"), Acts("second"), Acts("third")], run)
    assert [o.error for o in outcomes] == ["", "not run: interrupted", "not run: interrupted"]


# --- times ------------------------------------------------------------------------------------


def test_operands_are_cold() -> None:
    assert cold_sets(nbytes=10e6, l2_bytes=126 << 20) == 1 + 27
    assert cold_sets(nbytes=1e9, l2_bytes=126 << 20) == 2
    assert cold_sets(nbytes=10, l2_bytes=126 << 20) == timed.MOST_SETS


def test_figures_of_a_product() -> None:
    machine = StandIn()
    figures = TimedProduct("section", given_shape("5,64,128", gate_up=False)).run(machine)
    nbytes = (5 + 64) * 128 * (0.5 + 1 / 16) + 5 * 64 * 2
    assert figures["us"] == 1.0
    assert figures["tb_per_s"] == pytest.approx(nbytes / 1e6)
    assert figures["tflops"] == pytest.approx(2 * 5 * 64 * 128 / 1e6)
    assert figures["share"] == pytest.approx(nbytes / 8e12 / 1e-6)
    assert figures["torch 16-bit us"] == 1.0
    assert machine.calls[0] == cold_sets(nbytes, machine.l2_bytes()) > 1


@pytest.mark.parametrize("shape", ["5,64,128", "40,64,128", "5,64,128,2"])
@pytest.mark.parametrize("gate_up", [False, True], ids=["linear", "gate_up"])
def test_what_torch_has_not_is_said(shape: str, gate_up: bool) -> None:
    figures = TimedProduct("section", given_shape(shape, gate_up)).run(StandIn())
    assert str(figures["torch NVFP4 us"]).startswith("none: ")


def test_figures_of_a_quantisation() -> None:
    assert TimedQuantize("section", 8, 64).run(StandIn())["us"] == 1.0


def test_figures_of_attention() -> None:
    task = TimedAttention("section", 2, 3, 5, query_heads=4, kv_heads=2, head_dim=16)
    assert task.work.flops == 2 * 4 * (3 + 4 + 5) * 4 * 16
    assert task.work.nbytes == 2 * 2 * (2 * 5 * 2 + 2 * 3 * 4) * 16
    seen = task.run(StandIn())
    assert seen["us"] == 1.0
    assert seen["torch us"] == "none: torch aligns a causal mask with the first key"
    assert replace(task, queries=5).run(StandIn())["torch us"] == 1.0
    fp8 = replace(task, fp8=True)
    assert fp8.work.nbytes < task.work.nbytes
    assert fp8.run(StandIn())["us"] == 1.0


def test_figures_of_rotation() -> None:
    task = TimedRotaryStore("section", 3)
    assert task.work.nbytes == 3 * (2 * 128 * (32 + 8 + 8 + 32 + 8 + 8) + 256 + 16)
    assert replace(task, fp8=True).work.nbytes == task.work.nbytes - 3 * 128 * 16
    assert task.run(StandIn())["us"] == 1.0


@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "fp8", "bf16"])
def test_figures_of_scores(fmt: Any, paged: bool) -> None:
    shape = ScoreShape("some", fmt, 1, 2, 70, paged, heads=4, head_dim=64)
    assert shape.work.flops == 2 * (70 + 69) * 4 * 64
    each = {"nvfp4": 36, "mxfp4": 34, "fp8": 68, "bf16": 128}[fmt]
    assert shape.work.nbytes == each * (70 + 2 * 4) + 4 * 2 * (70 + 4)
    seen = TimedScoring("section", shape).run(StandIn())
    assert seen["us"] == 1.0
    assert seen["relu_us"] == 1e6 * 1.5 * (70 + 69) * 4 / (128 * 148 * 1.85e9)


def test_quick_is_a_part() -> None:
    for tasks in (correctness, timings):
        few, all_ = ([task.name for task in tasks(quick)] for quick in (True, False))
        assert set(few) < set(all_)
    names = [(task.section, task.name) for task in [*correctness(False), *timings(False)]]
    assert len(set(names)) == len(names)
    for op, per_token in FORMS:
        form = re.compile(rf"{op}{', per token' * per_token}, \d+×")
        assert any(form.match(name) for _, name in names), form
    assert sum(section == check.CONTEST_SECTION for section, _ in names) == len(CONTEST)


# --- the report -------------------------------------------------------------------------------

OUTCOMES = [
    Outcome("correctness", "gemm, 1×2×3", "", {"values": 6.0}),
    Outcome("correctness", "gemv, 1×2×3", "Mismatch: a | b\nc"),
    Outcome("contest shapes", "GEMM 128×7168×2048", "", {"us": 2.34567, "tile": "128×128"}),
]


def test_markdown() -> None:
    text = markdown(DEVICE, OUTCOMES)
    assert "# NVFP4 kernels on B200\n\n2 of 3 tasks went well." in text
    assert "| correctness | gemv, 1×2×3 | Mismatch: a \\| b c |" in text
    assert "| GEMM 128×7168×2048 | ok | 2.346 | 128×128 |" in text
    for table in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1


def fake_cuda(monkeypatch: pytest.MonkeyPatch, major: int, minor: int, name: str) -> None:
    properties = SimpleNamespace(
        name=name, major=major, minor=minor, multi_processor_count=148, total_memory=192e9
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(check, "_driver", lambda: "CUDA 13.0")


def invoke(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", *map(str, arguments)])
    assert not isinstance(result.exception, Exception), result.exception
    return result.exit_code, " ".join(result.output.split())


def test_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_cuda(monkeypatch, 10, 0, "NVIDIA B200")
    tasks = [Acts("works"), Acts("raises")]
    monkeypatch.setattr(check, "correctness", lambda quick: tasks[:1])
    monkeypatch.setattr(check, "timings", lambda quick: tasks[1:])
    monkeypatch.setattr(task_module, "Isolated", lambda make, limit: InThisProcess())
    status, output = invoke("--out", tmp_path / "report.md")
    assert status == 1
    assert "2 tasks, 1 failed" in output
    assert "| acts | raises | RuntimeError: CUDA error" in (tmp_path / "report.md").read_text()
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["device"]["name"] == "NVIDIA B200"
    assert [bool(o["error"]) for o in written["outcomes"]] == [False, True]


def test_json_is_what_the_text_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``--json`` prints the text's figures and nothing else, even if a task prints."""
    fake_cuda(monkeypatch, 10, 0, "NVIDIA B200")
    monkeypatch.setattr(check, "correctness", lambda quick: [Acts("works"), Acts("prints")])
    monkeypatch.setattr(check, "timings", lambda quick: [Acts("raises")])
    monkeypatch.setattr(task_module, "Isolated", lambda make, limit: InThisProcess())
    arguments = ["check", "--out", str(tmp_path / "report.md")]
    texts = CliRunner().invoke(app, arguments)
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert texts.exit_code == done.exit_code == 1
    found = json.loads(done.stdout)
    written = json.loads((tmp_path / "report.json").read_text())
    assert {key: found[key] for key in written} == written
    text = f"{found['tasks']} tasks, {found['failed']} failed: {', '.join(found['files'])}\n"
    assert texts.stdout == text
    assert (found["tasks"], found["failed"]) == (3, 1)
    assert "raises: RuntimeError: CUDA error" in done.stderr


@pytest.mark.processes
def test_a_row_that_dies_costs_one_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The report names the failed row, and later rows have run."""
    fake_cuda(monkeypatch, 10, 0, "NVIDIA B200")
    tasks = [Acts(name, "silicon") for name in ("works", "dies", "works again")]
    monkeypatch.setattr(check, "correctness", lambda quick: tasks)
    monkeypatch.setattr(check, "timings", lambda quick: [])
    monkeypatch.setattr(cuda_machine, "CudaMachine", StandIn)
    status, output = invoke("--out", tmp_path / "report.md")
    assert status == 1
    assert "3 tasks, 1 failed" in output
    report = (tmp_path / "report.md").read_text()
    assert "| silicon | dies | its process died with exit code 3 |" in report
    for name in ("works", "works again"):
        assert f"| {name} | ok |" in report


class InThisProcess:
    """Runner of tasks on a stand-in, in this process."""

    def __call__(self, task: Task) -> Outcome:
        return run_task(task, StandIn())

    def close(self) -> None:
        """Do nothing: there is no process to end."""


def test_machines_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(WrongDevice, match="no CUDA device, must have one of sm_100"):
        check.this_device()
    fake_cuda(monkeypatch, 8, 0, "NVIDIA A100")
    with pytest.raises(WrongDevice, match=r"GPU is NVIDIA A100 \(sm_80\), must be one of sm_100"):
        check.this_device()
    for major, name in ((9, "NVIDIA H200"), (10, "NVIDIA B200")):
        fake_cuda(monkeypatch, major, 0, name)
        assert check.this_device().arch == f"sm_{major}0"


def test_a_folder_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_cuda(monkeypatch, 10, 0, "NVIDIA B200")
    status, output = invoke("--out", tmp_path / "none" / "report.md")
    assert status == 1
    assert "none is no directory; create it first" in output


def test_a_file_that_is_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_cuda(monkeypatch, 10, 0, "NVIDIA B200")
    monkeypatch.setattr(check, "correctness", lambda quick: pytest.fail("ran"))
    status, output = invoke("--out", tmp_path)
    assert status == 1
    assert f"--out: {tmp_path} is a directory, must be a file" in output
