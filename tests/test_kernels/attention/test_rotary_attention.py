"""``rotary_attention``: bit-identical to ``rotary_store`` followed by paged attention."""

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import (
    HeadRotation,
    InvalidArgument,
    Static,
    attention,
    paged_attention,
    rotary_attention,
    rotary_store,
)
from nvfp4_kernels.attention.sm100.tile import AttentionTile
from nvfp4_kernels.formats.nvfp4 import from_blocked
from tests import devices
from tests.emulator import EAGER
from tests.emulator.findings import MissingDependencyWait
from tests.mutants import ANYTHING, WRONG, Mutant
from tests.mutants.kernels import (
    NO_DEPENDENCY_WAIT,
    Room,
    check_caught,
    check_nothing_to_catch,
    compiled_anew,
    first_noticed,
    nothing,
    said,
    unwaited,
    without,
)
from tests.test_kernels.attention.attention_cases import Case, with_pages_of_nan
from tests.test_kernels.attention.attention_sm100 import Chosen
from tests.test_kernels.attention.test_attention_quantized import on
from tests.test_kernels.compilation import check_op

SM100 = pytest.mark.arch("sm_100")
ONE_SCHEDULE = pytest.mark.schedules("random 1")
SCALE = 0.01

# New tokens within one key tile, across two, and at the start of a tile.
DECODE = Case((1, 3, 1), (300, 130, 129), 4, 2, head_dim=64)


