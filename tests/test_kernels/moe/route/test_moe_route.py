"""``moe_route``: the reference against a slot-by-slot sort."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvfp4_kernels import InvalidArgument, moe_route
from nvfp4_kernels.moe.routing import TILE_TOKENS, Routing, max_tiles, tile_tokens_of
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.routing_cases import CASES, RoutingCase, check_routing
from tests.test_kernels.strategies import PROPERTY

EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@EVERY_CASE
def test_sorts_slots_into_tiles(case: RoutingCase) -> None:
    ids, expert_map = case.topk_ids(), case.expert_map()
    routing = moe_route(ids, case.experts, case.tile_tokens, expert_map)
    check_routing(routing, ids, expert_map, case.experts, case.tile_tokens)


@given(
    st.integers(0, 40),
    st.integers(1, 9),
    st.integers(1, 20),
    st.sampled_from(TILE_TOKENS[:3]),
    st.integers(0, 2**31),
)
@PROPERTY
def test_any_batch(tokens: int, top_k: int, experts: int, tile_tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, experts + 2, (tokens, top_k), dtype=torch.int32, generator=generator)
    check_routing(moe_route(ids, experts, tile_tokens), ids, None, experts, tile_tokens)


@given(st.integers(0, 300), st.integers(1, 20), st.sampled_from(TILE_TOKENS))
@PROPERTY
def test_bound_is_reached_and_never_passed(slots: int, experts: int, tile_tokens: int) -> None:
    def tiles(counts: list[int]) -> int:
        return sum(-(-count // tile_tokens) for count in counts)

    bound = max_tiles(slots, experts, tile_tokens)
    # Worst case: one slot for every expert that is reached, and all others to the first.
    reached = min(slots, experts)
    worst = [1] * reached
    for at in range(slots - reached):
        worst[at // tile_tokens % reached] += 1
    assert tiles(worst) <= bound
    best = max(tiles([slots - (reached - 1), *[1] * (reached - 1)]) if reached else 0, tiles(worst))
    assert bound - best <= reached


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "expected"),
    [(1, 8, 256, 8), (64, 8, 256, 8), (1024, 8, 256, 32), (8192, 8, 256, 256), (0, 8, 256, 8)],
)
def test_rows_of_a_tile(tokens: int, top_k: int, experts: int, expected: int) -> None:
    assert tile_tokens_of(tokens, top_k, experts) == expected
    assert tile_tokens_of(tokens, top_k, experts, most=16) == min(16, expected)


def test_is_one_op() -> None:
    case = CASES["round-robin map"]
    arguments = case.topk_ids(), case.expert_map(), case.experts, case.tile_tokens
    check_op(torch.ops.nvfp4.moe_route, arguments)
    calls = [((ids, case.expert_map()), {}) for ids in (case.topk_ids(), case.topk_ids()[:7])]
    check_compiled(
        lambda ids, expert_map: tuple(moe_route(ids, case.experts, 8, expert_map)), calls, graphs=1
    )


IDS = torch.zeros(3, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((IDS.long(), 4, 8), r"topk_ids: dtype is int64, must be int32"),
        ((IDS[0], 4, 8), r"topk_ids: shape is \(2,\), must be \(M, k\) with k from 1 to 32"),
        ((IDS[:, :0], 4, 8), r"topk_ids: shape is \(3, 0\), must be \(M, k\)"),
        ((IDS, 0, 8), r"num_experts: is 0, must be from 1 to 1024"),
        ((IDS, 4, 12), r"tile_tokens: is 12, must be one of 8, 16, 32, 64, 128, 256"),
        ((IDS, 4, 8, IDS[0].long()), r"expert_map: dtype is int64, must be int32"),
        ((IDS, 4, 8, IDS), r"expert_map: shape is \(3, 2\), must be \(E,\)"),
    ],
)
def test_refuses(arguments: tuple, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        moe_route(*arguments)


def test_a_map_of_no_expert_has_none() -> None:
    routing = moe_route(IDS, 4, 8, torch.empty(0, dtype=torch.int32))
    assert int(routing.groups[0]) == 0
    assert (routing.rows == -1).all()


def test_parts() -> None:
    routing = moe_route(IDS, 4, 16)
    assert isinstance(routing, Routing)
    assert (routing.tile_tokens, routing.top_k) == (16, 2)
