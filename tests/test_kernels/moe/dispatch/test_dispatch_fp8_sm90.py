"""``moe_dispatch`` to E4M3 on sm_90: tiles in use are bit-identical, other tiles untouched."""

import math
import re
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import Ids, InvalidArgument, Logits, PerTokenFp8, Router, StaticFp8, moe_dispatch
from nvfp4_kernels.device.row_vectors.tile import VectorTile, longest_row
from nvfp4_kernels.devices import SM_COUNTS
from nvfp4_kernels.moe.dispatch import reference
from nvfp4_kernels.moe.dispatch.call import DispatchCall
from nvfp4_kernels.moe.dispatch.choose import MAX_SLOTS, choose_fp8_rows
from nvfp4_kernels.moe.routing import Routing
from tests import devices
from tests.emulator import EAGER
from tests.test_kernels.moe.dispatch import test_dispatch_ids as ids_tests
from tests.test_kernels.moe.dispatch import test_dispatch_logits as logits_tests
from tests.test_kernels.moe.dispatch.parts import tiles_of
from tests.test_kernels.moe.dispatch.test_dispatch_tiles import routed
from tests.test_kernels.moe.dispatch.test_dispatch_tiles_kernels import check_in_use, expected_of
from tests.test_kernels.moe.dispatch.test_dispatch_tiles_kernels import on as on_device
from tests.test_kernels.router_cases import RouterCase
from tests.test_kernels.routing_cases import CASES, KINDS, RoutingCase
from tests.test_kernels.rowwise.row_cases import EVERY_SCHEDULE, EVERY_VECTOR_TILE

pytestmark = [pytest.mark.arch("sm_90"), pytest.mark.schedules("random 1")]
BF16, FP16 = torch.bfloat16, torch.float16
EXTREMES = pytest.mark.schedules("eager", "all late", "random 1")
EVERY_KIND = pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
SCALE = torch.tensor(0.0173)
OUTPUTS = {"static": StaticFp8(SCALE), "per token": PerTokenFp8()}
EVERY_OUTPUT = pytest.mark.parametrize("output", OUTPUTS.values(), ids=OUTPUTS)
Fp8 = StaticFp8 | PerTokenFp8


@pytest.fixture(autouse=True)
def few_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan launches for a GPU of two SMs: few CTAs, each with many work items."""
    monkeypatch.setitem(SM_COUNTS, "sm_90", 2)


def use(patch: pytest.MonkeyPatch, tile: VectorTile, ctas: int) -> None:
    """Make the op use ``tile`` for any batch, with ``ctas`` CTAs for existing tiles."""
    module: Any = import_module("nvfp4_kernels.moe.dispatch.launch")
    patch.setattr(module, "choose_fp8_rows", lambda *_: tile)
    patch.setattr(module, "ctas_of_tiles", lambda *_: ctas)


def check(
    x: Tensor,
    routing: Routing,
    device: torch.device,
    output: Fp8,
    weights: Tensor | None = None,
) -> None:
    """Check tiles of a routing against the reference."""
    factors = None if weights is None else weights.to(device)
    moved = x.to(device), on_device(device, routing), ids_tests.on(device, output), factors
    expected = expected_of(x, routing, output, weights)
    check_in_use(tiles_of(moe_dispatch(*moved)), expected, routing)


@EVERY_OUTPUT
@EVERY_KIND
def test_cases(case: RoutingCase, output: Fp8, op_device: torch.device) -> None:
    check(*routed(case, 80), op_device, output)


@EVERY_OUTPUT
@pytest.mark.parametrize("name", ["ids of no expert", "tiles of 64"])
def test_weights(name: str, output: Fp8, op_device: torch.device) -> None:
    x, routing = routed(CASES[name], 64, FP16)
    check(x, routing, op_device, output, torch.rand(routing.rows.shape))


@EVERY_OUTPUT
@pytest.mark.parametrize("k", [2880, 7168])
def test_hidden_sizes_of_models(k: int, output: Fp8, op_device: torch.device) -> None:
    check(*routed(RoutingCase(2, 1, 4), k), op_device, output)


@EVERY_VECTOR_TILE
def test_tiles(tile: VectorTile, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of rows, whole rows, idle warps; more work items than CTAs; a row that ends early."""
    use(monkeypatch, tile, ctas=3)
    case = RoutingCase(11, 2, 3, ids="hostile")
    for k in (tile.elements, tile.elements - 80):
        check(*routed(case, k, FP16), op_device, PerTokenFp8())
    for k in (2 * tile.elements, 2 * tile.elements + 80):
        x, routing = routed(case, k)
        check(x, routing, op_device, StaticFp8(SCALE), torch.rand(routing.rows.shape))


