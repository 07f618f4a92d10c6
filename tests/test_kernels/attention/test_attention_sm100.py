"""``attention`` and ``paged_attention`` on sm_100: the references' cases, by the public ops."""

import math
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import InvalidArgument, attention, paged_attention
from nvfp4_kernels.attention.sm100.tile import AttentionTile
from tests.test_kernels.attention.attention_cases import (
    BF16,
    CASES,
    FP16,
    LARGE_CASES,
    MIXED,
    UNSEEN,
    Case,
    Problem,
    growing_by_parts,
    small_weights,
    unseen,
    with_pages_of_nan,
)
from tests.test_kernels.attention.attention_sm100 import Chosen, check

pytestmark = pytest.mark.arch("sm_100")
ONE_SCHEDULE = pytest.mark.schedules("random 1")

# More than one query tile, and more than two; qhead_per_kvhead that does not divide a tile.
PREFILL = {
    "two query tiles, D = 64": Case((300, 40), (420, 130), 2, 1),
    "two query tiles, D = 128": Case((300, 40), (420, 130), 2, 1, head_dim=128),
    "groups of 3": Case((70, 5), (300, 5), 3, 1, head_dim=128),
    "groups of 7": Case((45, 20), (190, 20), 7, 1, page_size=32),
    "one tile of 192": Case((70,), (300,), 2, 1, head_dim=192),
    "not causal": Case((150, 20), (200, 257), 2, 1, head_dim=128, causal=False),
    "window": Case((150, 20), (400, 257), 2, 1, head_dim=128, window=100),
    "fp8": Case((150, 20), (300, 257), 2, 1, head_dim=128, fp8=True),
    "fp8, D = 256": Case((20,), (257,), 4, 1, head_dim=256, fp8=True, page_size=64),
    "pages larger than a tile": Case((20, 3), (400, 257), 2, 1, page_size=256),
    "warp split": Case((2, 1, 5), (300, 129, 40), 4, 1),
    "warp split, fp8": Case((1, 3, 8), (300, 257, 9), 4, 1, fp8=True, sinks=True, page_size=32),
}
EVERY_SCHEDULE = (
    "two query tiles, D = 64", "two query tiles, D = 128", "one tile of 192", "fp8", "warp split",
    "warp split, fp8",
)  # fmt: skip


def on(device: torch.device, arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}


def run_paged(problem: Problem, device: torch.device) -> None:
    out, lse = paged_attention(**on(device, problem.paged()))
    check((out.cpu(), lse.cpu()), problem)


def supported(case: Case) -> bool:
    return not case.fp8 or case.head_dim != 16


@ONE_SCHEDULE
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if supported(case)])
def test_paged(name: str, op_device: torch.device) -> None:
    run_paged(CASES[name].problem(), op_device)


@ONE_SCHEDULE
@pytest.mark.parametrize("name", [name for name, case in LARGE_CASES.items() if supported(case)])
def test_large(name: str, op_device: torch.device) -> None:
    run_paged(LARGE_CASES[name].problem(), op_device)


@ONE_SCHEDULE
@pytest.mark.parametrize("name", [name for name in PREFILL if name not in EVERY_SCHEDULE])
def test_prefill(name: str, op_device: torch.device) -> None:
    run_paged(PREFILL[name].problem(), op_device)


@pytest.mark.parametrize("name", EVERY_SCHEDULE)
def test_every_schedule(name: str, op_device: torch.device) -> None:
    run_paged(PREFILL[name].problem(), op_device)


@ONE_SCHEDULE
@pytest.mark.parametrize("name", ["mixed", "more queries than keys"])
def test_ragged(name: str, op_device: torch.device) -> None:
    problem = CASES[name].problem()
    out, lse = attention(**on(op_device, problem.ragged()))
    check((out.cpu(), lse.cpu()), problem)


