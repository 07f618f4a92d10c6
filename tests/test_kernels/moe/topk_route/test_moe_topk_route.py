"""``moe_topk_route_quantize`` and its siblings: the three ops' results, in one launch."""

import math
from dataclasses import dataclass
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
    moe_topk,
    moe_topk_route_gather,
    moe_topk_route_quantize,
    moe_topk_route_quantize_per_token,
)
from nvfp4_kernels.devices import SM_COUNTS
from nvfp4_kernels.moe.router import Router
from nvfp4_kernels.moe.topk import reference as choosing
from nvfp4_kernels.moe.topk_route import reference
from nvfp4_kernels.moe.topk_route.choose import choose_config, grid_of
from tests import devices
from tests.emulator import EAGER
from tests.test_kernels.bits import bits, check_equal
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.moe.topk.test_moe_topk_kernel import check_topk
from tests.test_kernels.router_cases import CASES as ROUTERS
from tests.test_kernels.router_cases import DEEPSEEK, RouterCase
from tests.test_kernels.rowwise.row_cases import TWO_SCHEDULES

pytestmark = pytest.mark.schedules("random 1")
BF16 = torch.bfloat16
SM90, SM100 = pytest.mark.arch("sm_90"), pytest.mark.arch("sm_100")
EXTREMES = pytest.mark.schedules("eager", "all late", "random 1")
SCALE = torch.tensor(0.004)


@dataclass(frozen=True)
class Case:
    """A batch's router, and the rank that runs it.

    Attributes:
        routed: logits and rule.
        tile_tokens: rows of a token tile.
        ranks: number of ranks that hold contiguous experts; 1: no expert map.
    """

    routed: RouterCase
    tile_tokens: int = 8
    ranks: int = 1

    @property
    def experts(self) -> int:
        return self.routed.experts // self.ranks

    def expert_map(self) -> Tensor | None:
        if self.ranks == 1:
            return None
        mapped = torch.full((self.routed.experts,), -1, dtype=torch.int32)
        mapped[self.experts : 2 * self.experts] = torch.arange(self.experts, dtype=torch.int32)
        return mapped

    def given(self, k: int) -> tuple[Tensor | None, ...]:
        """Tokens (NaN where no expert of this rank is chosen), logits, bias, padding and map."""
        logits, bias, padding = self.routed.given()
        mapped = self.expert_map()
        x = torch.randn(len(logits), k).to(BF16)
        ids = choosing.moe_topk(logits, bias, padding, self.routed.router)[1]
        rows = ids if mapped is None else torch.where(ids < 0, -1, mapped[ids.clamp(0)])
        x[(rows < 0).all(1)] = math.nan
        return x, logits, bias, padding, mapped


# A warp per token, in clusters of 1, 2 and 4 CTAs; tiles that write whole atoms.
CASES = {
    "no token": Case(ROUTERS["no token"]),
    "one token": Case(RouterCase(1, 128, Router(8))),
    "padding": Case(ROUTERS["padding"]),
    "one rank's": Case(RouterCase(13, 128, Router(8)), ranks=2),
    "groups": Case(RouterCase(5, 64, DEEPSEEK, torch.float32, biased=True), ranks=4),
    "tiles of 64": Case(RouterCase(9, 4, Router(2)), 64),
    "a cluster of two": Case(RouterCase(18, 8, Router(2), padded=True), 16),
    "a cluster of four": Case(RouterCase(37, 16, Router(2), ties=True), 32, ranks=2),
}


@pytest.fixture(autouse=True)
def few_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few CTAs, each with many work items."""
    for arch in ("sm_90", "sm_100"):
        monkeypatch.setitem(SM_COUNTS, arch, 2)


def check_in_use(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Check weights within a tolerance, tiles in use exactly, other tiles for the poison."""
    weights, groups, _, rows, *_ = expected
    torch.testing.assert_close(found[0].cpu(), weights, rtol=24 * 2.0**-23, atol=0.0)
    used = int(groups[0])
    lengths = 1 + used, used, len(rows), *[used] * (len(expected) - 4)
    for ours, theirs, length in zip(found[1:], expected[1:], lengths, strict=True):
        check_equal([ours[:length]], [theirs[:length]])
        assert torch.equal(bits(ours[length:]), bits(torch.empty_like(ours[length:], device="cpu")))


def moved(given: tuple[Tensor | None, ...], device: torch.device) -> list:
    return [each if each is None else each.to(device) for each in given]


def check(case: Case, k: int, device: torch.device) -> None:
    """Check both ops: with a global scale, and per token in two terms."""
    given, rule = case.given(k), case.routed.router
    x, logits, bias, padding, mapped = moved(given, device)
    sizes = case.experts, case.tile_tokens
    options = {"expert_map": mapped, "bias": bias, "padding": padding}
    weights, routing, *parts = moe_topk_route_quantize(
        x, logits, rule, *sizes, SCALE.to(device), **options
    )
    expected = reference.moe_topk_route_quantize(*given, *sizes, SCALE, 1, rule)
    check_in_use((weights, *routing, *parts), expected)
    weights, routing, *parts = moe_topk_route_quantize_per_token(
        x, logits, rule, *sizes, **options, terms=2
    )
    expected = reference.moe_topk_route_quantize_per_token(*given, *sizes, 2, rule)
    check_in_use((weights, *routing, *parts), expected)


