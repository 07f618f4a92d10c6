"""``moe_route_quantize`` and its siblings: bit-identical to the two ops, in one launch."""

import math
from importlib import import_module

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import (
    InvalidArgument,
    moe_gather,
    moe_quantize,
    moe_quantize_per_token,
    moe_route,
    moe_route_gather,
    moe_route_quantize,
    moe_route_quantize_per_token,
)
from nvfp4_kernels.device.rowwise.tile import RowTile
from nvfp4_kernels.devices import SM_COUNTS
from nvfp4_kernels.moe.route_quantize import reference
from nvfp4_kernels.moe.route_quantize.choose import MAX_SLOTS, ctas_of, is_one_launch, row_capacity
from tests import devices
from tests.emulator import EAGER
from tests.test_kernels.bits import bits, check_equal
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.routing_cases import CASES, RoutingCase
from tests.test_kernels.rowwise.row_cases import TWO_SCHEDULES

pytestmark = pytest.mark.schedules("random 1")
BF16 = torch.bfloat16
SM90, SM100 = pytest.mark.arch("sm_90"), pytest.mark.arch("sm_100")
# Cases that one CTA sorts, and tiles of two launches, which have tests of their own.
FEW = "no token", "ids of no expert", "round-robin map", "tiles of 32", "tiles of 64"
EXTREMES = pytest.mark.schedules("eager", "all late", "random 1")
SCALE = torch.tensor(0.004)


@pytest.fixture(autouse=True)
def one_sm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few CTAs, each with many work items."""
    for arch in ("sm_90", "sm_100"):
        monkeypatch.setitem(SM_COUNTS, arch, 1)


def tokens(case: RoutingCase, k: int) -> tuple[Tensor, Tensor]:
    """Tokens, NaN where no expert of this rank is chosen, and their experts."""
    ids = case.topk_ids()
    x = torch.randn(case.tokens, k).to(BF16)
    x[(case.routing(ids).rows < 0).all(1)] = math.nan
    return x, ids


def check_in_use(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Check that tiles in use are bit-identical, and that others still hold poison."""
    used = int(expected[0][0])
    lengths = 1 + used, used, len(expected[2]), *[used] * (len(expected) - 3)
    for ours, theirs, length in zip(found, expected, lengths, strict=True):
        check_equal([ours[:length]], [theirs[:length]])
        assert torch.equal(bits(ours[length:]), bits(torch.empty_like(ours[length:], device="cpu")))


def check(case: RoutingCase, k: int, device: torch.device, weighted: bool = False) -> None:
    """Check both ops: with a global scale, and per token in three terms."""
    x, ids = tokens(case, k)
    weights = torch.rand(ids.shape) if weighted else None
    common = ids, case.expert_map(), case.experts, case.tile_tokens
    given = [t if t is None else t.to(device) for t in (x, *common[:2], weights)]
    routing, *parts = moe_route_quantize(
        *given[:2], *common[2:], SCALE.to(device), given[2], given[3], 1
    )
    expected = reference.moe_route_quantize(x, *common, SCALE, weights, 1)
    check_in_use((*routing, *parts), expected)
    routing, *parts = moe_route_quantize_per_token(*given[:2], *common[2:], *given[2:], 3)
    check_in_use((*routing, *parts), reference.moe_route_quantize_per_token(x, *common, weights, 3))


def check_gather(case: RoutingCase, k: int, device: torch.device, weighted: bool = False) -> None:
    x, ids = tokens(case, k)
    weights = torch.rand(ids.shape) if weighted else None
    common = ids, case.expert_map(), case.experts, case.tile_tokens
    given = [t if t is None else t.to(device) for t in (x, *common[:2], weights)]
    routing, out = moe_route_gather(*given[:2], *common[2:], *given[2:])
    check_in_use((*routing, out), reference.moe_route_gather(x, *common, weights))


@SM100
@pytest.mark.parametrize("name", FEW)
def test_quantize(name: str, op_device: torch.device) -> None:
    check(CASES[name], 80, op_device)


@SM100
@pytest.mark.parametrize("name", ["no token", "384 experts", "none of this rank", "tiles of 64"])
def test_gather(name: str, op_device: torch.device) -> None:
    check_gather(CASES[name], 48, op_device)


@SM90
@pytest.mark.parametrize("name", ["linear map", "ids of no expert"])
def test_gather_on_hopper(name: str, op_device: torch.device) -> None:
    check_gather(CASES[name], 48, op_device)


@SM100
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_bounds(more: int, op_device: torch.device) -> None:
    """Slots around the most that one launch takes."""
    check(RoutingCase(MAX_SLOTS + more, 1, 16, ids="each", total=64), 128, op_device)


