"""``moe_dispatch`` of expert ids: bits of ``moe_route``, then ``moe_dispatch``, in one launch."""

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import (
    Ids,
    InvalidArgument,
    PerToken,
    Static,
    moe_dispatch,
    moe_route,
)
from nvfp4_kernels.device.rowwise.tile import RowTile
from nvfp4_kernels.devices import SM_COUNTS
from nvfp4_kernels.formats.output import Output
from nvfp4_kernels.moe.dispatch import reference
from nvfp4_kernels.moe.dispatch.call import DispatchCall
from nvfp4_kernels.moe.dispatch.choose import MAX_SLOTS, ctas_of_ids, fuse_ids, row_capacity
from tests import devices
from tests.emulator import EAGER
from tests.test_kernels.bits import bits, check_equal
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.moe.dispatch.parts import made_of, tiles_of
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
    """Plan launches for a GPU of one SM: few CTAs, each with many work items."""
    for arch in ("sm_90", "sm_100"):
        monkeypatch.setitem(SM_COUNTS, arch, 1)


def tokens(case: RoutingCase, k: int) -> tuple[Tensor, Tensor]:
    """Tokens and their experts; tokens without an expert of this rank are NaN."""
    ids = case.topk_ids()
    x = torch.randn(case.tokens, k).to(BF16)
    x[(case.routing(ids).rows < 0).all(1)] = math.nan
    return x, ids


