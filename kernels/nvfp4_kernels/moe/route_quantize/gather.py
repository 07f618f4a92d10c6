"""The kernel of ``moe_route_gather`` on sm_90 and sm_100, and its launch."""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass.cute as cute
from cutlass import Array, Int32
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.checks import check_layout
from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import multiprocessors
from nvfp4_kernels.moe.quantize.gather import GatheredRows, gathered_rows, moe_gather
from nvfp4_kernels.moe.quantize.tokens import TOKEN_ALIGNMENT, TOKEN_TYPES, Tokens
from nvfp4_kernels.moe.route.kernel import batch_of, check_batch, moe_route, sizes_of
from nvfp4_kernels.moe.route.op import new_routing
from nvfp4_kernels.moe.route.sort import BATCH_TYPES, ROUTING_TYPES, Batch, RoutingOut
from nvfp4_kernels.moe.route_quantize.choose import ctas_of, is_one_launch, row_capacity, sort_tile
from nvfp4_kernels.moe.route_quantize.route import CtaRoute
from nvfp4_kernels.moe.routing import Routing
from nvfp4_kernels.runtime.compile import launch


class RouteGatherArguments(NamedTuple):
    """Arguments of a launch; the last of the grid's ``ctas`` CTAs writes the routing.

    Attributes:
        batch: slots to sort.
        routing: result of the sort.
        tokens: rows to read.
        out: result [tiles, T, k].
        k: elements of a row.
    """

    batch: Batch
    routing: RoutingOut
    tokens: Tokens
    out: cute.Pointer
    k: Int32
    ctas: Int32


@dataclass(frozen=True)
class MoeRouteGather:
    """Every CTA sorts the batch in its shared memory, then copies rows of the tiles in use.

    Attributes:
        route: the sort.
        rows: layout of the copied rows.
    """

    route: CtaRoute
    rows: GatheredRows

    def signature(self) -> tuple[RouteGatherArguments]:
        """Example of ``__call__``'s arguments."""
        types = {"x": TYPES[self.rows.dtype], "out": TYPES[self.rows.dtype], **TOKEN_TYPES}
        numbers = BATCH_TYPES | ROUTING_TYPES
        alignment = TOKEN_ALIGNMENT | dict.fromkeys(numbers, 4)
        return (example(RouteGatherArguments, types | numbers, alignment),)

    @cute.jit
    def __call__(self, arguments: RouteGatherArguments, stream: cuda_driver.CUstream) -> None:
        """Launch a persistent grid."""
        self.kernel(arguments).launch(
            grid=(arguments.ctas, 1, 1),
            block=(self.rows.tile.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: RouteGatherArguments) -> None:
        """Sort, then copy rows turn by turn."""
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        slots = self.route.allocate()
        used = self.route.run(arguments.batch, arguments.routing, slots)
        rows = used * self.route.sizes.tile_tokens
        self._take_turns(arguments, slots, self.rows.turns(rows, arguments.k))

    @cute.jit
    def _take_turns(self, arguments: RouteGatherArguments, slots: Array, turns: Int32) -> None:
        for turn in range(cute.arch.block_idx()[0], turns, arguments.ctas - 1):
            self.rows.copy(arguments.tokens, slots, arguments.k, arguments.out, turn)


def moe_route_gather(
    x: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    topk_weights: Tensor | None,
) -> tuple[Tensor, ...]:
    """See ``nvfp4_kernels.moe.route_quantize.op.moe_route_gather``."""
    count, k = topk_ids.numel(), x.shape[1]
    rows = gathered_rows(x, topk_ids.shape[1], topk_weights)
    if not is_one_launch(count, tile_tokens, rows.tile.threads):
        routing = Routing(*moe_route(topk_ids, expert_map, num_experts, tile_tokens))
        return (*routing, moe_gather(x, routing, topk_weights))
    check_batch(topk_ids, expert_map)
    check_layout("x", x)
    check_layout("topk_weights", topk_weights)
    routing = Routing(*new_routing(topk_ids, topk_ids.shape, num_experts, tile_tokens))
    out = x.new_empty((*routing.slots.shape, k))
    route = CtaRoute(
        sort_tile(count, rows.tile.threads),
        sizes_of(expert_map, num_experts, tile_tokens),
        row_capacity(count, num_experts, tile_tokens),
    )
    turns = routing.slots.numel() * -(-k // rows.part)
    arguments = RouteGatherArguments(
        batch=batch_of(topk_ids, expert_map, num_experts),
        routing=RoutingOut(*routing),
        tokens=Tokens(x, None, topk_weights),
        out=out,
        k=k,
        ctas=1 + ctas_of(turns, multiprocessors(x.device)),
    )
    launch(MoeRouteGather(route, rows), arguments)
    return (*routing, out)
