"""``moe_route_quantize`` and its per-token form for sm_100."""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Array, Int32
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.device.rowwise.operands import ALIGNMENT
from nvfp4_kernels.device.rowwise.output import OUTPUT_ALIGNMENT, OUTPUT_TYPES, QuantizedRows
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import multiprocessors
from nvfp4_kernels.moe.quantize import sm100 as quantizing
from nvfp4_kernels.moe.quantize.choose import turns_of_tile
from nvfp4_kernels.moe.quantize.op import new_tiles
from nvfp4_kernels.moe.quantize.sm100 import MoeRows, check_tokens, rows_of
from nvfp4_kernels.moe.quantize.tokens import TOKEN_ALIGNMENT, TOKEN_TYPES, Tokens
from nvfp4_kernels.moe.route.kernel import batch_of, check_batch, moe_route, sizes_of
from nvfp4_kernels.moe.route.op import new_routing
from nvfp4_kernels.moe.route.sort import BATCH_TYPES, ROUTING_TYPES, Batch, RoutingOut
from nvfp4_kernels.moe.route_quantize.choose import ctas_of, is_one_launch, row_capacity, sort_tile
from nvfp4_kernels.moe.route_quantize.route import CtaRoute
from nvfp4_kernels.moe.routing import Routing
from nvfp4_kernels.runtime.compile import launch


class RouteQuantizeArguments(NamedTuple):
    """Arguments of a launch.

    Attributes:
        batch: slots to sort.
        routing: result of the sort.
        tokens: rows to read.
        out: rows to write.
        turns: CTA turns per token tile.
        ctas: size of the grid; the last CTA writes the routing.
    """

    batch: Batch
    routing: RoutingOut
    tokens: Tokens
    out: QuantizedRows
    turns: Int32
    ctas: Int32


@dataclass(frozen=True)
class MoeRouteQuantizeSm100:
    """Every CTA sorts the batch in shared memory, then takes turns at the tiles in use.

    Attributes:
        route: the sort.
        rows: layout of the quantised rows.
    """

    route: CtaRoute
    rows: MoeRows

    def signature(self) -> tuple[RouteQuantizeArguments]:
        """Example of ``__call__``'s arguments."""
        types = {"x": TYPES[self.rows.dtype], **TOKEN_TYPES, **OUTPUT_TYPES}
        numbers = BATCH_TYPES | ROUTING_TYPES
        alignment = {"x": ALIGNMENT, **TOKEN_ALIGNMENT, **OUTPUT_ALIGNMENT}
        alignment |= dict.fromkeys(numbers, 4)
        return (example(RouteQuantizeArguments, types | numbers, alignment),)

    @cute.jit
    def __call__(self, arguments: RouteQuantizeArguments, stream: cuda_driver.CUstream) -> None:
        """Launch a persistent grid."""
        self.kernel(arguments).launch(
            grid=(arguments.ctas, 1, 1),
            block=(self.rows.tile.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: RouteQuantizeArguments) -> None:
        """Sort, then quantise rows turn by turn."""
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        slots = self.route.allocate()
        used = self.route.run(arguments.batch, arguments.routing, slots)
        self._take_turns(arguments, slots, used * arguments.turns)

    @cute.jit
    def _take_turns(self, arguments: RouteQuantizeArguments, slots: Array, turns: Int32) -> None:
        columns = self.rows.columns
        for turn in range(cute.arch.block_idx()[0], turns, arguments.ctas - 1):
            place = self.rows.place(turn % columns, turn // columns)
            slot = self.rows.slot(slots, place)
            self.rows.write(arguments.tokens, slot, arguments.out, place)
            if cutlass.const_expr(self.rows.per_token):
                ptx.barrier_cta_sync()  # shared memory is that of the next turn, too


def moe_route_quantize(
    x: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    global_scale: Tensor,
    topk_weights: Tensor | None,
    terms: int,
) -> tuple[Tensor, ...]:
    """See ``nvfp4_kernels.moe.route_quantize.op.moe_route_quantize``."""
    rows = rows_of(x, topk_ids.shape, tile_tokens, topk_weights, False, terms)
    if not is_one_launch(topk_ids.numel(), tile_tokens, rows.tile.threads):
        routing = Routing(*moe_route(topk_ids, expert_map, num_experts, tile_tokens))
        return (*routing, *quantizing.moe_quantize(x, routing, global_scale, topk_weights, terms))
    routing = Routing(*new_routing(topk_ids, topk_ids.shape, num_experts, tile_tokens))
    return (*routing, *_run(x, topk_ids, expert_map, num_experts, global_scale, topk_weights,
                            routing, rows))  # fmt: skip


def moe_route_quantize_per_token(
    x: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    topk_weights: Tensor | None,
    terms: int,
) -> tuple[Tensor, ...]:
    """See ``nvfp4_kernels.moe.route_quantize.op.moe_route_quantize_per_token``."""
    rows = rows_of(x, topk_ids.shape, tile_tokens, topk_weights, True, terms)
    if not is_one_launch(topk_ids.numel(), tile_tokens, rows.tile.threads):
        routing = Routing(*moe_route(topk_ids, expert_map, num_experts, tile_tokens))
        return (*routing, *quantizing.moe_quantize_per_token(x, routing, topk_weights, terms))
    routing = Routing(*new_routing(topk_ids, topk_ids.shape, num_experts, tile_tokens))
    row_scale = x.new_empty(routing.slots.shape, dtype=torch.float32)
    parts = _run(x, topk_ids, expert_map, num_experts, row_scale, topk_weights, routing, rows)
    return (*routing, *parts, row_scale)


def _run(
    x: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_experts: int,
    scale: Tensor,
    topk_weights: Tensor | None,
    routing: Routing,
    rows: MoeRows,
) -> tuple[Tensor, Tensor]:
    """Launch, even without slots or elements: the number of tiles must be written."""
    check_batch(topk_ids, expert_map)
    check_tokens(x, topk_weights)
    tile_tokens, tiles, count = rows.tile_tokens, len(routing.slots), topk_ids.numel()
    data, scales = new_tiles(x, routing.slots, rows.terms.count)
    turns = turns_of_tile(rows.tile, tile_tokens, x.shape[1])
    route = CtaRoute(
        sort_tile(count, rows.tile.threads),
        sizes_of(expert_map, num_experts, tile_tokens),
        row_capacity(count, num_experts, tile_tokens),
    )
    arguments = RouteQuantizeArguments(
        batch=batch_of(topk_ids, expert_map, num_experts),
        routing=RoutingOut(*routing),
        tokens=Tokens(x, None, topk_weights),
        out=QuantizedRows(data, scales, scale, tile_tokens, x.shape[1], tiles),
        turns=turns,
        ctas=1 + ctas_of(tiles * turns, multiprocessors(x.device)),
    )
    launch(MoeRouteQuantizeSm100(route, rows), arguments)
    return data, scales