def check_in_use(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Check that tiles in use are bit-identical, and that other tiles still hold poison."""
    used = int(expected[0][0])
    lengths = 1 + used, used, len(expected[2]), *[used] * (len(expected) - 3)
    for ours, theirs, length in zip(found, expected, lengths, strict=True):
        check_equal([ours[:length]], [theirs[:length]])
        assert torch.equal(bits(ours[length:]), bits(torch.empty_like(ours[length:], device="cpu")))


def check(case: RoutingCase, k: int, device: torch.device, weighted: bool = False) -> None:
    """Check both scalings: with a global scale, and per token in three terms."""
    check_outputs(case, k, device, weighted, (Static(SCALE), PerToken(3)))


def check_gather(case: RoutingCase, k: int, device: torch.device, weighted: bool = False) -> None:
    check_outputs(case, k, device, weighted, (None,))


def check_outputs(
    case: RoutingCase, k: int, device: torch.device, weighted: bool, outputs: Sequence[Output]
) -> None:
    x, ids = tokens(case, k)
    weights = torch.rand(ids.shape) if weighted else None
    for output in outputs:
        source = Ids(ids, case.experts, case.tile_tokens, case.expert_map())
        call = DispatchCall(x, source, output, weights)
        check_in_use(
            made_of(moe_dispatch(*on(device, call))), made_of(reference.moe_dispatch(call))
        )


def on(device: torch.device, given: Any) -> Any:
    """Arguments on ``device``."""
    if isinstance(given, tuple):
        return type(given)(*(on(device, each) for each in given))
    return given.to(device) if isinstance(given, Tensor) else given


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
    """Numbers of slots around the maximum for one launch."""
    check(RoutingCase(MAX_SLOTS + more, 1, 16, ids="each", total=64), 128, op_device)


@SM100
@EXTREMES
def test_many_turns(op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """More work items than CTAs; a CTA has fewer threads than there are slots and experts."""
    module = import_module("nvfp4_kernels.moe.dispatch.launch")
    monkeypatch.setattr(module, "choose_rows", lambda *_: RowTile(2, 2, 3))
    monkeypatch.setattr(module, "ctas_of_ids", lambda *_: 3)
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
    routing = moe_dispatch(x.to(op_device), Ids(ids.to(op_device), 40, 8)).routing
    again = moe_dispatch(x.to(op_device), Ids(routing.rows, 40, 8))
    expected = reference.moe_dispatch(DispatchCall(x, Ids(case.routing(ids).rows, 40, 8)))
    check_in_use(made_of(again), made_of(expected))


def test_launches() -> None:
    """Few slots take one launch, more slots take two."""
    with devices.emulated_ops(EAGER) as gpu:
        for count, expected in ((MAX_SLOTS, 1), (MAX_SLOTS + 1, 2)):
            gpu.launches.clear()
            x, ids = tokens(RoutingCase(count, 1, 4, ids="none"), 512)
            moe_dispatch(x, Ids(ids, 4, 8))
            assert len(gpu.launches) == expected


def test_is_the_two_ops() -> None:
    """Ids on the CPU give the results of ``moe_route`` and ``moe_dispatch``, by the public API."""
    case = CASES["round-robin map"]
    x, ids = tokens(case, 32)
    mapped, weights = case.expert_map(), torch.rand(ids.shape)
    source = Ids(ids, case.experts, case.tile_tokens, mapped)
    routing = moe_route(*source)
    for output in (Static(SCALE, 2), PerToken(), None):
        found = moe_dispatch(x, source, output, weights)
        expected = *routing, *tiles_of(moe_dispatch(x, routing, output, weights))
        check_equal(made_of(found), expected)


def test_each_is_one_op() -> None:
    case = CASES["linear map"]
    x, ids = tokens(case, 32)
    common = x, ids, case.expert_map(), case.experts, 8
    check_op(torch.ops.nvfp4.moe_route_quantize, (*common, SCALE, None, 2))
    check_op(torch.ops.nvfp4.moe_route_quantize_per_token, (*common, None, 1))
    check_op(torch.ops.nvfp4.moe_route_gather, (*common, torch.rand(ids.shape)))

    def call(x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        return made_of(moe_dispatch(x, Ids(ids, case.experts, 8), Static(SCALE)))

    calls = [((x, ids), {}), ((x[:7].clone(), ids[:7].clone()), {})]
    check_compiled(call, calls, graphs=1)


def test_choices() -> None:
    assert fuse_ids(256, 32, 8, 128) is not None
    assert fuse_ids(257, 32, 8, 128) is None
    assert fuse_ids(256, 32, 8, 16) is None
    assert fuse_ids(256, 32, 64, 128) is None
    assert ctas_of_ids(10, 148) == 10
    assert ctas_of_ids(1000, 148) == 148
    assert row_capacity(8, 32, 8) == 256
    assert row_capacity(512, 32, 8) == 1024


X, IDS = torch.zeros(3, 32, dtype=BF16), torch.zeros(3, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X.float(), Ids(IDS, 4, 8)), r"x: dtype is float32, must be bfloat16, float16"),
        ((X[:2], Ids(IDS, 4, 8)), r"x: shape is \(2, 32\), must be \(3, 32\); a row for each"),
        ((X[None], Ids(IDS, 4, 8)), r"x: shape is \(1, 3, 32\), must be \(M, K\); rows that lie"),
        ((X[:, :24], Ids(IDS, 4, 8)), r"x: K is 24, must be a multiple of 16"),
        ((X, Ids(IDS.long(), 4, 8)), r"topk_ids: dtype is int64, must be int32"),
        ((X, Ids(IDS, 4, 12)), r"tile_tokens: is 12, must be one of"),
        (
            (X, Ids(IDS, 4, 8), PerToken(), torch.ones(3, 1)),
            r"topk_weights: shape is \(3, 1\), must be",
        ),
        ((X, Ids(IDS, 4, 8), PerToken(5)), r"output.terms: is 5, must be 1 to 4"),
        ((X, Ids(IDS, 4, 8), Static(torch.ones(3))), r"output.global_scale: shape is \(3,\), must"),
        (
            (X, Ids(IDS, 4, 8), 3),
            r"output: is a int, must be None, Static\(global_scale, terms\), ",
        ),
        ((X, IDS), r"source: is Tensor, must be a Routing, Ids or Logits"),
    ],
)
def test_refuses(arguments: tuple, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        moe_dispatch(*arguments)
