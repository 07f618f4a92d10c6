"""``moe_dispatch`` to E4M3: each row is its token, quantised as by ``quantize``."""

import math

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import (
    Ids,
    InvalidArgument,
    Logits,
    NoKernelError,
    PerTokenFp8,
    Router,
    StaticFp8,
    moe_dispatch,
    moe_route,
    moe_topk,
)
from nvfp4_kernels.moe.routing import Routing
from tests import devices
from tests.emulator import EAGER
from tests.test_kernels import fp8_oracle
from tests.test_kernels.bits import bits, check_equal
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.moe.dispatch.parts import made_of, tiles_of
from tests.test_kernels.moe.dispatch.test_dispatch_tiles import expected_tiles, per_slot, routed
from tests.test_kernels.router_cases import DEEPSEEK
from tests.test_kernels.routing_cases import CASES, RoutingCase

BF16, FP16 = torch.bfloat16, torch.float16
SCALE = torch.tensor(0.0173)
OUTPUTS = {"static": StaticFp8(SCALE), "per token": PerTokenFp8()}
EVERY_OUTPUT = pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)


def check_tiles(
    found: tuple[Tensor, ...], x: Tensor, routing: Routing, weights: Tensor | None = None
) -> None:
    """Compare tiles in use, bit for bit, with the slots that the oracle quantises.

    ``found``: E4M3 rows and, with a scale per token, the scales.
    """
    data, *row_scale = found
    slots, used = per_slot(x, routing, weights), int(routing.groups[0])
    scale = fp8_oracle.token_scales(slots) if row_scale else SCALE
    expected = bits(fp8_oracle.rows(slots, scale))
    assert data.shape == (*routing.slots.shape, -(-x.shape[1] // 64) * 64)
    assert torch.equal(bits(data)[:used], expected_tiles(expected, routing))
    for each in row_scale:
        of_rows = expected_tiles(scale, routing)
        is_slot = routing.slots[:used] >= 0
        assert torch.equal(each[:used], torch.where(is_slot, of_rows, 1.0))


@EVERY_OUTPUT
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_are_quantised_tokens(case: RoutingCase, output: StaticFp8 | PerTokenFp8) -> None:
    x, routing = routed(case, 80)
    found = moe_dispatch(x, routing, output)
    assert found.routing is routing
    assert found.scales is None
    assert (found.row_scale is None) == isinstance(output, StaticFp8)
    check_tiles(tiles_of(found), x, routing)


@EVERY_OUTPUT
@pytest.mark.parametrize("name", ["ids of no expert", "tiles of 64"])
def test_weights(name: str, output: StaticFp8 | PerTokenFp8) -> None:
    x, routing = routed(CASES[name], 64, FP16)
    weights = torch.rand(routing.rows.shape)
    check_tiles(tiles_of(moe_dispatch(x, routing, output, weights)), x, routing, weights)


@EVERY_OUTPUT
def test_rows_in_tiles(output: StaticFp8 | PerTokenFp8) -> None:
    """Rows that lie in tiles already, as after the first GEMM, are quantised in the same order."""
    x, routing = routed(CASES["ids of no expert"], 96)
    in_tiles = moe_dispatch(x, routing).data
    in_tiles[routing.slots < 0] = math.nan  # a product of padding may give NaN
    check_tiles(tiles_of(moe_dispatch(in_tiles, routing, output)), x, routing)


@EVERY_OUTPUT
def test_ids_and_logits_are_the_separate_ops(output: StaticFp8 | PerTokenFp8) -> None:
    x, logits = torch.randn(30, 80).to(BF16), torch.randn(30, 32)
    weights, ids = moe_topk(logits, Router(4))
    routing = moe_route(ids, 32, 8)
    of_routing = *routing, *tiles_of(moe_dispatch(x, routing, output))
    check_equal(made_of(moe_dispatch(x, Ids(ids, 32, 8), output)), of_routing)
    found = moe_dispatch(x, Logits(logits, Router(4), 32, 8), output)
    check_equal(made_of(found), (weights, *of_routing))
    factors = torch.rand(ids.shape)
    found = moe_dispatch(x, Ids(ids, 32, 8), output, factors)
    check_tiles(tiles_of(found), x, routing, factors)


def test_each_is_one_op() -> None:
    ops = torch.ops.nvfp4
    x, routing = routed(CASES["linear map"], 80)
    weights = torch.rand(routing.rows.shape)
    check_op(ops.moe_quantize_fp8, (x, *routing, SCALE, weights))
    check_op(ops.moe_quantize_fp8_per_token, (x, *routing, None))
    x = torch.randn(x.shape).to(BF16)  # without NaN
    ids = torch.randint(0, 8, (len(x), 2), dtype=torch.int32)
    check_op(ops.moe_route_quantize_fp8, (x, ids, None, 8, 8, SCALE, None))
    check_op(ops.moe_route_quantize_fp8_per_token, (x, ids, None, 8, 8, torch.rand(ids.shape)))
    given = x, torch.randn(len(x), 32), torch.randn(32), None, None, 32, 8
    check_op(ops.moe_topk_route_quantize_fp8, (*given, SCALE, *DEEPSEEK))
    check_op(ops.moe_topk_route_quantize_fp8_per_token, (*given, *DEEPSEEK))


@EVERY_OUTPUT
def test_compiles_without_breaks(output: StaticFp8 | PerTokenFp8) -> None:
    calls = [((*parts[:1], *parts[1]), {}) for parts in (
        routed(CASES["linear map"], 64), routed(CASES["ids of no expert"], 64)
    )]  # fmt: skip

    def call(x: Tensor, *routing: Tensor) -> tuple[Tensor, ...]:
        return tiles_of(moe_dispatch(x, Routing(*routing), output))

    check_compiled(call, calls, graphs=1)


X, LOGITS = torch.zeros(3, 32, dtype=BF16), torch.zeros(3, 4)
IDS = torch.zeros(3, 2, dtype=torch.int32)
SOURCES = {
    "routing": moe_route(IDS, 4, 8),
    "ids": Ids(IDS, 4, 8),
    "logits": Logits(LOGITS, Router(2), 4, 8),
}
EVERY_SOURCE = pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)


@EVERY_SOURCE
@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(3), r"output.scale: shape is \(3,\), must be \(\); for a scale per token: Per"),
        (torch.ones((), dtype=BF16), r"output.scale: dtype is bfloat16, must be float32"),
        (None, r"output.scale: is NoneType, must be a tens"),
    ],
    ids=["one per expert", "16 bits", "none"],
)
def test_refuses_a_scale(source: Routing | Ids | Logits, scale: Tensor, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        moe_dispatch(X, source, StaticFp8(scale))


@EVERY_SOURCE
@EVERY_OUTPUT
def test_refuses_tokens(source: Routing | Ids | Logits, output: StaticFp8 | PerTokenFp8) -> None:
    with pytest.raises(InvalidArgument, match=r"x: dtype is float32, must be bfloat16, float16"):
        moe_dispatch(X.float(), source, output)
    with pytest.raises(InvalidArgument, match=r"x: K is 24, must be a multiple of 16"):
        moe_dispatch(X[:, :24], source, output)
    with pytest.raises(InvalidArgument, match=r"x: K is 0, must be positive"):
        moe_dispatch(X[:, :0], source, output)


@EVERY_SOURCE
@EVERY_OUTPUT
def test_blackwell_has_no_kernel(
    source: Routing | Ids | Logits, output: StaticFp8 | PerTokenFp8
) -> None:
    with (
        devices.emulated_ops(EAGER, "sm_100"),
        pytest.raises(NoKernelError, match=r"no w4a8 kernel .* there is .*MoeDispatch \(sm_90"),
    ):
        moe_dispatch(X, source, output)