def check_gather(case: Case, k: int, device: torch.device) -> None:
    given, rule = case.given(k), case.routed.router
    x, logits, bias, padding, mapped = moved(given, device)
    sizes = case.experts, case.tile_tokens
    weights, routing, out = moe_topk_route_gather(x, logits, rule, *sizes, mapped, bias, padding)
    expected = reference.moe_topk_route_gather(*given, *sizes, rule)
    check_in_use((weights, *routing, out), expected)


@SM100
@pytest.mark.parametrize("name", CASES)
def test_quantize(name: str, op_device: torch.device) -> None:
    check(CASES[name], 80, op_device)


@SM100
@EXTREMES
def test_every_schedule(op_device: torch.device) -> None:
    """Clusters of four with more tokens than warps, and more work items than teams."""
    check(Case(RouterCase(70, 16, Router(2), padded=True), 8), 96, op_device)


@SM100
@pytest.mark.parametrize("name", ["no token", "one rank's"])
def test_gather(name: str, op_device: torch.device) -> None:
    check_gather(CASES[name], 48, op_device)


@SM90
@EXTREMES
@pytest.mark.parametrize("name", ["groups", "a cluster of four"])
def test_gather_on_hopper(name: str, op_device: torch.device) -> None:
    check_gather(CASES[name], 48, op_device)


