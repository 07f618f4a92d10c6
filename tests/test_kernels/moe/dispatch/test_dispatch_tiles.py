"""``moe_dispatch`` of a routing: each row is its token, quantised as by ``quantize``."""

import math

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import (
    Ids,
    InvalidArgument,
    Logits,
    PerToken,
    Router,
    Static,
    moe_dispatch,
    moe_route,
    quantize,
)
from nvfp4_kernels.formats.nvfp4 import from_blocked
from nvfp4_kernels.formats.terms import unstack_scales
from nvfp4_kernels.moe.routing import Routing
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.moe.dispatch.parts import tiles_of
from tests.test_kernels.routing_cases import CASES, RoutingCase

EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
BF16, FP16 = torch.bfloat16, torch.float16
SCALE = torch.tensor(0.004)


def routed(case: RoutingCase, k: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Routing]:
    """Tokens and their routing; tokens without an expert of this rank are NaN."""
    routing = case.routing(case.topk_ids())
    x = torch.randn(case.tokens, k).to(dtype)
    x[(routing.rows < 0).all(1)] = math.nan
    return x, routing


def linear_rows(scales: Tensor, terms: int, rows: int, k: int) -> Tensor:
    """Scales of tiles in the linear layout, as bytes ``(tiles, [terms,] T, K/16)``."""
    columns = k // 16
    linear = (
        from_blocked(scales, rows, columns)
        if terms == 1
        else unstack_scales(scales, terms, rows, columns)
    )
    return linear.view(torch.uint8)


def expected_tiles(values: Tensor, routing: Routing) -> Tensor:
    """Arrange the rows of all slots, ``(M · k, …)``, in the tiles in use; padding is zero."""
    used = int(routing.groups[0])
    slots = routing.slots[:used].long()
    out = values.new_zeros((*slots.shape, *values.shape[1:]))
    out[slots >= 0] = values[slots[slots >= 0]]
    return out


def per_slot(x: Tensor, routing: Routing, weights: Tensor | None) -> Tensor:
    """Token of every slot, times the slot's weight if there are weights."""
    rows = x.repeat_interleave(routing.top_k, 0)
    if weights is None:
        return rows
    return (rows.float() * weights.reshape(-1, 1)).to(x.dtype)


def check_tiles(
    result: tuple[Tensor, ...], x: Tensor, routing: Routing, weights: Tensor | None,
    scale: Tensor | None, terms: int,
) -> None:  # fmt: skip
    """Compare tiles bit for bit with the quantised slots; tiles not in use may hold anything.

    ``scale``: static global scale; None: a scale per token.
    """
    data, scales, *row_scale = result
    rows = per_slot(x, routing, weights)
    if len(rows) == 0:
        assert int(routing.groups[0]) == 0
        return
    # Each row is a matrix of its own, as terms are packed by the rows of a tile.
    single = rows.unsqueeze(1)
    output = PerToken(terms) if scale is None else Static(scale, terms)
    each = quantize(single, output)
    used, k = int(routing.groups[0]), x.shape[1]
    want = expected_tiles(each[0].squeeze(-2), routing)
    got = data[:used] if terms == 1 else data[:used].movedim(1, 2)
    assert torch.equal(got, want)
    linear = linear_rows(each[1], terms, 1, k).squeeze(-2)
    tiles = linear_rows(scales[:used], terms, routing.tile_tokens, k)
    got = tiles if terms == 1 else tiles.movedim(1, 2)
    assert torch.equal(got, expected_tiles(linear, routing))
    if scale is None:
        want = expected_tiles(each[2].squeeze(-1), routing)
        is_slot = routing.slots[:used] >= 0
        assert torch.equal(row_scale[0][:used], torch.where(is_slot, want, 1.0))


@EVERY_CASE
def test_rows_are_quantised_tokens(case: RoutingCase) -> None:
    x, routing = routed(case, 80)
    found = moe_dispatch(x, routing, Static(SCALE))
    assert found.routing is routing
    assert found.topk_weights is None
    check_tiles(tiles_of(found), x, routing, None, SCALE, 1)
    check_tiles(tiles_of(moe_dispatch(x, routing, PerToken())), x, routing, None, None, 1)


@pytest.mark.parametrize("terms", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["ids of no expert", "tiles of 32", "tiles of 64"])
def test_terms_and_weights(name: str, terms: int) -> None:
    x, routing = routed(CASES[name], 64, FP16)
    weights = torch.rand(routing.rows.shape)
    for output, scale in ((Static(SCALE, terms), SCALE), (PerToken(terms), None)):
        found = moe_dispatch(x, routing, output, weights)
        check_tiles(tiles_of(found), x, routing, weights, scale, terms)


@pytest.mark.parametrize("terms", [1, 3])
def test_rows_in_tiles(terms: int) -> None:
    """Rows that lie in tiles already, as after the first GEMM, are quantised in the same order."""
    x, routing = routed(CASES["ids of no expert"], 64)
    in_tiles = moe_dispatch(x, routing).data
    in_tiles[routing.slots < 0] = math.nan  # a product of padding may give NaN
    used = int(routing.groups[0])
    for output in (Static(SCALE, terms), PerToken(terms)):
        found, expected = (tiles_of(moe_dispatch(rows, routing, output)) for rows in (in_tiles, x))
        for got, want in zip(found, expected, strict=True):
            assert torch.equal(got[:used].view(torch.uint8), want[:used].view(torch.uint8))


