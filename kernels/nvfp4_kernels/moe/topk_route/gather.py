"""The kernel of ``moe_topk_route_gather`` on sm_90 and sm_100, and its launch."""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.checks import check_layout
from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import multiprocessors
from nvfp4_kernels.moe.quantize.gather import GatheredRows, gathered_rows
from nvfp4_kernels.moe.quantize.tokens import TOKEN_ALIGNMENT, TOKEN_TYPES, Tokens
from nvfp4_kernels.moe.route.kernel import check_map, sizes_of
from nvfp4_kernels.moe.route.op import new_routing
from nvfp4_kernels.moe.route.sort import BATCH_TYPES, ROUTING_TYPES, Batch, RoutingOut
from nvfp4_kernels.moe.route_quantize.gather import moe_route_gather
from nvfp4_kernels.moe.router import Router
from nvfp4_kernels.moe.routing import Routing
from nvfp4_kernels.moe.topk.choice import LOGITS_ALIGNMENT, Logits
from nvfp4_kernels.moe.topk.kernel import check_logits, choice_of, moe_topk
from nvfp4_kernels.moe.topk_route.choose import TopkTile, choose_config, grid_of
from nvfp4_kernels.moe.topk_route.route import Memory, TopkRoute
from nvfp4_kernels.runtime.compile import launch


class TopkRouteGatherArguments(NamedTuple):
    """Arguments of a launch; the last of the grid's ``ctas`` CTAs writes the routing.

    Attributes:
        given: router logits.
        batch: slots to sort; the ids come from the top-k.
        routing: result of the sort.
        topk_weights: float32 [tokens, top_k], result.
        tokens: rows to read.
        out: result [tiles, T, k].
        k: elements of a row.
    """

    given: Logits
    batch: Batch
    routing: RoutingOut
    topk_weights: cute.Pointer
    tokens: Tokens
    out: cute.Pointer
    k: Int32
    ctas: Int32


@dataclass(frozen=True)
class MoeTopkRouteGather:
    """Every CTA sorts the batch, then copies rows of the tiles in use.

    Attributes:
        route: top-k and sort.
        rows: layout of the copied rows.
    """

    route: TopkRoute
    rows: GatheredRows

    def signature(self) -> tuple[TopkRouteGatherArguments]:
        """Example of ``__call__``'s arguments."""
        dtype = TYPES[self.rows.dtype]
        types = {"x": dtype, "out": dtype, "topk_weights": Float32, **TOKEN_TYPES}
        types |= self.route.choice.types()
        numbers = BATCH_TYPES | ROUTING_TYPES
        alignment = TOKEN_ALIGNMENT | LOGITS_ALIGNMENT | dict.fromkeys(numbers, 4)
        alignment |= {"topk_weights": 4}
        return (example(TopkRouteGatherArguments, types | numbers, alignment),)

    @cute.jit
    def __call__(self, arguments: TopkRouteGatherArguments, stream: cuda_driver.CUstream) -> None:
        """Launch a persistent grid of clusters."""
        self.kernel(arguments).launch(
            grid=(arguments.ctas, 1, 1),
            block=(self.route.tile.threads, 1, 1),
            cluster=(self.route.tile.cluster, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: TopkRouteGatherArguments) -> None:
        """Select experts, sort, then copy rows turn by turn."""
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        memory = self.route.allocate()
        used = self.route.run(
            arguments.batch, arguments.given, arguments.routing, arguments.topk_weights, memory
        )
        rows = used * self.route.sizes.tile_tokens
        self._take_turns(arguments, memory, self.rows.turns(rows, arguments.k))
        self.route.finish()

    @cute.jit
    def _take_turns(
        self, arguments: TopkRouteGatherArguments, memory: Memory, turns: Int32
    ) -> None:
        for turn in range(cute.arch.block_idx()[0], turns, arguments.ctas - 1):
            self.rows.copy(arguments.tokens, memory.slots, arguments.k, arguments.out, turn)


def moe_topk_route_gather(
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    padding: Tensor | None,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    router: Router,
) -> tuple[Tensor, ...]:
    """See ``nvfp4_kernels.moe.topk_route.op.moe_topk_route_gather``."""
    rows, slots = gathered_rows(x, router.top_k, None), (len(x), router.top_k)
    tile = choose_config(*slots, num_experts, tile_tokens, rows.tile.threads, False)
    if tile is None:
        weights, ids = moe_topk(logits, bias, padding, router)
        return weights, *moe_route_gather(x, ids, expert_map, num_experts, tile_tokens, None)
    check_layout("x", x)
    given = logits_of(logits, bias, padding)
    routing = Routing(*new_routing(x, slots, num_experts, tile_tokens))
    k, weights = x.shape[1], new_weights(given, router)
    out = x.new_empty((*routing.slots.shape, k))
    turns = routing.slots.numel() * -(-k // rows.part)
    arguments = TopkRouteGatherArguments(
        given=given,
        batch=batch_of(given, expert_map, num_experts, router),
        routing=RoutingOut(*routing),
        topk_weights=weights,
        tokens=Tokens(x, None, None),
        out=out,
        k=k,
        ctas=grid_of(turns, tile.cluster, multiprocessors(x.device)),
    )
    route = route_of(given, expert_map, num_experts, tile_tokens, router, tile)
    launch(MoeTopkRouteGather(route, rows), arguments)
    return weights, *routing, out


def logits_of(logits: Tensor, bias: Tensor | None, padding: Tensor | None) -> Logits:
    """Logits as kernel arguments."""
    check_logits(logits, bias, padding)
    return Logits(logits, bias, padding, len(logits))


def batch_of(given: Logits, expert_map: Tensor | None, num_experts: int, router: Router) -> Batch:
    """Slots and expert map as kernel arguments."""
    check_map(expert_map)
    total = num_experts if expert_map is None else len(expert_map)
    return Batch(None, expert_map, given.tokens * router.top_k, total)


def new_weights(given: Logits, router: Router) -> Tensor:
    """Memory for routing weights."""
    return given.logits.new_empty((given.tokens, router.top_k), dtype=torch.float32)


def route_of(
    given: Logits,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    router: Router,
    tile: TopkTile,
) -> TopkRoute:
    """Compile-time configuration of top-k and sort."""
    choice = choice_of(given.logits, given.bias, router)
    return TopkRoute(choice, tile, sizes_of(expert_map, num_experts, tile_tokens))
