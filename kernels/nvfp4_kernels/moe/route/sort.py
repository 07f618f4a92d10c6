"""Stable counting sort of a batch's slots by expert, by the threads of a CTA or a cluster.

Each warp takes neighbouring slots and counts them per expert in shared memory, in slot order; lanes
with the same expert find each other with ``match``. Scans over warps, CTAs and experts then give
each warp's first row of each expert. The result does not depend on the order in which warps run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Int32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.scan import count_lanes_before, cta_exclusive_sum
from nvfp4_kernels.moe.route.tile import WARP, RouteTile, Sizes

NO_EXPERT = -1
PADDING_OF_LANE = 4  # rows of a tile for each lane that looks for padding


class Batch(NamedTuple):
    """Slots to sort, in global memory; part of kernels' arguments.

    Attributes:
        ids: int32 [count], expert of each slot; null if the same launch selects experts.
        expert_map: int32 [total], or null.
        count: number of slots.
        total: number of experts of all ranks if there is a map, else of this rank.
    """

    ids: cute.Pointer
    expert_map: cute.Pointer
    count: Int32
    total: Int32


BATCH_TYPES = {"ids": Int32, "expert_map": Int32}


class RoutingOut(NamedTuple):
    """Tensors of a ``Routing`` to write; part of kernels' arguments."""

    groups: cute.Pointer
    slots: cute.Pointer
    rows: cute.Pointer


ROUTING_TYPES = {"groups": Int32, "slots": Int32, "rows": Int32}


@dataclass(frozen=True)
class Sorter:
    """State of a sort in one thread; the functions below are called in order.

    Attributes:
        tile: threads and CTAs that sort.
        sizes: number of experts, and rows per tile.
        expert_map: copy of the expert map.
        counts: [warp, expert], numbers of slots; later an exclusive scan over the CTA's warps.
        firsts: [expert], row of the expert's first slot in this CTA.
        ends: [expert], row after the expert's last slot in all CTAs.
        own: [expert], number of the expert's slots in this CTA, read by peers.
        totals: [warp], partial sums of a scan over threads.
        thread, rank: index of the thread in the CTA, and of the CTA in the cluster.
    """

    tile: RouteTile
    sizes: Sizes
    expert_map: Array
    counts: Array
    firsts: Array
    ends: Array
    own: Array
    totals: Array
    thread: Int32
    rank: Int32

    @property
    def lane(self) -> Int32:
        """Index of the thread in its warp."""
        return self.thread % WARP

    @property
    def warp(self) -> Int32:
        """Index of the warp in the CTA."""
        return self.thread // WARP

    def slot(self, batch: Batch, iteration: Int32 | int, step: int) -> Int32:
        """Index of this lane's slot in step ``step`` of ``iteration``."""
        warp = self.rank * self.tile.warps + self.warp
        iterations = Int32(1) if self.tile.single else cute.ceil_div(batch.count, self.tile.slots)
        return ((warp * iterations + iteration) * self.tile.steps + step) * WARP + self.lane


def sorter(tile: RouteTile, sizes: Sizes) -> Sorter:
    """Allocate a CTA's shared memory for a sort."""

    def words(count: int) -> Array:
        return Array(Int32, count, space=AddressSpace.smem, alignment=4)

    return Sorter(
        tile=tile,
        sizes=sizes,
        expert_map=words(max(1, sizes.mapped)),
        counts=words(tile.warps * sizes.experts),
        firsts=words(sizes.experts),
        ends=words(sizes.experts),
        own=words(sizes.experts),
        totals=words(WARP),
        thread=cute.arch.thread_idx()[0],
        rank=cute.arch.block_idx()[0] % tile.cluster,
    )


@cute.jit
def prepare(sort: Sorter, batch: Batch) -> None:
    """Clear counts and copy the expert map, which preceding kernels must not write."""
    for at in range(sort.thread, sort.tile.warps * sort.sizes.experts, sort.tile.threads):
        sort.counts.store(Int32(0), at)
    if cutlass.const_expr(sort.sizes.mapped > 0):
        for at in range(sort.thread, batch.total, sort.tile.threads):
            sort.expert_map.store(Array(batch.expert_map, shape=(1,))[at], at)
    ptx.barrier_cta_sync()


LoadId = Callable[[Batch, Int32], Int32]  # id of a slot, -1 past the last


