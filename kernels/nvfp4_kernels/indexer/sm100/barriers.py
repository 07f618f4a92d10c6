"""Mbarriers by which the warps of a CTA hand over queries, key tiles and accumulators."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Int64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.indexer.sm100.tile import GROUP_WARPS, ScoreTile


@dataclass(frozen=True)
class Barriers:
    """mbarriers of a CTA. Phases are counted from 0.

    | barrier | arrivals | by | phase flips once per |
    |---|---|---|---|
    | ``q_full`` | 1 and its bytes | TMA: the queries are in shared memory | never: used once |
    | ``sfq_full`` | 1 | scale warp: the queries' scales are in shared memory | never: used once |
    | ``k_full[stage]`` | 1 and its bytes | TMA: a key tile is in the ring | ring trip |
    | ``sfk_full[stage]`` | 1 | scale warp: the tile's scales are in the ring | ring trip |
    | ``k_empty[stage]`` | 1 | commit of the MMAs that read the stage | ring trip |
    |  | and 4 per group | epilogue warps, if they read FP8 keys' scales | ring trip |
    | ``acc_full[accumulator]`` | 1 | commit of the MMAs | trip around accumulators |
    | ``acc_empty[accumulator]`` | 4 per group | epilogue: loads done | trip around accumulators |
    """

    q_full: Array
    sfq_full: Array
    k_full: Array
    sfk_full: Array
    k_empty: Array
    acc_full: Array
    acc_empty: Array


def arrive_counts(tile: ScoreTile) -> dict[str, int]:
    """Number of arrivals that complete a phase, for each field of ``Barriers``."""
    group_warps = GROUP_WARPS * tile.groups
    return {
        "q_full": 1,
        "sfq_full": 1,
        "k_full": 1,
        "sfk_full": 1,
        "k_empty": 1 + (group_warps if tile.factored else 0),
        "acc_full": 1,
        "acc_empty": group_warps,
    }


def allocate_barriers(tile: ScoreTile) -> Barriers:
    """Allocate shared memory for the mbarriers."""

    def barriers(count: int) -> Array:
        return Array(Int64, count, space=AddressSpace.smem, alignment=8)

    return Barriers(
        q_full=barriers(1),
        sfq_full=barriers(1),
        k_full=barriers(tile.stages),
        sfk_full=barriers(tile.stages),
        k_empty=barriers(tile.stages),
        acc_full=barriers(tile.accumulators),
        acc_empty=barriers(tile.accumulators),
    )


@cute.jit
def initialise(tile: cutlass.Constexpr, barriers: Barriers) -> None:
    """Initialise the mbarriers; called by one thread."""
    counts = arrive_counts(tile)
    ptx.mbarrier_init(barriers.q_full, counts["q_full"])
    ptx.mbarrier_init(barriers.sfq_full, counts["sfq_full"])
    for stage in cutlass.range_constexpr(tile.stages):
        ptx.mbarrier_init(barriers.k_full.subview(stage), counts["k_full"])
        ptx.mbarrier_init(barriers.sfk_full.subview(stage), counts["sfk_full"])
        ptx.mbarrier_init(barriers.k_empty.subview(stage), counts["k_empty"])
    for accumulator in cutlass.range_constexpr(tile.accumulators):
        ptx.mbarrier_init(barriers.acc_full.subview(accumulator), counts["acc_full"])
        ptx.mbarrier_init(barriers.acc_empty.subview(accumulator), counts["acc_empty"])
    ptx.fence_mbarrier_init()
