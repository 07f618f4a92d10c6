"""CLC work stealing: results are bit-identical to one CTA per work tile."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

from nvfp4_kernels import Static, paged_attention
from nvfp4_kernels.attention.sm100.tile import AttentionTile
from tests.emulator import EAGER
from tests.emulator.instructions import cluster
from tests.emulator.machine.chain import Link
from tests.emulator.machine.launch import Launch
from tests.mutants import ANYTHING, Mutant
from tests.mutants.kernels import Room, check_caught, check_nothing_to_catch, nothing, without_in
from tests.test_kernels.attention.attention_cases import Case
from tests.test_kernels.attention.attention_sm100 import Chosen
from tests.test_kernels.attention.test_attention_quantized import on

pytestmark = pytest.mark.arch("sm_100")
ONE_SCHEDULE = pytest.mark.schedules("random 1")

# Sequences of several work tiles, of one, without queries, without keys; the last key tile full.
MANY: dict[str, Any] = {
    "queries": (150, 40, 0, 3, 70), "keys": (300, 130, 9, 0, 128), "query_heads": 2, "heads": 1,
}  # fmt: skip
TWO_HEADS = MANY | {"query_heads": 4, "heads": 2}
CASES: dict[str, tuple[Chosen | None, Case]] = {
    "D = 128": (None, Case(**TWO_HEADS, head_dim=128)),
    "D = 64, P beside S": (None, Case(**MANY | {"query_heads": 4})),
    "D = 96, groups of 3": (None, Case((100, 9), (200, 9), 3, 1, head_dim=96)),
    "window, sinks": (None, Case(**MANY, head_dim=128, window=60, sinks=True)),
    "splits": (Chosen(AttentionTile(128, 2), 2), Case(**MANY, head_dim=128)),
    "fp8, D = 128": (None, Case(**MANY, head_dim=128, fp8=True)),
    "fp8, D = 96, window": (None, Case(**MANY, head_dim=96, window=60, fp8=True)),
}


@contextmanager
def on_sms(sms: int) -> Iterator[list[int]]:
    """Limit the emulator to ``sms`` resident CTAs; yield a list that counts stolen tiles."""
    taken: list[int] = []
    cancelled = Link.cancelled

    def counted(link: Link) -> None:
        taken.append(1)
        cancelled(link)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "resident_clusters", property(lambda _: sms))
        patch.setattr(Link, "cancelled", counted)
        yield taken


@contextmanager
def each_its_own() -> Iterator[None]:
    """Make the emulator refuse every CLC request: each work tile has a CTA of its own."""
    cancel = cluster._cancel

    def refused(w: Any, *rest: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(w.launch), "next_cluster", lambda _: None)
            cancel(w, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "_cancel", refused)
        yield


def check(given: dict[str, Any], *some: int, quantized: bool = False) -> None:
    """Check against one CTA per work tile; ``some``: numbers of SMs to check."""
    op: Any = paged_attention
    if quantized:
        scale = torch.tensor(0.01, device=given["q"].device)
        op = partial(paged_attention, output=Static(scale))
    with each_its_own():
        expected = op(**given)
    for sms in some:
        with on_sms(sms) as taken:
            found = op(**given)
        assert taken
        for ours, theirs in zip(found, expected, strict=True):
            if ours.dtype != torch.float8_e4m3fn:  # padding is undefined
                assert torch.equal(ours.cpu(), theirs.cpu())


@ONE_SCHEDULE
@pytest.mark.parametrize("name", CASES)
def test_cases(name: str, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, case = CASES[name]
    if chosen is not None:
        chosen.use(monkeypatch)
    check(on(op_device, case.problem().paged()), 1, 3)


@ONE_SCHEDULE
@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "fp8"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_quantized(head_dim: int, fp8: bool, op_device: torch.device) -> None:
    case = Case(**MANY, head_dim=head_dim, fp8=fp8)
    check(on(op_device, case.problem().paged()), 2, quantized=True)


@ONE_SCHEDULE
def test_layouts(op_device: torch.device) -> None:
    attention = import_module("nvfp4_kernels").attention
    problem = Case((140, 140), (140, 140), 2, 1, head_dim=128).problem()
    for given in (problem.dense(), problem.ragged()):
        moved = on(op_device, given)
        with each_its_own():
            expected = attention(**moved)
        with on_sms(1) as taken:
            found = attention(**moved)
        assert taken
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours.cpu(), theirs.cpu())


SHORT = Case((70, 70), (140, 256), 4, 1, head_dim=128)
BESIDE = Case((70, 70), (140, 256), 4, 1)  # P has its own columns
SHORT_FP8 = Case((70, 70), (140, 256), 4, 1, head_dim=128, fp8=True)


@pytest.mark.parametrize(
    "case", [SHORT, BESIDE, SHORT_FP8], ids=["P over S", "P beside S", "S in parts"]
)
def test_every_schedule(case: Case, op_device: torch.device) -> None:
    check(on(op_device, case.problem().paged()), 1)


KERNEL = Room("nvfp4_kernels.attention.sm100")
SCHEDULER = "scheduler:WorkTile"
MUTANTS = {
    "phases begin anew": Mutant(
        KERNEL.with_result(SCHEDULER, "after", lambda b: type(b)(*(n * 0 for n in b))), ANYTHING
    ),
    "query tiles share a count": Mutant(
        KERNEL.with_result(
            SCHEDULER,
            "after",
            lambda b: b._replace(first_kv_tiles=b.kv_tiles, second_kv_tiles=b.kv_tiles),
        ),
        ANYTHING,
    ),
    "tails are not counted": Mutant(
        KERNEL.with_result(SCHEDULER, "after", lambda b: b._replace(tail_tiles=b.tail_tiles * 0)),
        ANYTHING,
    ),
    "the board is written while it is read": Mutant(
        KERNEL.replaced("work_tile_broadcast:WorkTileBroadcast", "wait_read", nothing), ANYTHING
    ),
    "the response is read before it is there": Mutant(
        KERNEL.replaced("clc_response", "wait", nothing), ANYTHING
    ),
    "queries come while others are read": Mutant(
        KERNEL.replaced("query_copier", "wait", nothing), ANYTHING
    ),
    "queries are never let go": Mutant(
        KERNEL.replaced("mma:Mma", "_release_queries", nothing), "Deadlock"
    ),
    "work is taken over twice": Mutant(
        KERNEL.with_arguments(
            "kernel", "work_tile", lambda *a: (*a[:5], (a[5][0], a[5][1], a[5][2] * 0), *a[6:])
        ),
        ANYTHING,
    ),
}


MUTANTS_FP8 = {
    "queries are quantised before they are there": Mutant(
        KERNEL.replaced("copied_queries", "wait", nothing), ANYTHING
    ),
    "queries come while others are quantised": Mutant(
        KERNEL.replaced("query_copier", "wait", nothing), ANYTHING
    ),
    "queries are never taken": Mutant(without_in("mbarrier_arrive", "quantize"), "Deadlock"),
    "the tensor core reads queries that were not fenced": Mutant(
        without_in("fence_proxy", "quantize"), "MissingProxyFence"
    ),
}


def check_short() -> None:
    check(SHORT.problem().paged(), 1)


def nobody(_: pytest.MonkeyPatch) -> None:
    """Leave the choice of the tile to ``choose_config``."""


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_caught(mutant: Mutant) -> None:
    check_caught(mutant, check_short, nobody)


@pytest.mark.parametrize("mutant", MUTANTS_FP8.values(), ids=MUTANTS_FP8)
def test_caught_fp8(mutant: Mutant) -> None:
    check_caught(mutant, lambda: check(SHORT_FP8.problem().paged(), 1), nobody)


def test_s_is_overwritten_while_it_is_read() -> None:
    mutant = Mutant(KERNEL.replaced("mma:Mma", "_wait_s_empty", nothing), ANYTHING)
    check_caught(mutant, lambda: check(BESIDE.problem().paged(), 1), nobody)


def test_nothing_to_catch() -> None:
    check_nothing_to_catch(check_short, nobody, schedules=[EAGER])