@SM100
@EXTREMES
def test_many_turns(op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """More work items than CTAs; a CTA has fewer threads than there are slots and experts."""
    module = import_module("nvfp4_kernels.moe.quantize.sm100")
    monkeypatch.setattr(module, "choose_config", lambda *_: RowTile(2, 2, 3))
    fused = import_module("nvfp4_kernels.moe.route_quantize.sm100")
    monkeypatch.setattr(fused, "ctas_of", lambda *_: 3)
    check(RoutingCase(21, 4, 70, ids="hostile", total=140), 16 * 7, op_device, weighted=True)


@EXTREMES
def test_gather_few_slots(op_device: torch.device) -> None:
    check_gather(RoutingCase(9, 4, 7, ids="hostile", total=14), 96, op_device, weighted=True)


@SM100
@TWO_SCHEDULES
def test_dependent_launches(op_device: torch.device) -> None:
    """A second launch may start before the first has ended, and reads the first one's result."""
    case = RoutingCase(16, 2, 40)
    x, ids = tokens(case, 32)
    routing = moe_route_gather(x.to(op_device), ids.to(op_device), 40, 8)[0]
    again, out = moe_route_gather(x.to(op_device), routing.rows, 40, 8)
    expected = reference.moe_route_gather(x, case.routing(ids).rows, None, 40, 8, None)
    check_in_use((*again, out), expected)


def test_launches() -> None:
    """Few slots take one launch, more slots take two."""
    with devices.emulated_ops(EAGER) as gpu:
        for count, expected in ((MAX_SLOTS, 1), (MAX_SLOTS + 1, 2)):
            gpu.launches.clear()
            x, ids = tokens(RoutingCase(count, 1, 4, ids="none"), 512)
            moe_route_gather(x, ids, 4, 8)
            assert len(gpu.launches) == expected


def test_is_the_two_ops() -> None:
    """Fused ops on the CPU equal the two ops, through the public API."""
    case = CASES["round-robin map"]
    x, ids = tokens(case, 32)
    mapped, weights = case.expert_map(), torch.rand(ids.shape)
    sizes = case.experts, case.tile_tokens
    routing = moe_route(ids, *sizes, mapped)
    found = moe_route_quantize(x, ids, *sizes, SCALE, mapped, weights, 2)
    check_equal((*found[0], *found[1:]), (*routing, *moe_quantize(x, routing, SCALE, weights, 2)))
    found = moe_route_quantize_per_token(x, ids, *sizes, mapped, weights)
    expected = *routing, *moe_quantize_per_token(x, routing, weights)
    check_equal((*found[0], *found[1:]), expected)
    found = moe_route_gather(x, ids, *sizes, mapped, weights)
    check_equal((*found[0], found[1]), (*routing, moe_gather(x, routing, weights)))


def test_each_is_one_op() -> None:
    case = CASES["linear map"]
    x, ids = tokens(case, 32)
    common = x, ids, case.expert_map(), case.experts, 8
    check_op(torch.ops.nvfp4.moe_route_quantize, (*common, SCALE, None, 2))
    check_op(torch.ops.nvfp4.moe_route_quantize_per_token, (*common, None, 1))
    check_op(torch.ops.nvfp4.moe_route_gather, (*common, torch.rand(ids.shape)))

    def call(x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        routing, data, scales = moe_route_quantize(x, ids, case.experts, 8, SCALE)
        return (*routing, data, scales)

    calls = [((x, ids), {}), ((x[:7].clone(), ids[:7].clone()), {})]
    check_compiled(call, calls, graphs=1)


def test_choices() -> None:
    assert is_one_launch(256, 8, 128)
    assert not is_one_launch(257, 8, 128)
    assert not is_one_launch(256, 8, 16)
    assert not is_one_launch(256, 64, 128)
    assert ctas_of(10, 148) == 10
    assert ctas_of(1000, 148) == 148
    assert row_capacity(8, 32, 8) == 256
    assert row_capacity(512, 32, 8) == 1024


X, IDS = torch.zeros(3, 32, dtype=BF16), torch.zeros(3, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X.float(), IDS, 4, 8), r"x: dtype is float32, must be bfloat16, float16"),
        ((X[:2], IDS, 4, 8), r"x: shape is \(2, 32\), must be \(3, 32\); a row for each"),
        ((X[None], IDS, 4, 8), r"x: shape is \(1, 3, 32\), must be \(M, K\); rows that lie"),
        ((X[:, :24], IDS, 4, 8), r"x: K is 24, must be a multiple of 16"),
        ((X, IDS.long(), 4, 8), r"topk_ids: dtype is int64, must be int32"),
        ((X, IDS, 4, 12), r"tile_tokens: is 12, must be one of"),
        ((X, IDS, 4, 8, None, torch.ones(3, 1)), r"topk_weights: shape is \(3, 1\), must be"),
        ((X, IDS, 4, 8, None, None, 5), r"terms: is 5, must be 1 to 4"),
    ],
)
def test_refuses(arguments: tuple, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        moe_route_quantize_per_token(*arguments)


def test_refuses_a_scale_per_row() -> None:
    with pytest.raises(InvalidArgument, match=r"global_scale: shape is \(3,\), must be \(\)"):
        moe_route_quantize(X, IDS, 4, 8, torch.ones(3))
