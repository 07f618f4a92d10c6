"""The mbarriers with which the warps of a CTA pass tiles to each other."""

from dataclasses import dataclass

from cutlass import AddressSpace, Array, Int32, Int64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.sm100.tile import WARPS, AttentionTile
from nvfp4_kernels.device.mbarrier import wait

# Arrivals that complete a phase: one leader of a load or MMA warp, or of each softmax warp.
TMA_ARRIVALS = 1  # arrive.expect_tx; the phase also waits for the bytes
MMA_ARRIVALS = 1  # tcgen05.commit
COPY_ARRIVALS = 1  # of a query warp
SOFTMAX_ARRIVALS = WARPS


@dataclass(frozen=True)
class Barriers:
    """All mbarriers of a CTA; phases start at 0.

    With two stages of S, the softmax may run one key tile ahead of PV, and QK one key tile ahead of
    the softmax: a barrier per stage keeps every wait within one phase of the barrier.

    | barrier | arrive count | completed by | phase flips once per |
    |---|---|---|---|
    | ``kv_full[stage]`` | ``TMA_ARRIVALS`` | copies into the ring | trip around the ring |
    | ``kv_empty[stage]`` | ``MMA_ARRIVALS`` | commit of MMAs of K or V | trip around the ring |
    | ``tail_full`` | ``TMA_ARRIVALS`` | copies of the tile whose tail is zeroed | zeroed tail |
    | ``q_full[query tile]`` | ``q_arrivals`` | Q in shared memory | work tile |
    | ``q_empty`` | ``MMA_ARRIVALS`` | commit of the last QK of a work tile | work tile |
    | ``copied[query tile]`` | ``COPY_ARRIVALS`` | 16-bit queries in shared memory | work tile |
    | ``taken[query tile]`` | ``SOFTMAX_ARRIVALS`` | copied queries in registers | work tile |
    | ``s_full[query tile, stage, part]`` | ``MMA_ARRIVALS`` | commit of QK | S trip |
    | ``s_empty[query tile]`` | ``SOFTMAX_ARRIVALS`` | S in registers | key tile |
    | ``p_full[query tile, stage, part]`` | ``SOFTMAX_ARRIVALS`` | P stored, O rescaled | S trip |
    | ``o_full[query tile, stage, part]`` | ``MMA_ARRIVALS`` | commit of PV | S trip |
    | ``stored`` | ``SOFTMAX_ARRIVALS`` | epilogue of the first of two query tiles | work tile |

    An S trip is a trip around the stages of S. Work tiles without keys do not count; for
    ``stored``, neither do work tiles without keys for the first query tile.
    """

    kv_full: Array
    kv_empty: Array
    tail_full: Array
    q_full: Array
    q_empty: Array
    copied: Array
    taken: Array
    s_full: Array
    s_empty: Array
    p_full: Array
    o_full: Array
    stored: Array


def q_arrivals(tile: AttentionTile) -> int:
    """Number of arrivals that complete ``q_full``: 1 if a query warp copies the tile, else 4."""
    copies = tile.uses_clc and not tile.quantizes_copied
    return COPY_ARRIVALS if copies else SOFTMAX_ARRIVALS


def allocate_barriers(tile: AttentionTile) -> Barriers:
    """Allocate all barriers in shared memory."""
    groups = _groups(tile)
    counts = {name: count for count, arrivals in groups for name in arrivals}
    return Barriers(
        **{
            name: Array(Int64, counts[name], space=AddressSpace.smem, alignment=8)
            for name in Barriers.__dataclass_fields__
        }
    )


def init_barriers(tile: AttentionTile, barriers: Barriers) -> None:
    """Initialise all barriers; one thread calls this before the CTA's first barrier.cta.sync."""
    for count, arrivals in _groups(tile):
        for index in range(count):
            for name, arrive_count in arrivals.items():
                ptx.mbarrier_init(getattr(barriers, name).subview(index), arrive_count)
    ptx.fence_mbarrier_init()


def _groups(tile: AttentionTile) -> list[tuple[int, dict[str, int]]]:
    """Barrier arrays, grouped by length: the length, and the arrive count by array name."""
    return [
        (tile.stages, {"kv_full": TMA_ARRIVALS, "kv_empty": MMA_ARRIVALS}),
        (1, {"tail_full": TMA_ARRIVALS, "q_empty": MMA_ARRIVALS, "stored": SOFTMAX_ARRIVALS}),
        (tile.query_tiles, {"q_full": q_arrivals(tile), "s_empty": SOFTMAX_ARRIVALS}),
        (tile.query_tiles, {"copied": COPY_ARRIVALS, "taken": SOFTMAX_ARRIVALS}),
        (tile.query_tiles * tile.s_stages * len(tile.s_parts), {"s_full": MMA_ARRIVALS}),
        (
            tile.query_tiles * tile.s_stages * tile.parts,
            {"p_full": SOFTMAX_ARRIVALS, "o_full": MMA_ARRIVALS},
        ),
    ]


def part_barrier(
    tile: AttentionTile, barriers: Array, query_tile: Int32 | int, index: Int32, part: int
) -> Array:
    """Barrier of ``p_full`` or ``o_full`` for a part of key tile ``index``.

    ``index``: see ``WorkTile.kv_tile``.
    """
    stages = tile.s_stages
    return barriers.subview((query_tile * stages + index % stages) * tile.parts + part)


def s_full_barrier(
    tile: AttentionTile, barriers: Barriers, query_tile: Int32 | int, index: Int32, part: int
) -> Array:
    """Barrier of ``s_full`` for a part of S of key tile ``index``; see ``part_barrier``."""
    stage = query_tile * tile.s_stages + index % tile.s_stages
    return barriers.s_full.subview(stage * len(tile.s_parts) + part)


def wait_o_full(
    tile: AttentionTile, barriers: Barriers, query_tile: Int32, index: Int32, part: int = -1
) -> None:
    """Wait until PV of a part, by default the last, of key tile ``index`` is done.

    O may then be read, and P of that part overwritten. ``index``: see ``WorkTile.kv_tile``.
    """
    barrier = part_barrier(tile, barriers.o_full, query_tile, index, part % tile.parts)
    wait(barrier, index // tile.s_stages)
    ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)


def wait_p_full(
    tile: AttentionTile, barriers: Barriers, query_tile: int, index: Int32, part: int
) -> None:
    """Wait until P of a part of key tile ``index`` is stored and O rescaled for that part."""
    barrier = part_barrier(tile, barriers.p_full, query_tile, index, part)
    wait(barrier, index // tile.s_stages)
    ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