@EVERY_OUTPUT
@EVERY_SCHEDULE
def test_every_schedule(
    output: Fp8, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, VectorTile(64, 1), ctas=2)
    x, routing = routed(RoutingCase(9, 2, 3, ids="hostile"), 16 * 7)
    check(x, routing, op_device, output, torch.rand(routing.rows.shape))


@EVERY_OUTPUT
@pytest.mark.parametrize("name", ["ids of no expert", "tiles of 64"])
def test_rows_in_tiles(name: str, output: Fp8, op_device: torch.device) -> None:
    """Rows of slots are quantised in place; NaN in padding is not read."""
    x, routing = routed(CASES[name], 96)
    (in_tiles,) = expected_of(x, routing)
    in_tiles[routing.slots < 0] = math.nan
    check(in_tiles, routing, op_device, output)


@EVERY_OUTPUT
def test_not_finite_tokens(output: Fp8, op_device: torch.device) -> None:
    """NaN and infinities stay in their rows; zeros get the scale one."""
    x, routing = routed(RoutingCase(8, 2, 4), 96)
    x[1, 5], x[2, 95], x[3, 40], x[4] = math.nan, math.inf, -math.inf, 0.0
    check(x, routing, op_device, output)


@pytest.mark.parametrize("name", ids_tests.FEW)
def test_ids(name: str, op_device: torch.device) -> None:
    ids_tests.check_outputs(CASES[name], 80, op_device, False, tuple(OUTPUTS.values()))


