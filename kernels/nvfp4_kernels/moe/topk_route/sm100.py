"""``moe_topk_route_quantize`` and its per-token form for sm_100."""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.device.rowwise.operands import ALIGNMENT
from nvfp4_kernels.device.rowwise.output import OUTPUT_ALIGNMENT, OUTPUT_TYPES, QuantizedRows
from nvfp4_kernels.device.rowwise.place import store_padding
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import multiprocessors
from nvfp4_kernels.moe.quantize.choose import turns_of_tile
from nvfp4_kernels.moe.quantize.op import new_tiles
from nvfp4_kernels.moe.quantize.sm100 import MoeRows, check_tokens, rows_of
from nvfp4_kernels.moe.quantize.tokens import TOKEN_ALIGNMENT, TOKEN_TYPES, Tokens
from nvfp4_kernels.moe.route.op import new_routing
from nvfp4_kernels.moe.route.sort import BATCH_TYPES, ROUTING_TYPES, Batch, RoutingOut
from nvfp4_kernels.moe.route_quantize import sm100 as routing_quantizing
from nvfp4_kernels.moe.router import Router
from nvfp4_kernels.moe.routing import Routing
from nvfp4_kernels.moe.topk.choice import LOGITS_ALIGNMENT, Logits
from nvfp4_kernels.moe.topk.kernel import moe_topk
from nvfp4_kernels.moe.topk_route.choose import TopkTile, choose_config, grid_of
from nvfp4_kernels.moe.topk_route.gather import batch_of, logits_of, new_weights, route_of
from nvfp4_kernels.moe.topk_route.route import Memory, TopkRoute
from nvfp4_kernels.runtime.compile import launch


class TopkRouteQuantizeArguments(NamedTuple):
    """Arguments of a launch.

    Attributes:
        given: router logits.
        batch: slots to sort; the ids come from the top-k.
        routing: result of the sort.
        topk_weights: float32 [tokens, top_k], result.
        tokens: rows to read.
        out: rows to write.
        turns: team turns per token tile.
        ctas: size of the grid; the last CTA writes the routing.
    """

    given: Logits
    batch: Batch
    routing: RoutingOut
    topk_weights: cute.Pointer
    tokens: Tokens
    out: QuantizedRows
    turns: Int32
    ctas: Int32


