"""The kernel of ``moe_route`` on sm_90 and sm_100, and its launch."""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass.cute as cute
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_layout
from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.moe.route.choose import choose_config, mapped_experts
from nvfp4_kernels.moe.route.op import new_routing
from nvfp4_kernels.moe.route.sort import (
    BATCH_TYPES,
    ROUTING_TYPES,
    Batch,
    RoutingOut,
    count,
    finish,
    place_experts,
    prepare,
    sorter,
    write_slots,
    write_tiles,
)
from nvfp4_kernels.moe.route.tile import MAX_MAPPED, RouteTile, Sizes
from nvfp4_kernels.runtime.compile import launch


class RouteArguments(NamedTuple):
    """Arguments of a launch."""

    batch: Batch
    out: RoutingOut


@dataclass(frozen=True)
class MoeRoute:
    """Sort of a batch by a single CTA, or by a single cluster whose CTAs exchange counts.

    Attributes:
        tile: threads and CTAs that sort.
        sizes: number of experts, and rows per tile.
    """

    tile: RouteTile
    sizes: Sizes

    def signature(self) -> tuple[RouteArguments]:
        """Example arguments of ``__call__``, for ``cute.compile``."""
        return (example(RouteArguments, BATCH_TYPES | ROUTING_TYPES, alignment=4),)

    @cute.jit
    def __call__(self, arguments: RouteArguments, stream: cuda_driver.CUstream) -> None:
        """Launch one cluster."""
        self.kernel(arguments).launch(
            grid=(self.tile.cluster, 1, 1),
            block=(self.tile.threads, 1, 1),
            cluster=(self.tile.cluster, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: RouteArguments) -> None:
        """Count slots, scan the counts, write the routing."""
        batch, out = arguments.batch, arguments.out
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        sort = sorter(self.tile, self.sizes)
        prepare(sort, batch)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        experts, ranks = count(sort, batch)
        used = place_experts(sort)
        write_slots(sort, batch, out, experts, ranks)
        write_tiles(sort, out, used)
        finish(sort)


def check_batch(topk_ids: Tensor, expert_map: Tensor | None) -> None:
    """Raise unless kernels can read the ids and the expert map."""
    check_layout("topk_ids", topk_ids)
    check_map(expert_map)


def check_map(expert_map: Tensor | None) -> None:
    """Raise unless kernels can read the expert map, or the map is None."""
    check_layout("expert_map", expert_map)
    if expert_map is not None and len(expert_map) > MAX_MAPPED:
        raise InvalidArgument(
            f"expert_map: has {len(expert_map)} experts, must have at most {MAX_MAPPED}; route a "
            "part of them at a time"
        )


def batch_of(topk_ids: Tensor, expert_map: Tensor | None, num_experts: int) -> Batch:
    """Ids and expert map as kernel arguments."""
    total = num_experts if expert_map is None else len(expert_map)
    return Batch(topk_ids, expert_map, topk_ids.numel(), total)


def sizes_of(expert_map: Tensor | None, num_experts: int, tile_tokens: int) -> Sizes:
    """Compile-time sizes of a sort."""
    mapped = 0 if expert_map is None else mapped_experts(len(expert_map))
    return Sizes(num_experts, mapped, tile_tokens)


def moe_route(
    topk_ids: Tensor, expert_map: Tensor | None, num_experts: int, tile_tokens: int
) -> tuple[Tensor, ...]:
    """See ``nvfp4_kernels.moe.route.op.moe_route``.

    Raises:
        InvalidArgument: a tensor is misaligned or not contiguous, or the expert map is too long.
    """
    check_batch(topk_ids, expert_map)
    parts = new_routing(topk_ids, topk_ids.shape, num_experts, tile_tokens)
    kernel = MoeRoute(
        choose_config(topk_ids.numel(), num_experts),
        sizes_of(expert_map, num_experts, tile_tokens),
    )
    batch = batch_of(topk_ids, expert_map, num_experts)
    launch(kernel, RouteArguments(batch, RoutingOut(*parts)))
    return parts