@EXTREMES
def test_ids_in_turns(op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """More work items than CTAs; a CTA has fewer threads than there are slots and experts."""
    module: Any = import_module("nvfp4_kernels.moe.dispatch.launch")
    monkeypatch.setattr(module, "ctas_of_ids", lambda *_: 3)
    case = RoutingCase(21, 4, 70, ids="hostile", total=140)
    ids_tests.check_outputs(case, 16 * 7, op_device, True, tuple(OUTPUTS.values()))


@pytest.mark.parametrize("name", logits_tests.CASES)
def test_logits(name: str, op_device: torch.device) -> None:
    case = logits_tests.CASES[name]
    logits_tests.check_outputs(case, 80, op_device, tuple(OUTPUTS.values()))


@EXTREMES
def test_logits_in_turns(op_device: torch.device) -> None:
    """Clusters with more tokens than warps, and more work items than CTAs."""
    case = logits_tests.Case(RouterCase(37, 16, Router(2), padded=True), 8)
    logits_tests.check_outputs(case, 16 * 37, op_device, tuple(OUTPUTS.values()))


@EVERY_OUTPUT
def test_launches(output: Fp8) -> None:
    """A batch of a decode takes one launch, a larger one several, with the same results."""
    with devices.emulated_ops(EAGER, "sm_90") as gpu:
        for tokens, of_ids, of_logits in ((8, 1, 1), (64, 1, 1), (1 + MAX_SLOTS, 2, 3)):
            x, logits = torch.randn(tokens, 64).to(BF16), torch.randn(tokens, 4)
            ids = logits.argmax(-1, keepdim=True).int()
            sources = (Ids(ids, 4, 8), of_ids), (Logits(logits, Router(1), 4, 8), of_logits)
            for source, count in sources:
                gpu.launches.clear()
                found = moe_dispatch(x, source, output)
                assert len(gpu.launches) == count
                expected = reference.moe_dispatch(DispatchCall(x, source, output))
                check_in_use(tiles_of(found), tiles_of(expected), expected.routing)


@EVERY_OUTPUT
@EVERY_SCHEDULE
def test_dependent_launches(output: Fp8, op_device: torch.device) -> None:
    """A second launch may start before the first has ended, and reads the first one's result."""
    x, routing = routed(RoutingCase(6, 2, 3), 64)
    on = on_device(op_device, routing)
    in_tiles = moe_dispatch(x.to(op_device), on).data
    found = moe_dispatch(in_tiles, on, ids_tests.on(op_device, output))
    check_in_use(tiles_of(found), expected_of(x, routing, output), routing)


@EVERY_OUTPUT
def test_each_byte_once(output: Fp8) -> None:
    """Tokens are read from HBM once; tiles in use are written once, other tiles never."""
    for case in (RoutingCase(11, 2, 3), RoutingCase(70, 2, 3, 64)):
        x, routing = routed(case, 80)
        with devices.emulated_ops(EAGER, "sm_90") as gpu:
            written = tiles_of(moe_dispatch(x, routing, output))
            counted = gpu.launches[-1].counters.nbytes
        used = int(routing.groups[0])
        numbers = 4 + routing.slots[:used].nbytes + 4 * isinstance(output, StaticFp8)
        assert counted["HBM read, each byte once"] == x.nbytes + numbers
        assert counted["global write"] == sum(t[:used].nbytes for t in written)
        assert counted["HBM write, each byte once"] == counted["global write"]


@EVERY_OUTPUT
def test_arithmetic_is_ieee(output: Fp8) -> None:
    """The PTX has no approximate reciprocal: the emulator's is too exact for results to show it."""
    x, routing = routed(RoutingCase(4, 2, 3), 64)
    with devices.emulated_ops(EAGER, "sm_90") as gpu:
        moe_dispatch(x, routing, output)
        text = "\n".join(gpu.launches[-1].program.module.lines)
    assert "rcp.rn.f32" in text
    assert re.search(r"\.(approx|ftz)\b", text) is None


def test_choices() -> None:
    """Rows with one scale are cut as copies are; with a scale each, a CTA has a whole row."""
    assert choose_fp8_rows(64, 7168, 2, False, 132) == VectorTile(224, 4)
    assert choose_fp8_rows(64, 2048, 2, True, 132) == VectorTile(256, 1)
    assert choose_fp8_rows(64, 7168, 2, True, 132) == VectorTile(448, 2)
    assert choose_fp8_rows(8192, 7168, 2, True, 132) == VectorTile(224, 4)


@EVERY_OUTPUT
def test_refused_layout(output: Fp8, op_device: torch.device) -> None:
    _, routing = routed(RoutingCase(4, 2, 3), 64)
    late = torch.zeros(4 * 64 + 4, dtype=BF16, device=op_device)[4:].view(4, 64)
    for bad, message in (
        (torch.zeros(64, 4, dtype=BF16).mT, r"x: strides are .* call .contiguous"),
        (late, r"x: starts 8 bytes after a multiple of 16.*clone"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            moe_dispatch(
                bad.to(op_device), on_device(op_device, routing), ids_tests.on(op_device, output)
            )


def test_refused_length(op_device: torch.device) -> None:
    longest = longest_row(words=4)
    check(*routed(RoutingCase(1, 1, 1), longest), op_device, PerTokenFp8())
    x, routing = routed(RoutingCase(1, 1, 1), longest + 16)
    message = f"x: K is {longest + 16}, must be at most {longest}; quantise longer rows with Static"
    with pytest.raises(InvalidArgument, match=message):
        moe_dispatch(x.to(op_device), on_device(op_device, routing), PerTokenFp8())