@ONE_SCHEDULE
@pytest.mark.parametrize(
    ("heads", "causal"), [((2, 2), True), ((5, 1), False)], ids=["MHA, causal", "MQA, full"]
)
def test_dense(heads: tuple[int, int], causal: bool, op_device: torch.device) -> None:
    problem = Case((150, 150), (200, 200), *heads, causal=causal).problem()
    arguments = on(op_device, problem.dense())
    out, lse = attention(**arguments)
    assert out.shape == arguments["q"].shape
    assert lse.shape == arguments["q"].shape[:-1]
    check((out.cpu(), lse.cpu()), problem)


# --- tiles that choose_config has no reason to take here ----------------------------------------

LONG = {"queries": (70, 1, 2), "keys": (300, 500, 9), "query_heads": 4, "heads": 2}
FEW = {"queries": (16, 1, 3), "heads": 2}  # blocks of 32 rows
TILES = {
    "three splits": (Chosen(AttentionTile(64, 1), 3), {"sinks": True}),
    "more splits than key tiles": (Chosen(AttentionTile(128, 1), 7), {}),
    "two splits of two query tiles": (Chosen(AttentionTile(64, 2), 2), {"window": 300}),
    "splits, fp8": (Chosen(AttentionTile(64, 1, fp8=True, ctas_per_sm=2), 2), {"dtype": FP16}),
    "splits, fp8, D = 96": (Chosen(AttentionTile(96, 1, fp8=True), 2), {}),
    "splits, D = 80": (Chosen(AttentionTile(80, 1), 2), {}),
    "two query tiles, D = 112": (Chosen(AttentionTile(112, 2)), {}),
    "two to an SM": (Chosen(AttentionTile(64, 1, ctas_per_sm=2)), {}),
    "two to an SM, D = 128": (Chosen(AttentionTile(128, 1, ctas_per_sm=2)), {"sinks": True}),
    "a ring of two": (Chosen(AttentionTile(96, 2, max_stages=2)), {}),
    "exponentials by FMA": (Chosen(AttentionTile(64, 2, emulated_exp2=16)), {"window": 90}),
    "exponentials by MUFU": (Chosen(AttentionTile(64, 2, emulated_exp2=0)), {"sinks": True}),
    "warp split, three splits": (Chosen(AttentionTile(64, warp_split_kv=True), 3), {"sinks": True}),
    "warp split, blocks of rows": (Chosen(AttentionTile(80, warp_split_kv=True)), {}),
    "warp split, window": (Chosen(AttentionTile(128, warp_split_kv=True), 2), FEW | {"window": 77}),
    "warp split, soft cap": (
        Chosen(AttentionTile(48, warp_split_kv=True)),
        FEW | {"soft_cap": 3.0},
    ),
    "warp split, fp8, D = 96": (
        Chosen(AttentionTile(96, fp8=True, warp_split_kv=True), 2),
        {"dtype": FP16},
    ),
    "warp split, D = 256": (Chosen(AttentionTile(256, warp_split_kv=True)), FEW),
    "warp split, one warp's rows": (
        Chosen(AttentionTile(16, warp_split_kv=True, ctas_per_sm=2)),
        FEW,
    ),
    "no warp split": (Chosen(AttentionTile(64)), FEW),
}