@EVERY_CASE
def test_gathers_tokens(case: RoutingCase) -> None:
    x, routing = routed(case, 32)
    used = int(routing.groups[0])
    for weights in (None, torch.rand(routing.rows.shape)):
        found = moe_dispatch(x, routing, topk_weights=weights)
        assert found.scales is None
        assert found.row_scale is None
        expected = expected_tiles(per_slot(x, routing, weights), routing)
        assert torch.equal(found.data[:used], expected)


def test_each_is_one_op() -> None:
    x, routing = routed(CASES["linear map"], 64)
    weights = torch.rand(routing.rows.shape)
    check_op(torch.ops.nvfp4.moe_quantize, (x, *routing, SCALE, weights, 2))
    check_op(torch.ops.nvfp4.moe_quantize_per_token, (x, *routing, weights, 1))
    check_op(torch.ops.nvfp4.moe_gather, (x, *routing, weights))
    other, its = routed(CASES["ids of no expert"], 64)
    calls = [((x, *routing), {}), ((other, *its), {})]

    def call(x: Tensor, *routing: Tensor) -> tuple[Tensor, ...]:
        return tiles_of(moe_dispatch(x, Routing(*routing), Static(SCALE)))

    check_compiled(call, calls, graphs=1)


X = torch.zeros(3, 32, dtype=BF16)
ROUTING = moe_route(torch.zeros(3, 2, dtype=torch.int32), 4, 8)
WEIGHTS = torch.ones(3, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X.float(), ROUTING, PerToken()), r"x: dtype is float32, must be bfloat16, float16"),
        ((X[:2], ROUTING, PerToken()), r"x: shape is \(2, 32\), must be \(3, 32\); \(M, K\), or"),
        ((X[:, :24], ROUTING, PerToken()), r"x: K is 24, must be a multiple of 16"),
        ((X[:, :0], ROUTING, PerToken()), r"x: K is 0, must be positive"),
        ((X[:, :0], ROUTING, Static(SCALE)), r"x: K is 0, must be positive"),
        ((X[:, :0], ROUTING), r"x: K is 0, must be positive"),
        (
            (X, ROUTING, PerToken(), WEIGHTS[:2]),
            r"topk_weights: shape is \(2, 2\), must be \(3, 2\)",
        ),
        ((X, ROUTING, PerToken(5)), r"output.terms: is 5, must be 1 to 4"),
        ((X, ROUTING, Static(SCALE, 0)), r"output.terms: is 0, must be 1 to 4"),
        (
            (X, ROUTING, SCALE),
            r"output: is a Tensor, must be None, Static\(global_scale, terms\), PerToken",
        ),
        ((X, ROUTING, Static(torch.ones(3))), r"output.global_scale: shape is \(3,\), must"),
        (
            (X, ROUTING._replace(groups=ROUTING.groups[:1]), PerToken()),
            r"routing.groups: shape is \(1,\)",
        ),
        (
            (X, 2.5, PerToken()),
            "source: is float, must be a Routing, Ids or Logits; make a Routing with moe",
        ),
        ((X, tuple(ROUTING), PerToken()), "source: is tuple, must be a Routing, Ids or Logits"),
        (
            (X, ROUTING._replace(groups=ROUTING.groups + 99), PerToken()),
            r"routing.groups: says that \d+ tiles",
        ),
        (
            (X, ROUTING._replace(rows=ROUTING.rows[:, :1]), PerToken()),
            r"routing.slots: holds 3, must be from",
        ),
        (
            (X, ROUTING._replace(slots=ROUTING.slots[0]), PerToken()),
            r"routing.slots: shape is \(8,\)",
        ),
        (
            (X, ROUTING._replace(rows=ROUTING.rows.long()), PerToken()),
            r"routing.rows: dtype is int64",
        ),
        (
            (X.new_zeros(*ROUTING.slots.shape, 32), ROUTING, PerToken(), WEIGHTS),
            r"topk_weights: given with rows that lie in tiles, must be None",
        ),
    ],
)
def test_refuses(arguments: tuple, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        moe_dispatch(*arguments)


@pytest.mark.parametrize("source", ["routing", "ids", "logits"])
def test_refuses_a_missing_scale(source: str) -> None:
    """``None`` in place of the scale is refused, although torch would pass it on to the op."""
    ids = torch.zeros(3, 1, dtype=torch.int32)
    given = {
        "routing": ROUTING,
        "ids": Ids(ids, 4, 8),
        "logits": Logits(torch.zeros(3, 4), Router(1), 4, 8),
    }[source]
    with pytest.raises(InvalidArgument, match=r"output.global_scale: is NoneType, must be a tens"):
        moe_dispatch(X, given, Static(None))  # type: ignore[arg-type]


def test_refuses_to_gather_from_tiles() -> None:
    x = X.new_zeros(*ROUTING.slots.shape, 32)
    with pytest.raises(InvalidArgument, match=r"must be \(M, K\); rows that lie in tiles"):
        moe_dispatch(x, ROUTING)
