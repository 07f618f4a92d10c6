"""Both grouped products of a layer on sm_100, in sequence and overlapped."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import Static, grouped_silu_mul_gemm
from nvfp4_kernels.activation import SILU
from nvfp4_kernels.gemm.call import GroupedGemmCall
from nvfp4_kernels.gemm.grouped.reference import grouped_gemm as reference
from nvfp4_kernels.gemm.sm100.tile import Tile
from tests import devices
from tests.emulator import EAGER, STANDARD, Schedule
from tests.emulator.findings import MissingDependencyWait
from tests.mutants.kernels import NO_DEPENDENCY_WAIT, compiled_anew
from tests.test_kernels.gemm.grouped.families import TileCase, swapped, use
from tests.test_kernels.gemm.grouped.tiles import Case, arguments, check_untouched

COUNTS = (3, 0, 17, 8)
SCALE = 2.0 ** torch.arange(len(COUNTS)) / 64
LAYERS = {
    "swapped": (swapped(8, max_stages=2), 8),
    "swapped, split": (swapped(16, 2, max_stages=2), 16),
    "by rows": (Tile(64, max_stages=2), 128),
    "by rows, 2 CTAs": (Tile(64, two_cta=True, cluster_m=2, max_stages=2), 256),
}
TILES = pytest.mark.parametrize("name", LAYERS)


def cases(tile_tokens: int) -> tuple[Case, Case]:
    """Both products of a layer: hidden size 288, intermediate size 544."""
    first = Case(COUNTS, tile_tokens, 544, 288, weights=2)
    return first, Case(COUNTS, tile_tokens, 144, 544, out_dtype=torch.bfloat16)


def layer(name: str, routed_before: bool, first_is_late: bool = False) -> Callable[[], None]:
    """Launch both products of a layer, after a kernel that writes ``groups`` as the routing would.

    ``name``: key of ``LAYERS``. ``routed_before``: passed to the second product; see
    ``GroupedGemmCall``. ``first_is_late``: pass ``routed_before=True`` to the first product too,
    which is a fault: the routing may still be running.

    Returns a function that checks that the output is bit-identical to the references' output.
    """
    from nvfp4_kernels.gemm.sm100.launch_grouped import grouped_gemm
    from tests.test_kernels.gemm.grouped.written import on_device

    tile, tile_tokens = LAYERS[name]
    first, second = cases(tile_tokens)
    up, down = arguments(first), arguments(second)
    groups = on_device(up["groups"])
    given = up | {"groups": groups, "output": Static(SCALE)}
    with pytest.MonkeyPatch.context() as patch:
        use(TileCase(tile, first, 2), patch)
        if first_is_late:
            late = {"n": first.n, "out_dtype": torch.float32, "routed_before": True}
            data, scales = grouped_gemm(GroupedGemmCall(**given | late))
        else:
            data, scales = grouped_silu_mul_gemm(**given)
    weights = {name: down[name] for name in ("b", "b_scales", "alpha")}
    plan: dict[str, Any] = {"row_scale": None, "bias": None, "n": second.n}
    plan |= {"activation": None, "out_dtype": second.out_dtype}
    with pytest.MonkeyPatch.context() as patch:
        use(TileCase(tile, second, 2), patch)
        call = GroupedGemmCall(data, scales, groups, **weights, **plan, routed_before=routed_before)
        out, _ = grouped_gemm(call)

    def check() -> None:
        right = expected(up, weights, plan, first)
        assert torch.equal(out[: second.tiles], right[: second.tiles])
        check_untouched(second, out)

    return check


def expected(up: dict[str, Any], weights: dict[str, Any], plan: Any, first: Case) -> Tensor:
    """Result of the layer by references; the second product's sums are exact, too."""
    how = {"activation": SILU, "n": first.n, "output": Static(SCALE), "out_dtype": torch.float32}
    h, h_scales = reference(GroupedGemmCall(**up | how))
    assert h_scales is not None
    out, _ = reference(GroupedGemmCall(h, h_scales, up["groups"], **weights, **plan))
    return out


@pytest.mark.arch("sm_100")
@pytest.mark.schedules("random 1")
@pytest.mark.parametrize("routed_before", [False, True])
@TILES
def test_layer(name: str, routed_before: bool, op_device: torch.device) -> None:
    layer(name, routed_before)()


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_beside_one_another(schedule: Schedule) -> None:
    """Every launch starts as early as its predecessors allow."""
    with devices.emulated_ops(schedule) as gpu:
        with gpu.overlapped():
            check = layer("swapped, split", routed_before=True)
        check()


def test_nothing_is_read_before_the_routing_has_ended() -> None:
    """A first product that skips its wait, or assumes old routing, is reported."""
    with (
        compiled_anew(),
        devices.emulated_ops(EAGER),
        pytest.raises(MissingDependencyWait, match=r"griddepcontrol\.wait before the read"),
    ):
        layer("swapped", routed_before=True, first_is_late=True)
    with (
        compiled_anew(NO_DEPENDENCY_WAIT),
        devices.emulated_ops(EAGER),
        pytest.raises(MissingDependencyWait, match=r"griddepcontrol\.wait before the read"),
    ):
        layer("swapped", routed_before=False)