def load_experts(
    sort: Sorter, batch: Batch, iteration: Int32 | int = 0, load: LoadId | None = None
) -> list[Int32]:
    """Load the local experts of this lane's slots; ``NO_EXPERT`` for no expert of this rank.

    ``load``: function that loads an id; None: load ids from ``batch``.
    """
    slots = [sort.slot(batch, iteration, step) for step in range(sort.tile.steps)]
    ids = [(load or _load_id)(batch, slot) for slot in slots]
    return [_expert(sort, batch, number) for number in ids]


def _load_id(batch: Batch, slot: Int32) -> Int32:
    """Load the id of a slot; -1 past the last slot."""
    # Predicated rather than branched around, so that a thread's loads all start before it waits.
    return ptx.inline_ptx(
        "mov.b32 {$w0}, -1; @{$r1} ld.global.b32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[Array(batch.ids, shape=(1,)).data_ptr(slot), slot < batch.count],
    )


@cute.jit
def _expert(sort: Sorter, batch: Batch, number: Int32) -> Int32:
    expert = number
    if cutlass.const_expr(sort.sizes.mapped > 0):
        expert = Int32(NO_EXPERT)
        if (number >= 0) & (number < batch.total):
            expert = sort.expert_map[number]
    if (expert < 0) | (expert >= sort.sizes.experts):
        expert = Int32(NO_EXPERT)
    return expert


@cute.jit
def take(sort: Sorter, expert: Int32) -> Int32:
    """Add a slot of each lane to the warp's counts; return the rank of this lane's slot.

    ``expert``: expert of this lane's slot. The rank is the expert's count before the slot.
    """
    same = ptx.match_sync(cute.arch.FULL_MASK, expert, "any")
    before = count_lanes_before(sort.lane, same)
    at = sort.warp * sort.sizes.experts + expert
    counted = Int32(0)
    if expert >= 0:
        counted = sort.counts[at]
    ptx.bar_warp_sync(cute.arch.FULL_MASK)  # all lanes read before any lane writes
    if (expert >= 0) & (before == 0):
        sort.counts.store(counted + cute.arch.popc(same).to(Int32), at)
    ptx.bar_warp_sync(cute.arch.FULL_MASK)
    return counted + before.to(Int32)


def count(
    sort: Sorter, batch: Batch, load: LoadId | None = None
) -> tuple[list[Int32], list[Int32]]:
    """Count each warp's slots per expert.

    Returns experts of this lane's slots, and ranks of the slots among the warp's slots of the same
    expert; empty lists unless one iteration covers all slots. ``load``: see ``load_experts``;
    requires a single iteration.
    """
    if not sort.tile.single:
        _count_turns(sort, batch)
        return [], []
    experts = load_experts(sort, batch, load=load)
    return experts, [take(sort, expert) for expert in experts]


@cute.jit
def _count_turns(sort: Sorter, batch: Batch) -> None:
    for iteration in range(cute.ceil_div(batch.count, sort.tile.slots)):
        experts = load_experts(sort, batch, iteration)
        for step in cutlass.range_constexpr(sort.tile.steps):
            take(sort, experts[step])


