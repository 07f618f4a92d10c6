"""``moe_dispatch`` of a routing on GPUs: tiles in use are bit-identical, other tiles untouched."""

import math
from importlib import import_module

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import InvalidArgument, PerToken, Static, moe_dispatch
from nvfp4_kernels.device.row_vectors.tile import VectorTile
from nvfp4_kernels.device.rowwise.tile import RowTile
from nvfp4_kernels.devices import SM_COUNTS
from nvfp4_kernels.formats.output import Output
from nvfp4_kernels.moe.dispatch import reference
from nvfp4_kernels.moe.dispatch.call import DispatchCall
from nvfp4_kernels.moe.dispatch.choose import (
    choose_gather,
    ctas_of_tiles,
    items_of_tile,
)
from nvfp4_kernels.moe.routing import Routing
from tests import devices
from tests.emulator import EAGER
from tests.test_kernels.bits import bits, check_equal
from tests.test_kernels.moe.dispatch.parts import tiles_of
from tests.test_kernels.moe.dispatch.test_dispatch_tiles import routed
from tests.test_kernels.routing_cases import CASES, KINDS, RoutingCase
from tests.test_kernels.rowwise.row_cases import EVERY_SCHEDULE, TWO_SCHEDULES

pytestmark = pytest.mark.schedules("random 1")
BF16, FP16 = torch.bfloat16, torch.float16
SM90, SM100 = pytest.mark.arch("sm_90"), pytest.mark.arch("sm_100")
EVERY_KIND = pytest.mark.parametrize("case", KINDS.values(), ids=KINDS)
SCALE = torch.tensor(0.004)
# Rows that share a warp, or do not; several steps per thread, and several CTAs per row.
TILES = {
    "8 rows": RowTile(8, 3, 2),
    "4 rows": RowTile(4, 2, 1),
    "2 rows": RowTile(2, 3, 2),
    "1 row": RowTile(1, 2, 2),
}


@pytest.fixture(autouse=True)
def one_sm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan launches for a GPU of one SM: few CTAs, each with many work items."""
    for arch in ("sm_90", "sm_100"):
        monkeypatch.setitem(SM_COUNTS, arch, 1)


def on(device: torch.device, routing: Routing) -> Routing:
    """A routing on ``device``; beyond the tiles in use, slots hold an invalid token."""
    groups, slots, rows = (part.clone() for part in routing)
    groups[1 + int(groups[0]) :] = slots[int(groups[0]) :] = 2**31 - 1
    return Routing(*(part.to(device) for part in (groups, slots, rows)))


def check_in_use(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], routing: Routing) -> None:
    """Check that tiles in use are bit-identical, and that other tiles still hold poison."""
    used = int(routing.groups[0])
    check_equal([t[:used] for t in found], [t[:used] for t in expected])
    for each in found:
        unused = each[used:]
        poison = torch.empty_like(unused, device="cpu")
        assert torch.equal(bits(unused), bits(poison))


def expected_of(
    x: Tensor, routing: Routing, output: Output = None, weights: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Tiles by the reference."""
    return tiles_of(reference.moe_dispatch(DispatchCall(x, routing, output, weights)))


def check(
    x: Tensor,
    routing: Routing,
    device: torch.device,
    weights: Tensor | None = None,
    terms: int = 1,
    per_token: bool | None = None,
) -> None:
    """Check both scalings, or the one that ``per_token`` selects."""
    given, on_device = x.to(device), on(device, routing)
    factors = weights if weights is None else weights.to(device)
    if per_token is not True:
        found = moe_dispatch(given, on_device, Static(SCALE.to(device), terms), factors)
        expected = expected_of(x, routing, Static(SCALE, terms), weights)
        check_in_use(tiles_of(found), expected, routing)
    if per_token is not False:
        found = moe_dispatch(given, on_device, PerToken(terms), factors)
        expected = expected_of(x, routing, PerToken(terms), weights)
        check_in_use(tiles_of(found), expected, routing)


def use(patch: pytest.MonkeyPatch, tile: RowTile, ctas: int | None = None) -> None:
    """Make the op use ``tile`` for any batch, with ``ctas`` CTAs."""
    module = import_module("nvfp4_kernels.moe.dispatch.launch")
    patch.setattr(module, "choose_rows", lambda *_: tile)
    if ctas is not None:
        patch.setattr(module, "ctas_of_tiles", lambda *_: ctas)


@SM100
@EVERY_KIND
def test_cases(case: RoutingCase, op_device: torch.device) -> None:
    check(*routed(case, 80), op_device)


@SM100
@pytest.mark.parametrize(
    ("name", "terms"),
    [("ids of no expert", 2), ("ids of no expert", 4), ("tiles of 32", 3), ("tiles of 64", 4)],
)
def test_terms_and_weights(name: str, terms: int, op_device: torch.device) -> None:
    x, routing = routed(CASES[name], 64, FP16)
    weights = torch.rand(routing.rows.shape)
    check(x, routing, op_device, weights, terms, per_token=terms == 2)


