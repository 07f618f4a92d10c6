"""Source of a dispatch from logits: top-k by a cluster, and the sort in each of its CTAs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Float32, Int32, Int64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.moe.dispatch.choose import TopkTile
from nvfp4_kernels.moe.dispatch.tokens import Tokens
from nvfp4_kernels.moe.route.sort import (
    BATCH_TYPES,
    ROUTING_TYPES,
    Batch,
    RoutingOut,
    count,
    place_experts,
    prepare,
    row_of,
    sorter,
    write_slots,
    write_tiles,
)
from nvfp4_kernels.moe.route.tile import WARP, Sizes
from nvfp4_kernels.moe.topk.choice import LOGITS_ALIGNMENT, RouterLogits, TokenChoice


class LogitsArguments(NamedTuple):
    """Router logits, and the routing to write; part of a launch's arguments.

    Attributes:
        given: logits, bias and padding.
        batch: slots to sort; ids are null, as the top-k finds them.
        routing: result of the sort, written by the last CTA of the grid.
        topk_weights: float32 [tokens, top_k], result, written by the last cluster of the grid.
    """

    given: RouterLogits
    batch: Batch
    routing: RoutingOut
    topk_weights: cute.Pointer


class Memory(NamedTuple):
    """Shared memory of a CTA.

    Attributes:
        slots: [capacity], slot of each row.
        ids: [share, top_k], experts of this CTA's share of the tokens.
    """

    slots: Array
    ids: Array


@dataclass(frozen=True)
class TopkRoute:
    """Top-k and sort: each CTA of a cluster selects experts of some tokens, then sorts all slots.

    All clusters do the same work, so that no cluster waits for another. The last CTA of the grid
    writes the routing, the last cluster the routing weights.

    Attributes:
        choice: top-k of a token's experts.
        tile: threads, cluster and shared tables.
        sizes: number of experts, and rows per tile.
    """

    choice: TokenChoice
    tile: TopkTile
    sizes: Sizes

    @property
    def cluster(self) -> int:
        """Number of CTAs per cluster."""
        return self.tile.cluster

    @property
    def threads(self) -> int:
        """Number of threads per CTA."""
        return self.tile.threads

    @property
    def tile_tokens(self) -> int:
        """Number of rows per token tile."""
        return self.sizes.tile_tokens

    def arguments(self) -> LogitsArguments:
        """Example arguments of the source, for ``cute.compile``."""
        numbers = BATCH_TYPES | ROUTING_TYPES
        types = numbers | self.choice.types() | {"topk_weights": Float32}
        alignment = dict.fromkeys((*numbers, "topk_weights"), 4) | LOGITS_ALIGNMENT
        return example(LogitsArguments, types, alignment)

    def place(self, source: LogitsArguments, tokens: Tokens) -> tuple[Array, Callable[[], Int32]]:
        """Route; return the slots of all rows, and a function for the number of tiles in use.

        The slots are in shared memory.
        """

        def words(number: int) -> Array:
            return Array(Int32, number, space=AddressSpace.smem, alignment=4)

        top_k = self.choice.router.top_k
        memory = Memory(words(self.tile.capacity), words(self.tile.share * top_k))
        used = self.run(source, memory)
        return memory.slots, lambda: used

    def workers(self, ctas: Int32) -> Int32:
        """Number of CTAs that process rows: all but the last, which writes the routing."""
        return ctas - 1

    @cute.jit
    def run(self, source: LogitsArguments, memory: Memory) -> Int32:
        """Wait for preceding kernels and fill ``memory``; return the number of tiles in use.

        The last CTA, which processes no rows, gets 0.
        """
        given, batch, out, weights = source
        sort = sorter(self.tile.route, self.sizes)
        for at in range(sort.thread, self.tile.capacity, self.tile.threads):
            memory.slots.store(Int32(-1), at)
        prepare(sort, batch)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        self._choose(given, weights, memory)
        self._sync()
        experts, ranks = count(sort, batch, lambda _, slot: self._id(batch, memory, slot))
        if cutlass.const_expr(self.tile.cluster > 1):
            ptx.barrier_cluster_arrive()  # peers may exit once all have read; see ``finish``
        used = place_experts(sort)
        if cute.arch.block_idx()[0] == cute.arch.grid_dim()[0] - 1:
            write_slots(sort, batch, out, experts, ranks)
            write_tiles(sort, out, used)
            used = Int32(0)
        else:
            for step in cutlass.range_constexpr(self.tile.route.steps):
                row = row_of(sort, experts[step], ranks[step])
                if row >= 0:
                    memory.slots.store(sort.slot(batch, 0, step), row)
        ptx.barrier_cta_sync()
        return used

    def finish(self) -> None:
        """Wait until no peer reads this CTA's shared memory."""
        if self.tile.cluster > 1:
            ptx.barrier_cluster_wait()

    def _sync(self) -> None:
        """Wait until all CTAs of the cluster have stored their top-k."""
        if self.tile.cluster > 1:
            ptx.barrier_cluster_arrive()
            ptx.barrier_cluster_wait()
        else:
            ptx.barrier_cta_sync()

    @cute.jit
    def _choose(self, given: RouterLogits, weights: cute.Pointer, memory: Memory) -> None:
        """Select the experts of this CTA's tokens, a warp per token.

        CTAs of the last cluster also store the routing weights.
        """
        cta, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        lane, top_k = thread % WARP, self.choice.router.top_k
        if (thread == 0) & (given.tokens == 0):
            memory.ids.store(Int32(-1), 0)  # lanes without a slot read the first one's
        ctas, warps = self.tile.cluster, self.tile.threads // WARP
        writes = cta >= cute.arch.grid_dim()[0] - ctas
        for token in range(cta % ctas + ctas * (thread // WARP), given.tokens, ctas * warps):
            chosen = self.choice.choose(given, token, lane)
            if lane < top_k:
                memory.ids.store(chosen.id, token // ctas * top_k + lane)
            if writes:
                weight = self.choice.weigh(given, token, lane, chosen)
                if lane < top_k:
                    Array(weights, shape=(1,)).store(weight, Int64(token) * top_k + lane)

    def _id(self, batch: Batch, memory: Memory, slot: Int32) -> Int32:
        """Expert id of a slot, read from the CTA that selected it; -1 past the last slot."""
        # Selected rather than branched around, so that a thread's loads all start before it waits.
        inside = slot < batch.count
        slot = Int32(cutlass.select_(inside, slot, Int32(0)))
        ctas, top_k = self.tile.cluster, self.choice.router.top_k
        token = slot // top_k
        ids = memory.ids if ctas == 1 else ptx.mapa(memory.ids, token % ctas)
        number = ids[token // ctas * top_k + slot % top_k]
        return Int32(cutlass.select_(inside, number, Int32(-1)))