@cute.jit
def place_experts(sort: Sorter) -> Int32:
    """Scan counts into first rows of experts and warps; return the number of tiles in use.

    Each thread handles a few neighbouring experts.
    """
    experts, warps, cluster = sort.sizes.experts, sort.tile.warps, sort.tile.cluster
    each = -(-experts // sort.tile.threads)
    ptx.barrier_cta_sync()
    numbers: list[Int32] = []
    for n in cutlass.range_constexpr(each):
        expert, total = sort.thread * each + n, Int32(0)
        if expert < experts:
            total = _sum_warps(sort, expert)
            sort.own.store(total, expert)
        numbers.append(total)
    befores = [Int32(0) for _ in range(each)]
    if cutlass.const_expr(cluster > 1):
        ptx.barrier_cluster_arrive()
        ptx.barrier_cluster_wait()
        for n in cutlass.range_constexpr(each):
            befores[n], numbers[n] = _sum_cluster(sort, sort.thread * each + n)
        ptx.barrier_cluster_arrive()  # peers may exit once all have read; see ``finish``
    rows = sort.sizes.tile_tokens
    tiles = [(number + (rows - 1)) // rows for number in numbers]
    first, used = cta_exclusive_sum(warps, sort.thread, sum(tiles, Int32(0)), sort.totals)
    for n in cutlass.range_constexpr(each):
        expert = sort.thread * each + n
        if expert < experts:
            sort.firsts.store(first * rows + befores[n], expert)
            sort.ends.store(first * rows + numbers[n], expert)
        first += tiles[n]
    ptx.barrier_cta_sync()
    return used


@cute.jit
def _sum_warps(sort: Sorter, expert: Int32) -> Int32:
    """Replace an expert's counts by an exclusive scan over warps; return the total."""
    experts, total = sort.sizes.experts, Int32(0)
    counted = [sort.counts[warp * experts + expert] for warp in range(sort.tile.warps)]
    for warp in cutlass.range_constexpr(sort.tile.warps):
        sort.counts.store(total, warp * experts + expert)
        total += counted[warp]
    return total


@cute.jit
def _sum_cluster(sort: Sorter, expert: Int32) -> tuple[Int32, Int32]:
    """Numbers of an expert's slots: in CTAs of lower rank, and in all CTAs."""
    before, total = Int32(0), Int32(0)
    if expert < sort.sizes.experts:
        for rank in cutlass.range_constexpr(sort.tile.cluster):
            own = ptx.mapa(sort.own, rank)[expert]
            if rank < sort.rank:
                before += own
            total += own
    return before, total


@cute.jit
def row_of(sort: Sorter, expert: Int32, rank: Int32) -> Int32:
    """Row of a slot from its expert and rank in the warp; -1 without an expert."""
    row = Int32(-1)
    if expert >= 0:
        at = sort.warp * sort.sizes.experts + expert
        row = sort.firsts[expert] + sort.counts[at] + rank
    return row


@cute.jit
def write_slots(
    sort: Sorter, batch: Batch, out: RoutingOut, experts: list[Int32], ranks: list[Int32]
) -> None:
    """Write rows of slots, and slots of rows; ``experts`` and ``ranks`` come from ``count``."""
    if cutlass.const_expr(sort.tile.single):
        for step in cutlass.range_constexpr(sort.tile.steps):
            row = row_of(sort, experts[step], ranks[step])
            write_slot(batch, out, sort.slot(batch, 0, step), row)
    else:
        for iteration in range(cute.ceil_div(batch.count, sort.tile.slots)):
            again = load_experts(sort, batch, iteration)
            for step in cutlass.range_constexpr(sort.tile.steps):
                # The count of the warps before grows to the rank in the CTA.
                rank, row = take(sort, again[step]), Int32(-1)
                if again[step] >= 0:
                    row = sort.firsts[again[step]] + rank
                write_slot(batch, out, sort.slot(batch, iteration, step), row)


@cute.jit
def write_slot(batch: Batch, out: RoutingOut, slot: Int32, row: Int32) -> None:
    """Write the row of a slot if the slot exists, and the slot of a row if ``row`` is not -1."""
    if slot < batch.count:
        Array(out.rows, shape=(1,)).store(row, slot)
    if row >= 0:
        Array(out.slots, shape=(1,)).store(slot, row)


@cute.jit
def write_tiles(sort: Sorter, out: RoutingOut, used: Int32) -> None:
    """Write the number of tiles, experts of tiles, and -1 for padding; several lanes per expert."""
    rows, lanes = sort.sizes.tile_tokens, min(WARP, sort.sizes.tile_tokens // PADDING_OF_LANE)
    groups, slots = Array(out.groups, shape=(1,)), Array(out.slots, shape=(1,))
    teams, lane = sort.tile.threads // lanes, sort.thread % lanes
    for expert in range(
        sort.rank * teams + sort.thread // lanes, sort.sizes.experts, sort.tile.cluster * teams
    ):
        end, first = sort.ends[expert], Int32(0)
        if expert > 0:
            first = (sort.ends[expert - 1] + (rows - 1)) // rows
        behind = (end + (rows - 1)) // rows
        for tile in range(first + lane, behind, lanes):
            groups.store(expert, 1 + tile)
        for row in range(end + lane, behind * rows, lanes):
            slots.store(Int32(-1), row)
    if (sort.thread == 0) & (sort.rank == 0):
        groups.store(used, 0)


def finish(sort: Sorter) -> None:
    """Wait until no peer reads this CTA's shared memory."""
    if sort.tile.cluster > 1:
        ptx.barrier_cluster_wait()
