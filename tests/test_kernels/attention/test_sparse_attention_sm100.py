"""``sparse_attention`` on sm_100: the reference's cases and others, through the public op."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from nvfp4_kernels import InvalidArgument, merge_segments, paged_attention, sparse_attention
from nvfp4_kernels.attention.sm100 import choose
from nvfp4_kernels.attention.sm100.tile import AttentionTile
from tests import devices
from tests.emulator import STANDARD
from tests.test_kernels.attention.attention_cases import BF16, Case
from tests.test_kernels.attention.attention_sm100 import Chosen, check
from tests.test_kernels.attention.sparse_cases import (
    CASES,
    SparseCase,
    SparseProblem,
    all_keys,
    positions,
    with_lists,
)
from tests.test_kernels.attention.test_attention_sm100 import on

pytestmark = pytest.mark.arch("sm_100")
ONE_SCHEDULE = pytest.mark.schedules("random 1")
TWO_SCHEDULES = pytest.mark.schedules("random 2", "all late")

# Lengths around one gather of four rows and a tile of 128; sequences of one and of several tokens.
ENDS: dict[str, Any] = {
    "queries": (1, 2, 3, 1),
    "keys": (300, 140, 131, 9),
    "listed": (129, 128, 127, 4, 3, 1, 0),
    "width": 131,
}
ONE_HEAD: dict[str, Any] = {"query_heads": 2, "heads": 1}
KERNELS = {
    "D = 64, MHA": SparseCase(**ENDS, query_heads=2, heads=2),
    "D = 64, MQA of 128": SparseCase(**ENDS, query_heads=128, heads=1),
    "D = 16": SparseCase(**ENDS, **ONE_HEAD, head_dim=16),
    "D = 128, pages of 64": SparseCase(**ENDS, query_heads=4, heads=1, head_dim=128, page_size=64),
    "D = 256, MQA of 130": SparseCase(**ENDS, query_heads=130, heads=1, head_dim=256),
    "fp8, D = 128": SparseCase(
        **ENDS, query_heads=16, heads=1, head_dim=128, fp8=True, page_size=64
    ),
    "everything, D = 96": replace(CASES["everything"], head_dim=96),
    "long lists": SparseCase((1, 1), (1100, 600), **ONE_HEAD, listed=(1030, 513), width=1031),
}
# Other qhead_per_kvhead and sizes of the first kernel.
SIZES = {
    "groups of 4": SparseCase(**ENDS, query_heads=8, heads=2),
    "groups of 16, heads after tokens": SparseCase(**ENDS, query_heads=16, heads=1, by_token=True),
    "MQA of 64": SparseCase(**ENDS, query_heads=64, heads=1),
    "lists of no columns": CASES["lists of no columns"],
    "no sequence": CASES["no sequence"],
}


@pytest.fixture(autouse=True)
def exponentials_by_mufu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute exponentials by MUFU: that compiles faster and does not affect gathers."""
    monkeypatch.setattr(choose, "EMULATED_EXP2", 0)


def run(problem: SparseProblem, device: torch.device) -> None:
    out, lse = sparse_attention(**on(device, problem.sparse()))
    check((out.cpu(), lse.cpu()), problem)


@TWO_SCHEDULES
@pytest.mark.parametrize("name", KERNELS)
def test_cases(name: str, op_device: torch.device) -> None:
    run(KERNELS[name].problem(), op_device)


@ONE_SCHEDULE
@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str, op_device: torch.device) -> None:
    run(SIZES[name].problem(), op_device)


# --- tiles that choose_config has no reason to take here ----------------------------------------

SHARED = AttentionTile(64, 1, ctas_per_sm=2)
TILES = {
    "three splits": (Chosen(SHARED, 3), {"sinks": True}),
    "more splits than key tiles": (Chosen(SHARED, 7), {}),
    "two query tiles": (Chosen(AttentionTile(64, 2)), {"query_heads": 200}),
}


