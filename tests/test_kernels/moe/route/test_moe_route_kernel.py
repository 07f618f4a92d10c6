"""``moe_route`` on GPUs: tiles in use exactly, tiles beyond arbitrary."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import InvalidArgument, moe_route
from nvfp4_kernels.moe.route.choose import CTA_SLOTS, choose_config
from nvfp4_kernels.moe.route.tile import MAX_MAPPED, RouteTile
from nvfp4_kernels.moe.routing import TILE_TOKENS, Routing
from tests.test_kernels.routing_cases import CASES, RoutingCase, check_routing
from tests.test_kernels.rowwise.row_cases import EVERY_SCHEDULE, TWO_SCHEDULES

pytestmark = pytest.mark.schedules("random 1")
SM90, SM100 = pytest.mark.arch("sm_90"), pytest.mark.arch("sm_100")
POISON = 2**31 - 1  # fills unwritten memory

# Layouts that no small batch gets by default.
TILES = {
    "one warp": RouteTile(32, steps=4),
    "one warp, several turns": RouteTile(32, steps=2, single=False),
    "five warps": RouteTile(160),
    "two CTAs": RouteTile(64, cluster=2, steps=2),
    "eight CTAs": RouteTile(32, cluster=8),
    "four CTAs, several turns": RouteTile(32, cluster=4, steps=1, single=False),
}


def use(patch: pytest.MonkeyPatch, tile: RouteTile) -> None:
    """Make the op use ``tile`` for any batch."""
    module = import_module("nvfp4_kernels.moe.route.kernel")
    patch.setattr(module, "choose_config", lambda *_: tile)


def check(case: RoutingCase, device: torch.device, ids: Tensor | None = None) -> Routing:
    ids, mapped = case.topk_ids() if ids is None else ids, case.expert_map()
    given = ids.to(device), case.experts, case.tile_tokens
    found = moe_route(*given, mapped if mapped is None else mapped.to(device))
    check_routing(found, ids, mapped, case.experts, case.tile_tokens)
    used = int(found.groups[0])
    assert bool((found.groups[1 + used :] == POISON).all())
    assert bool((found.slots[used:] == POISON).all())
    return found


@SM100
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cases(case: RoutingCase, op_device: torch.device) -> None:
    check(case, op_device)


@SM90
def test_on_hopper(op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    check(CASES["round-robin map"], op_device)
    use(monkeypatch, TILES["two CTAs"])
    check(RoutingCase(25, 4, 40), op_device)


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_tiles(tile: RouteTile, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, tile)
    check(RoutingCase(29, 4, 70, ids="hostile"), op_device)
    check(RoutingCase(61, 2, 3, 32, ids="hostile", total=9), op_device)


@SM100
@EVERY_SCHEDULE
def test_every_schedule(op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    check(CASES["round-robin map"], op_device)
    use(monkeypatch, TILES["two CTAs"])
    check(RoutingCase(25, 4, 40), op_device)


@pytest.mark.parametrize("tile_tokens", [TILE_TOKENS[0], TILE_TOKENS[3], TILE_TOKENS[-1]])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_around_full_tiles(tile_tokens: int, more: int, op_device: torch.device) -> None:
    """One slot more or less than two tiles hold, for one expert and for two neighbours."""
    slots = 2 * tile_tokens + more
    check(RoutingCase(slots, 1, 2, tile_tokens, ids="one"), op_device)
    ids = torch.ones(2 * slots, 1, dtype=torch.int32)
    ids[slots:] = 2
    check(RoutingCase(2 * slots, 1, 4, tile_tokens), op_device, ids[torch.randperm(2 * slots)])


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("slots", [256, 512, CTA_SLOTS])
def test_bounds_of_tiles(slots: int, more: int, op_device: torch.device) -> None:
    check(RoutingCase(slots + more, 1, 16, 32, ids="each"), op_device)


@pytest.mark.parametrize("experts", [511, 1024])
def test_many_experts(experts: int, op_device: torch.device) -> None:
    check(RoutingCase(40, 22, experts), op_device)


def test_more_slots_than_registers_hold(op_device: torch.device) -> None:
    """A prefill of 8192 tokens fits in the cluster's registers, a longer one does not."""
    case = RoutingCase(8192 + 40, 8, 12, 256)
    tile = choose_config(8192 * 8, 12)
    assert tile.single
    assert not choose_config(case.tokens * 8, 12).single
    ids = torch.randint(-1, 24, (case.tokens, 8), dtype=torch.int32)
    check(replace(case, total=24), op_device, ids)


def test_one_slot_of_every_lane(op_device: torch.device) -> None:
    """Order within a warp: all lanes choose one expert, or every third lane does."""
    for ids in (torch.zeros(64, 1), torch.arange(96).unsqueeze(1) % 3):
        check(RoutingCase(len(ids), 1, 3), op_device, ids.int())


@TWO_SCHEDULES
def test_dependent_launches(op_device: torch.device) -> None:
    """A second launch may start before the first has ended, and reads the first one's result."""
    case = RoutingCase(16, 2, 40)
    rows = check(case, op_device).rows
    found = moe_route(rows, 40, 8)
    check_routing(found, rows, None, 40, 8)


def test_choose_config() -> None:
    assert choose_config(0, 8) == RouteTile(256)
    assert choose_config(8, 300) == RouteTile(320)
    assert choose_config(4096, 32) == RouteTile(1024, steps=4)
    assert choose_config(65536, 32) == RouteTile(1024, cluster=8, steps=8)


def test_refused_layout(op_device: torch.device) -> None:
    ids = torch.zeros(4, 4, dtype=torch.int32, device=op_device)
    with pytest.raises(InvalidArgument, match=r"topk_ids: strides are .* call .contiguous"):
        moe_route(ids[:, :2], 4, 8)
    long = torch.zeros(MAX_MAPPED + 1, dtype=torch.int32, device=op_device)
    with pytest.raises(InvalidArgument, match=r"expert_map: has 4097 experts, must have at most"):
        moe_route(ids, 4, 8, long)