@dataclass(frozen=True)
class MoeTopkRouteQuantizeSm100:
    """Every CTA sorts the batch, then its teams of threads take turns at the tiles in use.

    Attributes:
        route: top-k and sort.
        rows: layout of the rows that a team quantises.
    """

    route: TopkRoute
    rows: MoeRows

    @property
    def teams(self) -> int:
        """Teams of threads of a CTA, which quantise different rows."""
        return self.route.tile.threads // self.rows.tile.threads

    def signature(self) -> tuple[TopkRouteQuantizeArguments]:
        """Example of ``__call__``'s arguments."""
        types = {"x": TYPES[self.rows.dtype], **TOKEN_TYPES, **OUTPUT_TYPES}
        types |= self.route.choice.types() | {"topk_weights": Float32}
        numbers = BATCH_TYPES | ROUTING_TYPES
        alignment = {"x": ALIGNMENT, **TOKEN_ALIGNMENT, **OUTPUT_ALIGNMENT, **LOGITS_ALIGNMENT}
        alignment |= dict.fromkeys(numbers, 4) | {"topk_weights": 4}
        return (example(TopkRouteQuantizeArguments, types | numbers, alignment),)

    @cute.jit
    def __call__(self, arguments: TopkRouteQuantizeArguments, stream: cuda_driver.CUstream) -> None:
        """Launch a persistent grid of clusters."""
        self.kernel(arguments).launch(
            grid=(arguments.ctas, 1, 1),
            block=(self.route.tile.threads, 1, 1),
            cluster=(self.route.tile.cluster, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: TopkRouteQuantizeArguments) -> None:
        """Select experts, sort, then quantise rows turn by turn."""
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        memory = self.route.allocate()
        used = self.route.run(
            arguments.batch, arguments.given, arguments.routing, arguments.topk_weights, memory
        )
        self._take_turns(arguments, memory, used * arguments.turns)
        self.route.finish()

    @cute.jit
    def _take_turns(
        self, arguments: TopkRouteQuantizeArguments, memory: Memory, turns: Int32
    ) -> None:
        columns, size = self.rows.columns, self.rows.tile.threads
        thread = cute.arch.thread_idx()[0]
        others = arguments.ctas - 1
        first = cute.arch.block_idx()[0] + thread // size * others
        for turn in range(first, turns, others * self.teams):
            place = self.rows.place(turn % columns, turn // columns, thread % size)
            slot = Int32(-1)
            if place.inside:
                slot = memory.slots[place.row]
            if place.live:
                self.rows.write(arguments.tokens, slot, arguments.out, place)
            else:
                store_padding(place, arguments.out.scales)
            if cutlass.const_expr(self.rows.per_token):
                ptx.barrier_cta_sync()  # shared memory is that of the next turn, too


def moe_topk_route_quantize(
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    padding: Tensor | None,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    global_scale: Tensor,
    terms: int,
    router: Router,
) -> tuple[Tensor, ...]:
    """See ``nvfp4_kernels.moe.topk_route.op.moe_topk_route_quantize``."""
    slots = len(x), router.top_k
    rows = rows_of(x, slots, tile_tokens, None, False, terms)
    tile = choose_config(*slots, num_experts, tile_tokens, rows.tile.threads, True)
    if tile is None:
        weights, ids = moe_topk(logits, bias, padding, router)
        parts = routing_quantizing.moe_route_quantize(
            x, ids, expert_map, num_experts, tile_tokens, global_scale, None, terms
        )
        return weights, *parts
    routing = Routing(*new_routing(x, slots, num_experts, tile_tokens))
    given = logits_of(logits, bias, padding)
    return _run(x, given, expert_map, num_experts, global_scale, router, routing, rows, tile)


def moe_topk_route_quantize_per_token(
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    padding: Tensor | None,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    terms: int,
    router: Router,
) -> tuple[Tensor, ...]:
    """See ``nvfp4_kernels.moe.topk_route.op.moe_topk_route_quantize_per_token``."""
    slots = len(x), router.top_k
    rows = rows_of(x, slots, tile_tokens, None, True, terms)
    tile = choose_config(*slots, num_experts, tile_tokens, rows.tile.threads, False)
    if tile is None:
        weights, ids = moe_topk(logits, bias, padding, router)
        parts = routing_quantizing.moe_route_quantize_per_token(
            x, ids, expert_map, num_experts, tile_tokens, None, terms
        )
        return weights, *parts
    routing = Routing(*new_routing(x, slots, num_experts, tile_tokens))
    row_scale = x.new_empty(routing.slots.shape, dtype=torch.float32)
    given = logits_of(logits, bias, padding)
    parts = _run(x, given, expert_map, num_experts, row_scale, router, routing, rows, tile)
    return *parts, row_scale


def _run(
    x: Tensor,
    given: Logits,
    expert_map: Tensor | None,
    num_experts: int,
    scale: Tensor,
    router: Router,
    routing: Routing,
    rows: MoeRows,
    tile: TopkTile,
) -> tuple[Tensor, ...]:
    """Launch, even without tokens: the number of tiles must be written."""
    check_tokens(x, None)
    tile_tokens, tiles = rows.tile_tokens, len(routing.slots)
    data, scales = new_tiles(x, routing.slots, rows.terms.count)
    turns = turns_of_tile(rows.tile, tile_tokens, x.shape[1])
    route = route_of(given, expert_map, num_experts, tile_tokens, router, tile)
    kernel = MoeTopkRouteQuantizeSm100(route, rows)
    weights = new_weights(given, router)
    arguments = TopkRouteQuantizeArguments(
        given=given,
        batch=batch_of(given, expert_map, num_experts, router),
        routing=RoutingOut(*routing),
        topk_weights=weights,
        tokens=Tokens(x, None, None),
        out=QuantizedRows(data, scales, scale, tile_tokens, x.shape[1], tiles),
        turns=turns,
        ctas=grid_of(tiles * turns, tile.cluster, multiprocessors(x.device)),
    )
    launch(kernel, arguments)
    return weights, *routing, data, scales