def rotation(
    case: Case, rotary_dim: int = 0, *, neox: bool = True, norms: bool = False
) -> HeadRotation:
    dim = rotary_dim or case.head_dim
    angles = torch.arange(max(case.keys) + 1).unsqueeze(1) * 3.0 ** -torch.arange(dim // 2)
    table = torch.cat([angles.cos(), angles.sin()], -1).to(case.dtype)
    if not norms:
        return HeadRotation(table, neox)
    weights = [1 + torch.randn(case.head_dim).to(case.dtype) / 4 for _ in range(2)]
    return HeadRotation(table, neox, *weights, 1e-6)


def arguments(case: Case, how: HeadRotation) -> dict[str, Any]:
    """Arguments of ``rotary_attention``; the first token is not stored."""
    given = case.problem().paged()
    del given["causal"]
    q, table, page = given["q"], given["block_table"], given["kv_cache"].shape[2]
    k, v = (torch.randn(len(q), case.heads, case.head_dim).to(q.dtype) for _ in range(2))
    positions, slots = [], []
    for b, (queries, keys) in enumerate(zip(case.queries, case.keys, strict=True)):
        for position in range(keys - queries, keys):
            positions.append(position)
            slots.append(int(table[b, position // page]) * page + position % page)
    slots[0] = -1
    return given | {
        "k": k,
        "v": v,
        "slot_mapping": torch.tensor(slots),
        "positions": torch.tensor(positions),
        "rotation": how,
    }


def on_device(device: torch.device, given: dict[str, Any]) -> dict[str, Any]:
    how = given["rotation"]
    moved = HeadRotation(*(x.to(device) if isinstance(x, Tensor) else x for x in how))
    return on(device, given) | {"rotation": moved}


def check(
    given: dict[str, Any], *, quantized: bool = False, counted: bool = False, settled: bool = False
) -> None:
    """Check result, LSE and cache against ``rotary_store`` followed by ``paged_attention``.

    ``quantized``: whether the result is NVFP4; ``counted``: whether the op gets counters.
    """
    how, cache = given["rotation"], given["kv_cache"]
    names = "k", "v", "slot_mapping", "positions", "rotation"
    rest = {name: value for name, value in given.items() if name not in names}
    stored = cache.clone()
    rotated = rotary_store(
        given["q"], given["k"], given["v"], given["positions"], how.cos_sin_cache, stored,
        given["slot_mapping"], neox=how.neox, q_norm=how.q_norm, k_norm=how.k_norm, eps=how.eps,
        k_scale=given.get("k_scale"), v_scale=given.get("v_scale"),
    )  # fmt: skip
    q = given["q"]
    scale = torch.tensor(SCALE, device=q.device) if quantized else None
    output = None if scale is None else Static(scale)
    expected: Any = paged_attention(**rest | {"q": rotated, "kv_cache": stored}, output=output)
    more: dict[str, Any] = {}
    if counted:
        more["counters"] = torch.zeros(64, dtype=torch.int32, device=q.device)
    found, scales, lse = rotary_attention(**given, output=output, **more, settled=settled)
    assert torch.equal(found.cpu(), expected[0].cpu())
    assert torch.equal(lse.cpu(), expected[-1].cpu())
    assert torch.equal(cache.cpu().view(torch.uint8), stored.cpu().view(torch.uint8))
    if quantized:
        blocks = q.shape[1] * q.shape[2] // 16
        ours, theirs = (
            from_blocked(each.cpu(), len(q), blocks).view(torch.uint8)
            for each in (scales, expected[1])
        )
        assert torch.equal(ours, theirs)


HOW: dict[str, tuple[Case, dict[str, Any]]] = {
    "plain": (DECODE, {}),
    "neighbours": (DECODE, {"neox": False}),
    "partial, norms": (DECODE, {"rotary_dim": 32, "norms": True}),
    "fp8": (Case((1, 2), (140, 131), 4, 2, head_dim=128, fp8=True, page_size=32), {"norms": True}),
    "fp16, sinks, D = 96": (
        Case((2, 1), (40, 9), 2, 1, head_dim=96, dtype=torch.float16, sinks=True), {}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("quantized", [False, True], ids=["16-bit", "NVFP4"])
def test_reference(name: str, quantized: bool) -> None:
    case, how = HOW[name]
    check(arguments(case, rotation(case, **how)), quantized=quantized)


@SM100
@ONE_SCHEDULE
@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("settled", [False, True], ids=["", "settled"])
def test_kernel(name: str, settled: bool, op_device: torch.device) -> None:
    case, how = HOW[name]
    check(on_device(op_device, arguments(case, rotation(case, **how))), settled=settled)


@SM100
@ONE_SCHEDULE
@pytest.mark.parametrize("fp8", [False, True], ids=["16-bit", "fp8"])
def test_pages_of_nan_do_not_matter(fp8: bool, op_device: torch.device) -> None:
    case = replace(DECODE, window=20, sinks=True, fp8=fp8)
    given = arguments(case, rotation(case))
    check(on_device(op_device, with_pages_of_nan(given, case)))


@SM100
@pytest.mark.parametrize("splits", [1, 3])
def test_every_schedule(
    splits: int, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    Chosen(AttentionTile(64, warp_split_kv=True), splits).use(monkeypatch)
    given = arguments(DECODE, rotation(DECODE, norms=True))
    check(on_device(op_device, given), quantized=True, counted=True, settled=splits > 1)


@SM100
@ONE_SCHEDULE
@pytest.mark.parametrize(
    "tile",
    [AttentionTile(64), AttentionTile(64, fp8=True, ctas_per_sm=2)],
    ids=["a row to a thread", "fp8"],
)
def test_tiles(
    tile: AttentionTile, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    Chosen(tile, 2).use(monkeypatch)
    case = Case((17, 1), (150, 9), 4, 2, head_dim=64, fp8=tile.fp8)
    check(on_device(op_device, arguments(case, rotation(case))), settled=tile.fp8)


def changed_by(**changes: Any) -> dict[str, Any]:
    return arguments(DECODE, rotation(DECODE)) | changes


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "too many queries": ({"max_query_len": 65}, "max_query_len: is 65, must be at most 64 with 4"),
    "slots": ({"slot_mapping": torch.tensor([1])}, "slot_mapping: has 1 elements, must have 5"),
    "positions": (
        {"positions": torch.tensor([299, 127, 128, 130, 128])},
        "positions: of sequence 1 are .127, 128, 130., must be those of its last keys",
    ),
    "a pair": (
        {"out": (torch.empty(1), torch.empty(1))}, "out: is a pair of tensors, must be one tensor"
    ),
    "no pair": (
        {"out": torch.empty(1), "output": Static(torch.tensor(SCALE))},
        "out: is Tensor, must be a pair of tensors",
    ),
    "output": ({"output": torch.tensor(SCALE)}, "output: is a Tensor, must be None or Static"),
    "terms": ({"output": Static(torch.tensor(SCALE), 2)}, "output.terms: is 2, must be 1"),
    "first_row": ({"first_row": 1}, "first_row: is 1, must be 0"),
    "out": ({"out": torch.empty(1)}, "out: dtype is float32"),
    "table": ({"rotation": HeadRotation(torch.empty(4, 65))}, "cos_sin_cache"),
    "counters": ({"counters": torch.zeros(1, dtype=torch.int32)}, "counters: has 1 elements"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(InvalidArgument, match=message):
        rotary_attention(**changed_by(**changes))


def test_opcheck() -> None:
    given = arguments(DECODE, rotation(DECODE))
    tensors = (
        "q", "k", "v", "kv_cache", "block_table", "seq_lens", "query_start", "slot_mapping",
        "positions",
    )  # fmt: skip
    check_op(
        torch.ops.nvfp4.rotary_attention.default,
        (
            torch.empty_like(given["q"]), None, *(given[name] for name in tensors),
            given["rotation"].cos_sin_cache, None, None, None, None, None, None, True, None, 0,
            given["max_query_len"], given["max_seq_len"], None, None, None, None, True, False,
        ),
    )  # fmt: skip


# --- reads before the launch before has ended --------------------------------------------------


def after_a_launch(name: str, *, settled: bool) -> None:
    """Make the preceding launch write the argument ``name``."""
    given = arguments(DECODE, rotation(DECODE))
    if name == "kv_cache":  # keys of other positions
        k, slots = given["k"], torch.arange(len(given["k"]))
        rest = torch.zeros(len(k), dtype=torch.int64), given["rotation"].cos_sin_cache
        rotary_store(given["q"], k, given["v"], *rest, given["kv_cache"], slots)
    else:
        x = given[name].unsqueeze(0)
        given[name] = attention(x, x, x)[0][0]
    rotary_attention(**given, settled=settled)


@SM100
@pytest.mark.parametrize("splits", [1, 3])
def test_new_values_are_waited_for(splits: int) -> None:
    chosen = Chosen(AttentionTile(64, warp_split_kv=True), splits)

    def use(patch: pytest.MonkeyPatch) -> None:
        def choose(problem: Any, sms: int) -> Any:
            return chosen(problem, sms) if problem.batch == len(DECODE.keys) else plain

        plain = AttentionTile(64), 1
        patch.setattr(
            import_module("nvfp4_kernels.attention.sm100.launch"), "choose_config", choose
        )

    pairs = [partial(after_a_launch, name, settled=True) for name in "qkv"]
    check_nothing_to_catch(lambda: [pair() for pair in pairs], use, schedules=[EAGER])
    with compiled_anew(NO_DEPENDENCY_WAIT, use):
        for pair in pairs:
            unwaited().check(first_noticed(pair, [EAGER]))


@SM100
def test_older_keys_are_not_waited_for_if_settled() -> None:
    with devices.emulated_ops(EAGER):
        after_a_launch("kv_cache", settled=False)
    with devices.emulated_ops(EAGER), pytest.raises(MissingDependencyWait):
        after_a_launch("kv_cache", settled=True)


KERNEL = Room("nvfp4_kernels.attention.sm100")
MUTANTS = {
    "new keys are not fenced": Mutant(
        without("fence_proxy", said("async_global")), "MissingProxyFence"
    ),
    "new keys are stored late": Mutant(
        KERNEL.with_result("rotating:NewKeys", "first_tile", lambda tile: tile + 1), ANYTHING
    ),
    "new keys are stored one slot on": Mutant(
        KERNEL.with_arguments(
            "rotating", "store_pair", lambda a, b, slot, *c: (a, b, slot + 1, *c)
        ),
        ANYTHING,
    ),
    "halves of queries change places": Mutant(
        KERNEL.with_arguments(
            "rotating:RotatingQueryLoader", "_copy", lambda *a: (*a[:-1], a[-1][::-1])
        ),
        WRONG,
    ),
    "dead rows are not zeroed": Mutant(
        KERNEL.replaced("rotating:RotatingQueryLoader", "_zero", nothing), "UninitialisedRead"
    ),
}


def check_tile() -> None:
    check(arguments(DECODE, rotation(DECODE)))


CHOSEN = Chosen(AttentionTile(64, warp_split_kv=True), 2)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_caught(mutant: Mutant) -> None:
    check_caught(mutant, check_tile, CHOSEN.use)


def test_nothing_to_catch() -> None:
    check_nothing_to_catch(check_tile, CHOSEN.use, schedules=[EAGER])
