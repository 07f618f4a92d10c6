"""Split-KV merged by the last CTA to finish: bit-identical to a merge by a separate launch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import InvalidArgument, Static, paged_attention
from nvfp4_kernels.attention.sm100.tile import AttentionTile
from tests.emulator import EAGER
from tests.mutants import ANYTHING, WRONG, Mutant
from tests.mutants.kernels import Room, check_caught, check_nothing_to_catch, nothing, one_of
from tests.test_kernels.attention.attention_cases import Case
from tests.test_kernels.attention.attention_sm100 import Chosen
from tests.test_kernels.attention.test_attention_quantized import on

pytestmark = pytest.mark.arch("sm_100")

CASE = {"queries": (2, 1, 0, 3), "keys": (389, 3, 40, 260), "query_heads": 6, "heads": 2}
SPLITS = {
    "two": (Chosen(AttentionTile(64), 2), {"sinks": True}),
    "more than key tiles": (Chosen(AttentionTile(32), 5), {"head_dim": 32}),
    "warp split": (Chosen(AttentionTile(128, warp_split_kv=True), 3), {"head_dim": 128}),
    "warp split, fp8": (
        Chosen(AttentionTile(64, fp8=True, warp_split_kv=True, ctas_per_sm=2), 3),
        {"fp8": True, "sinks": True, "dtype": torch.float16},
    ),
    "warp split, fp8, D = 96": (
        Chosen(AttentionTile(96, fp8=True, warp_split_kv=True), 2),
        {"fp8": True, "head_dim": 96, "queries": (11, 1, 0, 3)},
    ),
}


def problem(**changed: Any) -> dict[str, Any]:
    return Case(**{**CASE, "head_dim": 64, **changed}).problem().paged()


def check(given: dict[str, Any], *, quantized: bool) -> None:
    q: Tensor = given["q"]
    counters = torch.zeros(len(given["seq_lens"]) * 2 + 1, dtype=torch.int32, device=q.device)
    op: Any = paged_attention
    if quantized:
        op = partial(paged_attention, output=Static(torch.tensor(0.01, device=q.device)))
    expected = op(**given)
    for _ in range(2):  # the second call finds the counters as the first has left them
        found = op(**given, counters=counters)
        for ours, theirs in zip(found, expected, strict=True):
            if ours.dtype != torch.float8_e4m3fn:  # padding is undefined
                assert torch.equal(ours.cpu(), theirs.cpu())
    assert not counters.cpu().any()


@pytest.mark.schedules("random 1")
@pytest.mark.parametrize("name", SPLITS)
def test_splits(name: str, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, changed = SPLITS[name]
    chosen.use(monkeypatch)
    check(on(op_device, problem(**changed)), quantized="warp" in name)


@pytest.mark.schedules("eager")
@pytest.mark.parametrize("sinks", [False, True])
def test_sequences_without_keys(
    sinks: bool, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    Chosen(AttentionTile(64, warp_split_kv=True), 3).use(monkeypatch)
    given = problem(sinks=sinks)
    given["seq_lens"] = given["seq_lens"] * torch.tensor([1, 0, 1, 0], dtype=torch.int32)
    check(on(op_device, given), quantized=False)


def test_every_schedule(op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    Chosen(AttentionTile(64, warp_split_kv=True), 3).use(monkeypatch)
    check(on(op_device, problem()), quantized=True)


@pytest.mark.schedules("eager")
@pytest.mark.parametrize(
    ("counters", "message"),
    [
        (torch.zeros(7, dtype=torch.int32), "counters: has 7 elements, must have at least 8"),
        (torch.zeros(8), "counters: dtype is float32"),
    ],
)
def test_refused(counters: Tensor, message: str, op_device: torch.device) -> None:
    with pytest.raises(InvalidArgument, match=message):
        paged_attention(**on(op_device, problem()), counters=counters.to(op_device))


KERNEL = Room("nvfp4_kernels.attention.sm100")
LAST = "last_cta:LastCta"


def relaxed(_: Any, counter: Any, splits: Any) -> Any:
    """Mutant: count with a relaxed atomic."""
    import cutlass
    from cutlass.experimental import primitives as ptx

    before = ptx.inline_ptx(
        "atom.relaxed.gpu.global.inc.u32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[cutlass.Int32],
        read_only_args=[counter, splits - 1],
    )
    return cutlass.select_(before == splits - 1, cutlass.Int32(1), cutlass.Int32(0))


def leaving_out(number: int) -> Callable[[Any], Any]:
    """Mutant: leave out one of the two uses of ``_sync``."""
    left_out = one_of(2, number)
    return lambda given: lambda self: None if left_out() else given(self)


MUTANTS = {
    "the first CTA merges": Mutant(
        KERNEL.with_result(LAST, "_count", lambda last: 1 - last), ANYTHING
    ),
    "warps do not sync": Mutant(KERNEL.replaced(LAST, "_sync", nothing), ANYTHING),
    "counted before all parts are stored": Mutant(
        KERNEL.swapped(LAST, "_sync", leaving_out(0)), "DataRace"
    ),
    "merged before the count is known": Mutant(
        KERNEL.swapped(LAST, "_sync", leaving_out(1)), "UninitialisedRead"
    ),
    "rows of the next sequence": Mutant(
        KERNEL.with_arguments(
            LAST, "_merge", lambda a, shared, work, thread: (a, shared, work, thread + 4)
        ),
        ANYTHING,
    ),
    "the count does not wrap": Mutant(
        KERNEL.with_arguments(LAST, "_count", lambda counter, splits: (counter, splits + 1)), WRONG
    ),
    "parts are not acquired": Mutant(KERNEL.replaced(LAST, "_count", relaxed), "DataRace"),
}


def check_tile() -> None:
    check(problem(), quantized=False)


CHOSEN = Chosen(AttentionTile(64, warp_split_kv=True), 3)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_caught(mutant: Mutant) -> None:
    check_caught(mutant, check_tile, CHOSEN.use)


def test_nothing_to_catch() -> None:
    check_nothing_to_catch(check_tile, CHOSEN.use, schedules=[EAGER])