@ONE_SCHEDULE
@pytest.mark.parametrize("name", TILES)
def test_tiles(name: str, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, changed = TILES[name]
    chosen.use(monkeypatch)
    case = SparseCase((2, 1), (600, 20), listed=(523, 0, 7), width=523, **ONE_HEAD | changed)
    run(case.problem(), op_device)


def test_same_bits_in_every_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()
    case = SparseCase((1,), (600,), **ONE_HEAD, listed=(523,), width=523)
    problem = case.problem()
    arguments = problem.sparse()
    results = []
    for schedule in STANDARD:
        with devices.emulated_ops(schedule):
            Chosen(SHARED, 3).use(monkeypatch)
            results.append(sparse_attention(**arguments))
    check(results[0], problem)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


# --- exact results ------------------------------------------------------------------------------


@ONE_SCHEDULE
@pytest.mark.parametrize("name", ["D = 64, MHA", "D = 16", "D = 256, MQA of 130", "fp8, D = 128"])
def test_picks_every_column(name: str, op_device: torch.device) -> None:
    """Each head puts all its weight on one key of the token's list; values are an identity."""
    given, tokens = KERNELS[name], 4
    head_dim, heads = given.head_dim, given.head_dim // tokens
    case = Case(
        (tokens,), (head_dim,), heads, 1, head_dim, given.page_size, fp8=given.fp8, scale=1.0
    )  # fmt: skip
    problem, identity = case.problem(), torch.eye(head_dim)
    chosen = torch.randperm(head_dim).view(tokens, heads)
    lists = []
    for one in chosen.tolist():
        listed = set(one) | set(torch.randperm(head_dim)[:7].tolist())
        lists.append([list(listed)[n] for n in torch.randperm(len(listed)).tolist()])
    stored = identity.to(problem.k.dtype).unsqueeze(1)
    problem = replace(problem, q=(256 * identity[chosen]).to(BF16), k=stored, v=stored)
    arguments = with_lists(problem, lists).sparse()
    if given.fp8:
        arguments |= {"k_scale": torch.tensor(1.0), "v_scale": torch.tensor(1.0)}
    out, lse = sparse_attention(**on(op_device, arguments))
    assert torch.equal(out.cpu(), identity[chosen].to(BF16))
    # The scale of a quantised row is 256 / 448, in float32.
    torch.testing.assert_close(lse.cpu(), torch.full_like(lse.cpu(), 256.0), rtol=1e-6, atol=0)


# --- against related ops -----------------------------------------------------------------------


@ONE_SCHEDULE
def test_all_keys_are_those_of_paged_attention(op_device: torch.device) -> None:
    """Lists of all keys give the bits of paged attention, which has the same key tiles."""
    problem = all_keys(Case((1, 1, 1), (300, 128, 17), **ONE_HEAD, window=300))
    found = sparse_attention(**on(op_device, problem.sparse()))
    expected = paged_attention(**on(op_device, problem.paged()))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@ONE_SCHEDULE
def test_window_and_list_are_attention_to_both(op_device: torch.device) -> None:
    case = Case((1, 5, 1), (70, 40, 6), window=8, sinks=True)
    problem = case.problem()
    window = [list(range(max(0, at - 7), at + 1)) for at in positions(case)]
    before = [torch.randperm(max(0, at - 7))[:11].tolist() for at in positions(case)]
    assert [] in before
    arguments = [problem.paged(), with_lists(problem, before).sparse()]
    windowed, listed = (on(op_device, given | {"sinks": None}) for given in arguments)
    segments = [paged_attention(**windowed), sparse_attention(**listed)]
    outs, lses = (torch.stack(x) for x in zip(*segments, strict=True))
    assert problem.sinks is not None
    out, lse = merge_segments(outs, lses, problem.sinks.to(op_device))
    both = with_lists(problem, [a + b for a, b in zip(window, before, strict=True)])
    expected, log = both.formula()
    # Each segment is rounded to BF16, as are its weights and the merged result; values lie within
    # ±5.
    torch.testing.assert_close(out.cpu().double(), expected, rtol=2**-8, atol=2**-6)
    torch.testing.assert_close(lse.cpu().double(), log, rtol=1e-6, atol=1e-5)


# --- layouts and memory that must not be read ---------------------------------------------------


@ONE_SCHEDULE
def test_strides(op_device: torch.device) -> None:
    """Strided views: lists in a wider buffer, q in a projection, one layer of a shared cache."""
    problem = CASES["mixed"].problem()
    arguments = problem.sparse()
    q, cache, indices = (arguments[name] for name in ("q", "kv_cache", "indices"))
    projected = torch.full((len(q), 8, 64), math.nan, dtype=BF16)
    projected[:, 2:6] = q
    layers = torch.full((len(cache), 3, *cache.shape[1:]), math.nan, dtype=BF16)
    layers[:, 1] = cache
    wide = torch.cat([indices, torch.full_like(indices, 1 << 29)], 1)[:, : indices.shape[1]]
    arguments |= {"q": projected[:, 2:6], "kv_cache": layers[:, 1], "indices": wide}
    out, lse = sparse_attention(**on(op_device, arguments))
    check((out.cpu(), lse.cpu()), problem)


@ONE_SCHEDULE
def test_rows_after_the_last_sequence(op_device: torch.device) -> None:
    """A captured graph has more rows than a step needs: their lists are not followed."""
    problem = CASES["mixed"].problem()
    arguments = problem.sparse()
    padding = {"q": math.nan, "indices": 1 << 30, "lens": 1 << 30}
    for name, value in padding.items():
        given = arguments[name]
        arguments[name] = torch.cat([given, torch.full_like(given[:5], value)])
    out, lse = sparse_attention(**on(op_device, arguments))
    check((out[:-5].cpu(), lse[:-5].cpu()), problem)


@ONE_SCHEDULE
def test_many_sequences(op_device: torch.device) -> None:
    """More sequences than a warp looks up at a time; most have no tokens, nor has the last."""
    tokens = (0, 31, 32, 33, 255, 256, 257, 298)
    counts = tuple(int(n in tokens) for n in range(300))
    case = SparseCase(counts, (3,) * 300, **ONE_HEAD, listed=(2,) * len(tokens), width=2)
    run(case.problem(), op_device)


# --- errors -------------------------------------------------------------------------------------


def cache(*strides: int, width: int = 128, counts: tuple[int, int, int] = (6, 2, 16)) -> Any:
    return torch.empty_strided((*counts, width), (*strides, 1), dtype=BF16, device="meta")


@ONE_SCHEDULE
@pytest.mark.usefixtures("op_device")
def test_gather_view() -> None:
    from nvfp4_kernels.attention.sm100.launch_sparse import MAX_MAP_ROWS, gather_view

    def view(*strides: int, **sizes: Any) -> tuple[int, int]:
        return gather_view(cache(*strides, **sizes), "sm_100")

    assert view(4096, 2048, 128) == (128, 6 * 2 * 16)
    assert view(4096, 128, 256) == (128, 6 * 2 * 16)  # heads after tokens
    assert view(4096 * 3, 2048, 128) == (128, (5 * 3 + 1) * 32)  # one of three layers
    assert view(4096 + 64, 2048, 128) == (64, 5 * 65 + 62 + 1)
    assert view(7, 3, 128, counts=(1, 1, 16)) == (128, 16)
    assert view(7, 3, 5, counts=(1, 1, 1)) == (128, 1)
    with pytest.raises(InvalidArgument, match=r"kv_cache: strides are .*, multiples of 32 .*64,"):
        view(4096 + 32, 2048, 128)
    pages = MAX_MAP_ROWS // 32
    assert view(4096, 2048, 128, counts=(pages, 2, 16))[1] == MAX_MAP_ROWS - 31
    with pytest.raises(InvalidArgument, match="kv_cache: spans 2147483648 rows of 128 elements"):
        view(4096, 2048, 128, counts=(pages + 1, 2, 16))


@ONE_SCHEDULE
def test_errors(op_device: torch.device) -> None:
    def refuses(arguments: dict[str, Any], match: str) -> None:
        with pytest.raises(InvalidArgument, match=match):
            sparse_attention(**on(op_device, arguments))

    def small(**changed: Any) -> dict[str, Any]:
        return SparseCase((1,), (9,), listed=(5,), **changed).problem().sparse()

    refuses(small(head_dim=16, fp8=True), "kv_cache: is float8_e4m3fn with D of 16")
    arguments = small()
    wide = torch.zeros(*arguments["q"].shape[:-1], 68, dtype=BF16)
    refuses(arguments | {"q": wide[..., 4:]}, "q: starts 8 bytes after a multiple of 16")
    given = arguments["kv_cache"]
    odd = torch.zeros(*given.shape[:-1], 132, dtype=BF16)[..., :128]
    refuses(arguments | {"kv_cache": odd}, "kv_cache: stride . is .* must be a multiple of 16")
    overlapping = torch.zeros(len(given), 2 * 16 * 128 + 8, dtype=BF16)[:, : 2 * 16 * 128]
    apart = overlapping.view(len(given), 2, 16, 128)
    refuses(arguments | {"kv_cache": apart}, "kv_cache: strides are .*, multiples of 8 elements")
