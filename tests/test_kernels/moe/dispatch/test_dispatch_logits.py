"""``moe_dispatch`` of router logits: top-k, routing and dispatch in one launch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import (
    InvalidArgument,
    Logits,
    PerToken,
    Static,
    moe_dispatch,
    moe_route,
    moe_topk,
)
from nvfp4_kernels.devices import SM_COUNTS
from nvfp4_kernels.formats.output import Output
from nvfp4_kernels.moe.dispatch import reference
from nvfp4_kernels.moe.dispatch.call import DispatchCall
from nvfp4_kernels.moe.dispatch.choose import ctas_of_logits, fuse_logits
from nvfp4_kernels.moe.router import Router
from nvfp4_kernels.moe.topk import reference as choosing
from tests import devices
from tests.emulator import EAGER
from tests.test_kernels.bits import bits, check_equal
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.moe.dispatch.parts import made_of, tiles_of
from tests.test_kernels.moe.dispatch.test_dispatch_ids import on
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
        tile_tokens: number of rows of a token tile.
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

    def given(self, k: int) -> tuple[Tensor, Logits]:
        """Tokens and their logits; tokens without an expert of this rank are NaN."""
        logits, bias, padding = self.routed.given()
        mapped = self.expert_map()
        x = torch.randn(len(logits), k).to(BF16)
        ids = choosing.moe_topk(logits, bias, padding, self.routed.router)[1]
        rows = ids if mapped is None else torch.where(ids < 0, -1, mapped[ids.clamp(0)])
        x[(rows < 0).all(1)] = math.nan
        sizes = self.experts, self.tile_tokens
        return x, Logits(logits, self.routed.router, *sizes, mapped, bias, padding)


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
    """Plan launches for a GPU of two SMs: few CTAs, each with many work items."""
    for arch in ("sm_90", "sm_100"):
        monkeypatch.setitem(SM_COUNTS, arch, 2)


def check_in_use(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Check weights within a tolerance, tiles in use exactly, and that other tiles hold poison."""
    weights, groups, _, rows, *_ = expected
    torch.testing.assert_close(found[0].cpu(), weights, rtol=24 * 2.0**-23, atol=0.0)
    used = int(groups[0])
    lengths = 1 + used, used, len(rows), *[used] * (len(expected) - 4)
    for ours, theirs, length in zip(found[1:], expected[1:], lengths, strict=True):
        check_equal([ours[:length]], [theirs[:length]])
        assert torch.equal(bits(ours[length:]), bits(torch.empty_like(ours[length:], device="cpu")))


def check(case: Case, k: int, device: torch.device) -> None:
    """Check both scalings: one static global scale, and a scale per token with two NVFP4 terms."""
    check_outputs(case, k, device, (Static(SCALE), PerToken(2)))


def check_gather(case: Case, k: int, device: torch.device) -> None:
    check_outputs(case, k, device, (None,))


def check_outputs(case: Case, k: int, device: torch.device, outputs: Sequence[Output]) -> None:
    x, source = case.given(k)
    for output in outputs:
        call = DispatchCall(x, source, output)
        check_in_use(
            made_of(moe_dispatch(*on(device, call))), made_of(reference.moe_dispatch(call))
        )


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
    module = import_module("nvfp4_kernels.moe.dispatch.choose")
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
    weights = moe_dispatch(x, Logits(logits, case.router, 8, 8)).topk_weights
    assert weights is not None
    again = moe_dispatch(x, Logits(weights, Router(1), 2, 8)).topk_weights
    assert again is not None
    check_topk((again, again.int()), (torch.ones(16, 1), torch.ones(16, 1, dtype=torch.int32)))


def test_launches() -> None:
    """Dispatch from logits is a single launch for every number of tokens of a decode."""
    with devices.emulated_ops(EAGER) as gpu:
        for tokens, expected in ((1, 1), (64, 1), (192, 1), (1025, 3)):
            gpu.launches.clear()
            x, logits = torch.zeros(tokens, 64).to(BF16), torch.zeros(tokens, 4).to(BF16)
            moe_dispatch(x, Logits(logits, Router(1), 4, 8), Static(SCALE))
            assert len(gpu.launches) == expected


