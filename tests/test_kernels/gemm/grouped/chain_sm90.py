"""Dependent launches on sm_90: each may start before its predecessor has ended."""

from dataclasses import replace

import torch

from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile
from nvfp4_kernels.runtime.compile import launch
from tests.devices import KernelDevice
from tests.test_kernels.gemm.grouped.tiles_sm90 import Operands, grid_operands, launched, put_tiles
from tests.test_kernels.routing_cases import RoutingCase

ROUTING = RoutingCase(12, 2, 4, 8, ids="hostile")
FIRST = Tile(8, 2, warpgroups=1, max_stages=2, grouped=True)
SECOND = Tile(8, warpgroups=1, max_stages=2, grouped=True, routed_before=True)
INNER = 96


def routed(device: KernelDevice, given: Operands) -> torch.Tensor:
    """``groups``, of which a kernel writes the entries in use; further memory stays unchanged."""
    from tests.test_kernels.gemm.grouped.router_sm90 import Router, RouterArguments

    source = device.put("source", given.groups.clone())
    groups = device.output("groups", given.groups)
    launch(Router(), RouterArguments(source, groups, 1 + given.used))  # type: ignore[arg-type]
    return groups


def layer(device: KernelDevice, first: Tile = FIRST, second: Tile = SECOND, sms: int = 2) -> None:
    """Check routing and both products of a layer against the formula."""
    up = grid_operands(ROUTING, INNER, 144, gated=True)
    down = replace(grid_operands(ROUTING, 72, INNER, gated=False), groups=up.groups)
    groups = routed(device, up)
    a = put_tiles(device, "a", up.a, up.used)
    weights = [
        [device.put(f"{name} {i}", t) for i, t in enumerate(given.weights)]
        for name, given in (("up", up), ("down", down))
    ]
    h = launched(device, first, EpilogueConfig(), (a, groups, *weights[0]), up, sms, "h")
    out = launched(device, second, EpilogueConfig(), (h, groups, *weights[1]), down, sms)
    assert torch.equal(h[: up.used].cpu(), up.expected())
    expected = replace(down, a=h.cpu()).expected()
    # Sums of 96 products round in another order, and so does the result.
    atol = 2.0**-18 * float(expected.abs().max())
    torch.testing.assert_close(out[: up.used].cpu(), expected, rtol=2.0**-7, atol=atol)
    assert out[up.used :].isnan().all()


def product_after_routing(device: KernelDevice, tile: Tile) -> None:
    """Check one product launched right after the routing kernel."""
    given = grid_operands(ROUTING, INNER, 144, gated=tile.weights == 2)
    groups = routed(device, given)
    a = put_tiles(device, "a", given.a, given.used)
    weights = [device.put(f"b {i}", t) for i, t in enumerate(given.weights)]
    out = launched(device, tile, EpilogueConfig(), (a, groups, *weights), given, sms=2)
    assert torch.equal(out[: given.used].cpu(), given.expected())
