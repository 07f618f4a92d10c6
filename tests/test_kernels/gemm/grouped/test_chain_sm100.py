"""A layer's products on sm_100, one after the other and beside one another."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import grouped_silu_mul_gemm_quantized
from nvfp4_kernels.activation import SILU
from nvfp4_kernels.gemm.grouped.reference import grouped_gemm as reference
from nvfp4_kernels.gemm.sm100.tile import Tile
from tests import devices
from tests.emulator import EAGER, STANDARD, Schedule
from tests.emulator.findings import MissingDependencyWait
from tests.test_kernels.gemm.grouped.families import TileCase, swapped, use
from tests.test_kernels.gemm.grouped.tiles import Case, arguments, check_untouched
from tests.test_kernels.mistakes import NO_DEPENDENCY_WAIT, compiled_anew

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
    """Both products of a layer: 288 elements a token, 544 of an expert."""
    first = Case(COUNTS, tile_tokens, 544, 288, weights=2)
    return first, Case(COUNTS, tile_tokens, 144, 544, out_dtype=torch.bfloat16)


def layer(name: str, routed_before: bool, first_is_late: bool = False) -> Callable[[], None]:
    """Launch what routes and two products; once they have run, what is returned checks them.

    The second product's bits are those of unfused references. ``first_is_late``: the first product
    takes the routing for one that has ended.
    """
    from nvfp4_kernels.gemm.sm100.launch_grouped import grouped_gemm
    from tests.test_kernels.gemm.grouped.written import on_device

    tile, tile_tokens = LAYERS[name]
    first, second = cases(tile_tokens)
    up, down = arguments(first), arguments(second)
    groups = on_device(up["groups"])
    given = up | {"groups": groups, "out_global_scale": SCALE}
    with pytest.MonkeyPatch.context() as patch:
        use(TileCase(tile, first, 2), patch)
        if first_is_late:
            data, scales = grouped_gemm(
                **given, n=first.n, out_dtype=torch.float32, routed_before=True
            )
        else:
            data, scales = grouped_silu_mul_gemm_quantized(**given)
    weights = {name: down[name] for name in ("b", "b_scales", "alpha")}
    plan: dict[str, Any] = {"row_scale": None, "n": second.n, "out_global_scale": None}
    plan |= {"activation": None, "out_dtype": second.out_dtype}
    with pytest.MonkeyPatch.context() as patch:
        use(TileCase(tile, second, 2), patch)
        out, _ = grouped_gemm(data, scales, groups, **weights, **plan, routed_before=routed_before)

    def check() -> None:
        right = expected(up, weights, plan, first)
        assert torch.equal(out[: second.tiles], right[: second.tiles])
        check_untouched(second, out)

    return check


def expected(up: dict[str, Any], weights: dict[str, Any], plan: Any, first: Case) -> Tensor:
    """The layer by references; the sums of the second product too are exact."""
    h, h_scales = reference(
        **up | {"activation": SILU}, n=first.n, out_global_scale=SCALE, out_dtype=torch.float32
    )
    groups = up["groups"]
    out, _ = reference(h, h_scales, groups, **weights, **plan)
    return out


@pytest.mark.arch("sm_100")
@pytest.mark.schedules("random 1")
@pytest.mark.parametrize("routed_before", [False, True])
@TILES
def test_layer(name: str, routed_before: bool, op_device: torch.device) -> None:
    layer(name, routed_before)()


@pytest.mark.parametrize("schedule", STANDARD, ids=str)
def test_beside_one_another(schedule: Schedule) -> None:
    """With every launch as early as those before it let it be."""
    with devices.emulated_ops(schedule) as gpu:
        with gpu.overlapped():
            check = layer("swapped, split", routed_before=True)
        check()


def test_nothing_is_read_before_the_routing_has_ended() -> None:
    """A first product that does not wait for its count, or takes the routing for an old one."""
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