def test_is_the_three_ops() -> None:
    """Logits on the CPU give the results of top-k, routing and dispatch, by the public API."""
    case = Case(RouterCase(30, 32, Router(4), padded=True), ranks=4)
    x, source = case.given(32)
    weights, ids = moe_topk(source.logits, source.router, source.bias, source.padding)
    routing = moe_route(ids, 8, 8, source.expert_map)
    for output in (Static(SCALE, 2), PerToken(), None):
        expected = weights, *routing, *tiles_of(moe_dispatch(x, routing, output))
        check_equal(made_of(moe_dispatch(x, source, output)), expected)


def test_each_is_one_op() -> None:
    case = Case(RouterCase(9, 32, DEEPSEEK, torch.float32, biased=True, padded=True), ranks=4)
    x, (logits, _, *sizes, mapped, bias, padding) = case.given(32)
    given = x, logits, bias, padding, mapped, *sizes
    check_op(torch.ops.nvfp4.moe_topk_route_quantize, (*given, SCALE, 2, *DEEPSEEK))
    check_op(torch.ops.nvfp4.moe_topk_route_quantize_per_token, (*given, 1, *DEEPSEEK))
    check_op(torch.ops.nvfp4.moe_topk_route_gather, (*given, *DEEPSEEK))
    check_op(torch.ops.nvfp4.moe_topk, (*given[1:4], *DEEPSEEK))

    def call(x: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        return made_of(moe_dispatch(x, Logits(logits, Router(2), 32, 8), Static(SCALE)))

    x, logits = torch.randn(9, 32).to(BF16), torch.randn(9, 32)
    calls = [((x, logits), {}), ((x[:7].clone(), logits[:7].clone()), {})]
    # torch takes the router's scale for a symbol, then recompiles with the number.
    check_compiled(call, calls, graphs=2, fewer=1)  # torch 2.13 does so, 2.11 does not


def test_choices() -> None:
    """One warp per token where possible, and one launch for every batch of a CUDA graph."""
    sizes = 128, 8, 128
    found = {}
    for tokens in (1, 8, 16, 32, 64, 128, 256, 512, 1024):
        tile = fuse_logits((tokens, 8), *sizes, True)
        assert tile is not None
        assert tile.share * tile.cluster >= tokens
        assert tile.threads * tile.route.steps >= 8 * tokens
        found[tokens] = tile.threads, tile.cluster
    assert list(found.values()) == [
        (128, 1), (256, 1), (256, 2), (256, 4), (256, 8), (512, 8), (512, 8), (512, 8), (1024, 8),
    ]  # fmt: skip
    assert fuse_logits((1025, 8), *sizes, True) is None
    assert fuse_logits((1, 8), *sizes, True) is not None
    assert ctas_of_logits(8, 1, 148) == 9
    assert ctas_of_logits(1000, 1, 148) == 148
    assert ctas_of_logits(1000, 8, 148) == 136


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
    ],
)  # fmt: skip
def test_refuses(arguments: tuple, message: str) -> None:
    x, *source = arguments
    with pytest.raises(InvalidArgument, match=message):
        moe_dispatch(x, Logits(*source), PerToken())


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (PerToken(5), r"output.terms: is 5, must be 1 to 4"),
        (Static(torch.ones(3)), r"output.global_scale: shape is \(3,\), must be \(\)"),
        ("nvfp4", r"output: is a str, must be None, Static\(global_scale, terms\), PerToken"),
    ],
)
def test_refuses_an_output(output: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        moe_dispatch(X, Logits(LOGITS, Router(2), 4, 8), output)


def test_refuses_weights_beside_logits() -> None:
    with pytest.raises(InvalidArgument, match=r"topk_weights: given with Logits, .* must be None"):
        moe_dispatch(X, Logits(LOGITS, Router(2), 4, 8), None, torch.ones(3, 2))