@SM100
@pytest.mark.parametrize(
    ("name", "rows"),
    [("8 rows", 8), ("8 rows", 32), ("4 rows", 64), ("2 rows", 8), ("2 rows", 64), ("1 row", 32)],
)
def test_tiles(
    name: str, rows: int, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More work items than CTAs, and rows that end within a CTA's share."""
    use(monkeypatch, TILES[name], ctas=3)
    x, routing = routed(RoutingCase(21, 2, 3, rows, ids="hostile"), 16 * 11)
    check(x, routing, op_device, terms=1 if rows == 32 else 2)


@SM100
@EVERY_SCHEDULE
def test_every_schedule(op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, RowTile(2, 2, 3), ctas=2)
    x, routing = routed(RoutingCase(9, 2, 3, ids="hostile"), 16 * 7)
    check(x, routing, op_device, torch.rand(routing.rows.shape), 2)


@SM100
@pytest.mark.parametrize(("name", "terms"), [("ids of no expert", 1), ("tiles of 64", 3)])
def test_rows_in_tiles(name: str, terms: int, op_device: torch.device) -> None:
    """Rows of slots are quantised in place; NaN in padding is not read."""
    x, routing = routed(CASES[name], 64)
    (in_tiles,) = expected_of(x, routing)
    in_tiles[routing.slots < 0] = math.nan
    check(in_tiles, routing, op_device, terms=terms)


@SM100
def test_hidden_size_of_a_model(op_device: torch.device) -> None:
    check(*routed(RoutingCase(1, 1, 4), 7168), op_device)


@SM90
def test_gather_on_hopper(op_device: torch.device) -> None:
    test_gather(CASES["ids of no expert"], op_device)


@SM100
@EVERY_KIND
def test_gather(case: RoutingCase, op_device: torch.device) -> None:
    x, routing = routed(case, 48)
    found = moe_dispatch(x.to(op_device), on(op_device, routing))
    check_in_use(tiles_of(found), expected_of(x, routing), routing)


@TWO_SCHEDULES
def test_parts_of_rows(op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several CTAs per row and several work items per CTA, with weights."""
    module = import_module("nvfp4_kernels.moe.dispatch.launch")
    monkeypatch.setattr(module, "choose_gather", lambda *_: VectorTile(32, 2))
    monkeypatch.setattr(module, "ctas_of_tiles", lambda *_: 5)
    x, routing = routed(RoutingCase(9, 2, 3, ids="hostile"), 16 * 37, FP16)
    weights = torch.rand(routing.rows.shape)
    moved = x.to(op_device), on(op_device, routing)
    found = moe_dispatch(*moved, topk_weights=weights.to(op_device))
    check_in_use(tiles_of(found), expected_of(x, routing, None, weights), routing)


@SM100
@TWO_SCHEDULES
def test_dependent_launches(op_device: torch.device) -> None:
    """A second launch may start before the first has ended, and reads the first one's result."""
    x, routing = routed(RoutingCase(6, 2, 3), 64)
    in_tiles = moe_dispatch(x.to(op_device), on(op_device, routing)).data
    found = moe_dispatch(in_tiles, on(op_device, routing), Static(SCALE.to(op_device)))
    check_in_use(tiles_of(found), expected_of(x, routing, Static(SCALE)), routing)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("terms", [1, 3])
def test_each_byte_once(terms: int, per_token: bool) -> None:
    """Tokens are read from HBM once; tiles in use are written once, other tiles never."""
    for case in (RoutingCase(11, 2, 3), RoutingCase(70, 2, 3, 64)):
        x, routing = routed(case, 96)
        with devices.emulated_ops(EAGER) as gpu:
            output = PerToken(terms) if per_token else Static(SCALE, terms)
            written = tiles_of(moe_dispatch(x, routing, output))
            counted = gpu.launches[-1].counters.nbytes
        used = int(routing.groups[0])
        numbers = 4 + routing.slots[:used].nbytes + (0 if per_token else 4)
        assert counted["HBM read, each byte once"] == x.nbytes + numbers
        assert counted["global write"] == sum(t[:used].nbytes for t in written)
        assert counted["HBM write, each byte once"] == counted["global write"]


def test_choices() -> None:
    assert items_of_tile(RowTile(8, 4, 1), 8, 7168) == 28
    assert items_of_tile(RowTile(2, 8, 4), 32, 7168) == 16
    assert items_of_tile(RowTile(8, 8, 4), 256, 2048) == 32
    assert ctas_of_tiles(10, 128, 148) == 10
    assert ctas_of_tiles(10**6, 256, 148) == 4 * 148
    assert choose_gather(7168) == VectorTile(224, 4)
    assert choose_gather(2048) == VectorTile(256, 1)
    assert choose_gather(16) == VectorTile(32, 1)


@SM100
def test_refused_layout(op_device: torch.device) -> None:
    _, routing = routed(RoutingCase(4, 2, 3), 64)
    late = torch.zeros(4 * 64 + 8, dtype=BF16, device=op_device)[8:].view(4, 64)
    for bad, message in (
        (torch.zeros(64, 4, dtype=BF16).mT, r"x: strides are .* call .contiguous"),
        (late, r"x: starts 16 bytes past a multiple of 32.*clone"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            moe_dispatch(bad.to(op_device), on(op_device, routing), Static(SCALE.to(op_device)))
