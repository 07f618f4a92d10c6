"""Static persistent scheduling: results are bit-identical to one CTA per work tile."""

from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

from nvfp4_kernels import Static, paged_attention
from nvfp4_kernels.attention.sm100.tile import AttentionTile
from tests.emulator import EAGER
from tests.mutants import ANYTHING, Mutant
from tests.mutants.kernels import Room, check_caught, check_nothing_to_catch, nothing
from tests.test_kernels.attention.attention_cases import Case
from tests.test_kernels.attention.attention_sm100 import Chosen
from tests.test_kernels.attention.test_attention_quantized import on
from tests.test_kernels.attention.test_rotary_attention import arguments, on_device, rotation
from tests.test_kernels.attention.test_rotary_attention import check as check_rotary
from tests.test_kernels.few_sms import use_sms

pytestmark = pytest.mark.arch("sm_100")
ONE_SCHEDULE = pytest.mark.schedules("random 1")

# Sequences of one key tile, of many, of none and without queries; some fill their last key tile.
CASE = {"queries": (1, 2, 0, 1, 3, 1), "keys": (3, 389, 9, 0, 256, 130), "head_dim": 64}
TILES = {
    "16 bits": (Chosen(AttentionTile(64, warp_split_kv=True)), {}),
    "splits": (Chosen(AttentionTile(64, warp_split_kv=True), 3), {"sinks": True}),
    "a ring of two, window": (
        Chosen(AttentionTile(64, max_stages=2, warp_split_kv=True), 2), {"window": 150},
    ),
    "fp8, two to an SM": (
        Chosen(AttentionTile(64, fp8=True, ctas_per_sm=2, warp_split_kv=True), 2), {"fp8": True},
    ),
}  # fmt: skip


def on_sms(patch: pytest.MonkeyPatch, sms: int) -> None:
    """Make the device report ``sms`` SMs."""
    launch = import_module("nvfp4_kernels.attention.sm100.launch")
    use_sms(launch, sms, patch)


def check(given: dict[str, Any], sms: int, *, quantized: bool = False) -> None:
    """Check against one CTA per work tile, with splits merged by the last CTA and by a launch."""
    device = given["q"].device
    op: Any = paged_attention
    if quantized:
        op = partial(paged_attention, output=Static(torch.tensor(0.01, device=device)))
    expected = op(**given)
    counters = torch.zeros(2 * len(given["seq_lens"]), dtype=torch.int32, device=device)
    with pytest.MonkeyPatch.context() as patch:
        on_sms(patch, sms)
        for more in ({}, {"counters": counters}):
            for ours, theirs in zip(op(**given, **more), expected, strict=True):
                if ours.dtype != torch.float8_e4m3fn:  # padding is undefined
                    assert torch.equal(ours.cpu(), theirs.cpu())
    assert not counters.cpu().any()


@ONE_SCHEDULE
@pytest.mark.parametrize("sms", [1, 3])
@pytest.mark.parametrize("name", TILES)
def test_tiles(
    name: str, sms: int, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, changed = TILES[name]
    chosen.use(monkeypatch)
    given = Case(**CASE | changed).problem().paged()  # type: ignore[arg-type]
    check(on(op_device, given), sms, quantized=sms == 1)


@ONE_SCHEDULE
@pytest.mark.parametrize("splits", [1, 2])
def test_rotary(splits: int, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    Chosen(AttentionTile(64, warp_split_kv=True), splits).use(monkeypatch)
    on_sms(monkeypatch, 1)
    case = Case((1, 3, 1), (300, 130, 129))
    check_rotary(on_device(op_device, arguments(case, rotation(case))), counted=True)


@ONE_SCHEDULE
def test_dense(op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = import_module("nvfp4_kernels").attention
    problem = Case((2, 2, 2), (140, 140, 140)).problem()
    for given in (problem.dense(), problem.ragged()):
        moved = on(op_device, given)
        expected = attention(**moved)
        with monkeypatch.context() as patch:
            on_sms(patch, 1)
            for ours, theirs in zip(attention(**moved), expected, strict=True):
                assert torch.equal(ours.cpu(), theirs.cpu())


KERNEL = Room("nvfp4_kernels.attention.sm100")
SCHEDULER = "scheduler:WorkTile"
SHORT = Case((1, 1, 1), (140, 256, 130), 2, 2)
CHOSEN = Chosen(AttentionTile(64, max_stages=3, warp_split_kv=True))


def check_tile() -> None:
    check(SHORT.problem().paged(), 1)


def test_every_schedule(op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    CHOSEN.use(monkeypatch)
    check(on(op_device, SHORT.problem().paged()), 1, quantized=True)


MUTANTS = {
    "phases begin anew": Mutant(
        KERNEL.with_result(SCHEDULER, "after", lambda b: type(b)(*(n * 0 for n in b))), ANYTHING
    ),
    "tails are not counted": Mutant(
        KERNEL.with_result(SCHEDULER, "after", lambda b: b._replace(tail_tiles=b.tail_tiles * 0)),
        ANYTHING,
    ),
    "works are not counted": Mutant(
        KERNEL.with_result(SCHEDULER, "after", lambda b: b._replace(work_tiles=b.work_tiles * 0)),
        ANYTHING,
    ),
    "queries are loaded while others are read": Mutant(
        KERNEL.replaced("kernel:FmhaSm100", "_sync", nothing), "DataRace"
    ),
    "every CTA takes all": Mutant(
        KERNEL.with_arguments("kernel", "work_tile", lambda *a: (*a[:5], a[5] * 0, *a[6:])),
        ANYTHING,
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_caught(mutant: Mutant) -> None:
    check_caught(mutant, check_tile, CHOSEN.use)


def test_nothing_to_catch() -> None:
    check_nothing_to_catch(check_tile, CHOSEN.use, schedules=[EAGER])