@SM100
def test_many_tokens(op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many tokens for one launch: several launches give the same results."""
    module = import_module("nvfp4_kernels.moe.topk_route.choose")
    monkeypatch.setattr(module, "MAX_TOKENS", 8)
    check(CASES["a cluster of two"], 32, op_device)
    check_gather(CASES["a cluster of two"], 32, op_device)


@SM100
@TWO_SCHEDULES
def test_dependent_launches(op_device: torch.device) -> None:
    """A second launch may start before the first has ended, and reads the first one's result."""
    case = RouterCase(16, 8, Router(2))
    logits = case.given()[0].to(op_device)
    x = torch.randn(16, 32).to(op_device, BF16)
    weights, *_ = moe_topk_route_gather(x, logits, case.router, 8, 8)
    again, *_ = moe_topk_route_gather(x, weights, Router(1), 2, 8)
    check_topk((again, again.int()), (torch.ones(16, 1), torch.ones(16, 1, dtype=torch.int32)))


def test_launches() -> None:
    """One launch starts from the logits, for every number of tokens of a decode."""
    with devices.emulated_ops(EAGER) as gpu:
        for tokens, expected in ((1, 1), (64, 1), (192, 1), (1025, 3)):
            gpu.launches.clear()
            x, logits = torch.zeros(tokens, 64).to(BF16), torch.zeros(tokens, 4).to(BF16)
            moe_topk_route_quantize(x, logits, Router(1), 4, 8, SCALE)
            assert len(gpu.launches) == expected


def test_is_the_three_ops() -> None:
    """Fused ops on the CPU equal the three ops, through the public API."""
    case = Case(RouterCase(30, 32, Router(4), padded=True), ranks=4)
    x, logits, bias, padding, mapped = case.given(32)
    assert x is not None
    assert logits is not None
    weights, ids = moe_topk(logits, case.routed.router, bias, padding)
    routing = moe_route(ids, 8, 8, mapped)
    common, options = (x, logits, case.routed.router, 8, 8), (mapped, bias, padding)
    found = moe_topk_route_quantize(*common, SCALE, *options, 2)
    expected = weights, *routing, *moe_quantize(x, routing, SCALE, None, 2)
    check_equal((found[0], *found[1], *found[2:]), expected)
    found = moe_topk_route_quantize_per_token(*common, *options)
    expected = weights, *routing, *moe_quantize_per_token(x, routing)
    check_equal((found[0], *found[1], *found[2:]), expected)
    found = moe_topk_route_gather(*common, *options)
    check_equal((found[0], *found[1], found[2]), (weights, *routing, moe_gather(x, routing)))


def test_each_is_one_op() -> None:
    case = Case(RouterCase(9, 32, DEEPSEEK, torch.float32, biased=True, padded=True), ranks=4)
    given = *case.given(32), 8, 8
    check_op(torch.ops.nvfp4.moe_topk_route_quantize, (*given, SCALE, 2, *DEEPSEEK))
    check_op(torch.ops.nvfp4.moe_topk_route_quantize_per_token, (*given, 1, *DEEPSEEK))
    check_op(torch.ops.nvfp4.moe_topk_route_gather, (*given, *DEEPSEEK))
    check_op(torch.ops.nvfp4.moe_topk, (*given[1:4], *DEEPSEEK))

    def call(x: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        weights, routing, data, scales = moe_topk_route_quantize(x, logits, Router(2), 32, 8, SCALE)
        return (weights, *routing, data, scales)

    x, logits = torch.randn(9, 32).to(BF16), torch.randn(9, 32)
    calls = [((x, logits), {}), ((x[:7].clone(), logits[:7].clone()), {})]
    # torch takes the router's scale for a symbol, then recompiles with the number.
    check_compiled(call, calls, graphs=2, fewer=1)  # torch 2.13 does so, 2.11 does not


def test_choices() -> None:
    """One warp per token where possible, and one launch for every batch of a CUDA graph."""
    sizes = 8, 128, 8, 128
    found = {}
    for tokens in (1, 8, 16, 32, 64, 128, 256, 512, 1024):
        tile = choose_config(tokens, *sizes, True)
        assert tile is not None
        assert tile.share * tile.cluster >= tokens
        assert tile.threads * tile.route.steps >= 8 * tokens
        found[tokens] = tile.threads, tile.cluster
    assert list(found.values()) == [
        (128, 1), (256, 1), (256, 2), (256, 4), (256, 8), (512, 8), (512, 8), (512, 8), (1024, 8),
    ]  # fmt: skip
    assert choose_config(1025, *sizes, True) is None
    assert choose_config(1, *sizes, True) is not None
    assert grid_of(8, 1, 148) == 9
    assert grid_of(1000, 1, 148) == 148
    assert grid_of(1000, 8, 148) == 136


X, LOGITS = torch.zeros(3, 32, dtype=BF16), torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X.float(), LOGITS, Router(2), 4, 8), r"x: dtype is float32, must be bfloat16, float16"),
        ((X[:2], LOGITS, Router(2), 4, 8), r"x: shape is \(2, 32\), must be \(3, 32\); a row for"),
        ((X[None], LOGITS, Router(2), 4, 8), r"x: shape is \(1, 3, 32\), must be \(M, K\); rows"),
        ((X, LOGITS.long(), Router(2), 4, 8), r"logits: dtype is int64, must be bfloat16, float16"),
        ((X, LOGITS[0], Router(2), 4, 8), r"logits: shape is \(4,\), must be \(M, E\) with E from"),
        ((X, LOGITS, Router(2), 5, 8), r"logits: shape is \(3, 4\), must be \(3, 5\); one for"),
        ((X, LOGITS, Router(2), 4, 12), r"tile_tokens: is 12, must be one of"),
        ((X, LOGITS, Router(5), 4, 8), r"top_k: is 5, must be from 1 to 4"),
        ((X, LOGITS, Router(3, groups=2), 4, 8), r"top_k: is 3, must be from 1 to 2"),
        ((X, LOGITS, Router(0), 4, 8), r"top_k: is 0, must be from 1"),
        ((X, LOGITS, Router(1, groups=3), 4, 8), r"groups: is 3, must be a divisor of 4 experts"),
        ((X, LOGITS, Router(1, top_groups=2), 4, 8), r"top_groups: is 2, must be from 1 to 1"),
        ((X, LOGITS, Router(1, "relu"), 4, 8), r"scoring: is relu, must be softmax, sigmoid"),
        ((X, LOGITS, Router(1, scale=math.inf), 4, 8), r"scale: is inf, must be finite"),
        ((X, LOGITS, Router(1, scale=math.nan), 4, 8), r"scale: is nan, must be finite"),
        ((X, LOGITS, (2,), 4, 8), r"router: is tuple, must be a Router"),
        (
            (X, LOGITS, Router(1, groups=4), 4, 8, None, torch.zeros(4)),
            r"groups: is 4, must be a divisor of 4 experts, from 1 to 2",
        ),
        (
            (X, LOGITS, Router(1), 4, 8, None, torch.zeros(5)),
            r"bias: shape is \(5,\), must be \(4,\); give a number for each expert",
        ),
        (
            (X, LOGITS, Router(1), 4, 8, None, torch.zeros(4).half()),
            r"bias: dtype is float16, must be float32",
        ),
        (
            (X, LOGITS, Router(1), 4, 8, None, None, torch.zeros(3)),
            r"padding: dtype is float32, must be bool",
        ),
        (
            (X, LOGITS, Router(1), 4, 8, None, None, torch.zeros(2) > 0),
            r"padding: shape is \(2,\), must be \(3,\); say of each token",
        ),
        ((X, LOGITS, Router(1), 4, 8, None, None, None, 5), r"terms: is 5, must be 1 to 4"),
    ],
)  # fmt: skip
def test_refuses(arguments: tuple, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        moe_topk_route_quantize_per_token(*arguments)


def test_refuses_a_scale_per_row() -> None:
    with pytest.raises(InvalidArgument, match=r"global_scale: shape is \(3,\), must be \(\)"):
        moe_topk_route_quantize(X, LOGITS, Router(2), 4, 8, torch.ones(3))