@ONE_SCHEDULE
@pytest.mark.parametrize("name", TILES)
def test_tiles(name: str, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, changed = TILES[name]
    chosen.use(monkeypatch)
    tile = chosen.tile
    case = Case(**LONG | {"head_dim": tile.head_dim, "fp8": tile.fp8} | changed)
    run_paged(case.problem(), op_device)


# --- exact results ------------------------------------------------------------------------------


EXACT = [(head_dim, BF16, False) for head_dim in (16, 64, 80, 96, 128, 192, 240, 256)]
EXACT += [(64, FP16, False), (96, BF16, True), (128, BF16, True), (256, BF16, True)]


@ONE_SCHEDULE
@pytest.mark.parametrize(("head_dim", "dtype", "fp8"), EXACT, ids=str)
def test_picks_every_column(
    head_dim: int, dtype: torch.dtype, fp8: bool, op_device: torch.device
) -> None:
    """Each query puts all its weight on one key, whose value is a row of the identity."""
    identity = torch.eye(head_dim)
    case = Case(
        (head_dim,), (head_dim,), 1, 1, head_dim, causal=False, dtype=dtype, fp8=fp8, scale=1.0
    )
    problem = case.problem()
    chosen = torch.randperm(head_dim)
    stored = identity.to(problem.k.dtype).unsqueeze(1)
    q = (256 * identity[chosen]).to(dtype).unsqueeze(1)
    problem = replace(problem, q=q, k=stored, v=stored)
    arguments = problem.paged()
    if fp8:
        arguments |= {"k_scale": torch.tensor(1.0), "v_scale": torch.tensor(1.0)}
    out, lse = paged_attention(**on(op_device, arguments))
    assert torch.equal(out.cpu(), identity[chosen].to(dtype).unsqueeze(1))
    # The scale of a quantised row is 256 / 448, in float32.
    torch.testing.assert_close(lse.cpu(), torch.full((head_dim, 1), 256.0), rtol=1e-6, atol=0)


@ONE_SCHEDULE
@pytest.mark.parametrize("queries", [1, 140], ids=["decode", "prefill"])
def test_small_weights_of_many_keys_count(queries: int, op_device: torch.device) -> None:
    """Weights of less than 2^-21 of the largest are multiples of 2^-32 of it."""
    problem = small_weights(queries, 1025)
    out, _ = paged_attention(**on(op_device, problem.paged()))
    expected, _ = problem.formula()
    torch.testing.assert_close(out.cpu().double(), expected, rtol=2.0**-6, atol=1e-6)


# --- the running maximum ------------------------------------------------------------------------


@pytest.mark.parametrize("growth", [0.0, 3.0, 40.0], ids=["none", "within the slack", "beyond"])
@ONE_SCHEDULE
def test_maximum_grows(growth: float, op_device: torch.device) -> None:
    """O is rescaled only where the maximum grows enough; LSE and O are right either way."""
    problem = Case((3, 2), (700, 513), 2, 1, scale=1.0).problem()
    ramp = torch.cat([torch.arange(n) // 128 for n in problem.case.keys])
    k = 0.05 * problem.k.float()
    k[..., 0] = growth * ramp.unsqueeze(1)
    q = problem.q.float()
    q[..., 0] = 1.0
    problem = replace(problem, q=q.to(BF16), k=k.to(BF16))
    run_paged(problem, op_device)


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@ONE_SCHEDULE
def test_maximum_grows_between_parts(fp8: bool, op_device: torch.device) -> None:
    """O is rescaled for a key tile's second half after PV of the tile's first half has begun."""
    run_paged(growing_by_parts(fp8, 400), op_device)


# --- memory that must not be read ---------------------------------------------------------------


@ONE_SCHEDULE
def test_keys_out_of_every_window_do_not_matter(op_device: torch.device) -> None:
    """Pages before the window, which vLLM frees, are never read."""
    problem = Case((1, 3), (300, 264), window=20).problem()
    arguments = problem.paged()
    cache, table = arguments["kv_cache"], arguments["block_table"]
    garbage = min(set(range(len(cache))) - set(table.flatten().tolist()))
    assert cache[garbage].isnan().all()
    table[0, : (300 - 20) // 16] = garbage
    table[1, : (264 - 2 - 20) // 16] = garbage
    out, lse = paged_attention(**on(op_device, arguments))
    check((out.cpu(), lse.cpu()), problem)


# Half of the combinations: every pair of properties occurs.
UNSEEN_HERE = {
    name: case
    for name, case in UNSEEN.items()
    if case.sinks == ((case.window is not None) ^ case.fp8)
}


@ONE_SCHEDULE
@pytest.mark.parametrize("case", UNSEEN_HERE.values(), ids=UNSEEN_HERE)
def test_pages_of_nan_do_not_matter(case: Case, op_device: torch.device) -> None:
    problem = unseen(case)
    arguments = with_pages_of_nan(problem.paged(), case)
    out, lse = paged_attention(**on(op_device, arguments))
    check((out.cpu(), lse.cpu()), problem)


@ONE_SCHEDULE
@pytest.mark.parametrize(
    "chosen",
    [
        Chosen(AttentionTile(64)),
        Chosen(AttentionTile(64, 2, fp8=True)),
        Chosen(AttentionTile(64), 3),
        Chosen(AttentionTile(64, fp8=True, warp_split_kv=True), 2),
    ],
    ids=["one split", "fp8", "three splits", "warp split, fp8, two splits"],
)
def test_sinks_of_minus_infinity_are_none(
    chosen: Chosen, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sink of −inf, as padded heads have, changes nothing; some rows see no key."""
    chosen.use(monkeypatch)
    problem = Case((1, 3, 2), (140, 20, 0), sinks=True, fp8=chosen.tile.fp8).problem()
    problem.sinks[:] = -math.inf
    out, lse = paged_attention(**on(op_device, problem.paged()))
    assert not out.isnan().any()
    check((out.cpu(), lse.cpu()), replace(problem, sinks=None))


@ONE_SCHEDULE
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("how", ["dense", "ragged", "paged"])
def test_no_key_at_all(how: str, sinks: bool, op_device: torch.device) -> None:
    """No keys at all: no tensor map can be made of an empty tensor."""
    problem = Case((3, 3), (5, 5), 2, 1, sinks=sinks).problem()
    given = on(op_device, getattr(problem, how)())
    if how == "paged":
        given["kv_cache"] = given["kv_cache"][:0]
        given["seq_lens"] = torch.zeros_like(given["seq_lens"])
    else:
        axis = 1 if how == "dense" else 0
        given |= {name: given[name].narrow(axis, 0, 0) for name in ("k", "v")}
    if how == "ragged":
        given |= {"key_start": torch.zeros_like(given["key_start"]), "max_key_len": 0}
    op = paged_attention if how == "paged" else attention
    out, lse = op(**given | {"causal": False})
    assert not out.any()
    expected = given["sinks"] if sinks else torch.tensor(-torch.inf)
    assert torch.equal(lse.cpu(), expected.cpu().expand(lse.shape))


@ONE_SCHEDULE
def test_more_sequences_than_a_grid_has_room_for(
    op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = on(op_device, Case((1, 1), (9, 9)).problem().paged())
    monkeypatch.setattr(import_module("nvfp4_kernels.attention.sm100.launch"), "MAX_BATCH", 1)
    with pytest.raises(InvalidArgument, match="q: has 2 sequences, must have at most 1 on sm_100"):
        paged_attention(**given)


@ONE_SCHEDULE
@pytest.mark.parametrize("how", ["dense", "paged"])
def test_more_queries_than_a_grid_has_room_for(
    how: str, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Case((300,), (300,)).problem()
    given = on(op_device, getattr(problem, how)())
    module = import_module("nvfp4_kernels.attention.sm100.launch")
    monkeypatch.setattr(module, "MAX_QUERY_TILES", 1)
    came = "max_query_len: is 300, must be" if how == "paged" else "q: has 300 .*, must have"
    match = rf"{came} at most \d+ with \d+ query heads per KV head on sm_100; split the queries"
    with pytest.raises(InvalidArgument, match=match):
        (paged_attention if how == "paged" else attention)(**given)


@ONE_SCHEDULE
@pytest.mark.parametrize("magnitude", [1e-30, 1e-36, 1e-38])
def test_tiny_queries_beside_an_fp8_cache(magnitude: float, op_device: torch.device) -> None:
    """Tiny queries weigh all keys alike; a scale of maximum / 448 would have no finite inverse."""
    problem = Case((1, 1), (40, 9), fp8=True, head_dim=64).problem()
    given = on(op_device, problem.paged())
    tiny = torch.zeros_like(given["q"])
    tiny[..., 0] = magnitude
    expected = paged_attention(**given | {"q": torch.zeros_like(tiny)})
    for found, like in zip(paged_attention(**given | {"q": tiny}), expected, strict=True):
        torch.testing.assert_close(found, like)


@ONE_SCHEDULE
@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**33 + 5])
def test_a_window_wider_than_any_sequence(window: int, op_device: torch.device) -> None:
    problem = Case((1, 3), (300, 264)).problem()
    given = on(op_device, problem.paged()) | {"window": window}
    out, lse = paged_attention(**given)
    check((out.cpu(), lse.cpu()), problem)


@ONE_SCHEDULE
def test_strides(op_device: torch.device) -> None:
    """Strided views: q as a slice of a qkv projection, the cache of one layer among several."""
    problem = CASES["mixed"].problem()
    arguments = problem.paged()
    tokens, heads, head_dim = problem.q.shape
    wide = torch.full((tokens, heads + 5, head_dim), math.nan, dtype=BF16)
    wide[:, 2 : heads + 2] = arguments["q"]
    cache = arguments["kv_cache"]
    layers = torch.full((len(cache), 3, *cache.shape[1:]), math.nan, dtype=BF16)
    layers[:, 1] = cache
    arguments |= {"q": wide[:, 2 : heads + 2], "kv_cache": layers[:, 1]}
    out, lse = paged_attention(**on(op_device, arguments))
    check((out.cpu(), lse.cpu()), problem)


@ONE_SCHEDULE
def test_rows_after_the_last_sequence(op_device: torch.device) -> None:
    """A captured graph has more rows than a step needs; sequences without tokens fill the batch."""
    problem = Case((2, 1, 0, 0), (40, 30, 0, 0)).problem()
    arguments = problem.paged()
    padded = torch.full((8, *problem.q.shape[1:]), math.nan, dtype=BF16)
    padded[:3] = arguments["q"]
    arguments |= {"q": padded, "max_query_len": 4}
    out, lse = paged_attention(**on(op_device, arguments))
    check((out[:3].cpu(), lse[:3].cpu()), problem)


# --- errors -------------------------------------------------------------------------------------


def small(**changed: Any) -> dict[str, Any]:
    return Case(**MIXED, **changed).problem().paged()


@ONE_SCHEDULE
def test_errors(op_device: torch.device) -> None:
    def refuses(arguments: dict[str, Any], match: str) -> None:
        with pytest.raises(InvalidArgument, match=match):
            paged_attention(**on(op_device, arguments))

    refuses(small(head_dim=16, fp8=True), "kv_cache: is float8_e4m3fn with D of 16")
    refuses(small(head_dim=80, fp8=True), "kv_cache: is float8_e4m3fn with D of 80")
    refuses(small(page_size=24), "kv_cache: page_size is 24, must be a power of two")
    refuses(small(page_size=8), "kv_cache: page_size is 8, must be a power of two")
    arguments = small()
    wide = torch.zeros(*arguments["q"].shape[:-1], 68, dtype=BF16)
    refuses(arguments | {"q": wide[..., :64]}, "q: stride 0 is 544 bytes|q: stride 1 is 136 bytes")
    refuses(arguments | {"q": wide[..., 4:]}, "q: starts 8 bytes after a multiple of 16")
    cache = arguments["kv_cache"]
    odd = torch.zeros(*cache.shape[:-1], 132, dtype=BF16)[..., :128]
    refuses(arguments | {"kv_cache": odd}, "kv_cache: stride . is .* must be a multiple of 16")
