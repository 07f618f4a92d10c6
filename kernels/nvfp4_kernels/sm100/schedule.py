"""Which tiles a cluster computes, one after the other."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_kernels.sm100.tile import TILE_K

# Tiles along the M side that are taken together: their M operands stay in L2 while the N side
# passes by.
GROUP = 8


@dataclass(frozen=True)
class Place:
    """A tile: its index along either side, and in the batch."""

    m: Int32
    n: Int32
    batch: Int32


@dataclass(frozen=True)
class Work:
    """What one CTA does.

    Attributes:
        first: number of its cluster's first tile; the others follow ``apart``.
        apart: clusters of the grid.
        mine: how many tiles there are.
        across_m, across_n: clusters of tiles along either side.
        place_m, place_n: of this CTA's tile among those of its cluster.
        weight_stride: 1 if every matrix of the batch has weights of its own, else 0.
        first_step, steps: of K, the part that this CTA adds up.
        rank: of this CTA in its cluster.
    """

    first: Int32
    apart: Int32
    mine: Int32
    across_m: Int32
    across_n: Int32
    place_m: Int32
    place_n: Int32
    weight_stride: Int32
    first_step: Int32
    steps: Int32
    rank: Int32


def clusters_across(rows: Int32, tile_rows: int, in_cluster: int) -> Int32:
    """Clusters of tiles that cover ``rows``."""
    return cute.ceil_div(rows, tile_rows * in_cluster)


@cute.jit
def work_of(
    tile: cutlass.Constexpr,
    m: Int32,
    n: Int32,
    k: Int32,
    batch: Int32,
    weight_batch: Int32,
    rank: Int32,
) -> Work:
    """This CTA's ``Work``: ``m`` and ``n`` are the rows of either side."""
    steps = cute.ceil_div(k, TILE_K)
    part = rank if tile.split_k > 1 else Int32(0)
    first_step = part * steps // tile.split_k
    last_step = (part + 1) * steps // tile.split_k
    across_m = clusters_across(m, tile.rows, tile.cluster_m // tile.ctas)
    across_n = clusters_across(n, tile.columns, tile.cluster_n)
    first = cute.arch.block_idx()[0] // tile.cluster
    apart = cute.arch.grid_dim()[0] // tile.cluster
    return Work(
        first=first,
        apart=apart,
        mine=cute.ceil_div(across_m * across_n * batch - first, apart),
        across_m=across_m,
        across_n=across_n,
        place_m=Int32(0) if tile.split_k > 1 else rank % tile.cluster_m // tile.ctas,
        place_n=Int32(0) if tile.split_k > 1 else rank // tile.cluster_m,
        weight_stride=Int32(weight_batch > 1),
        first_step=first_step,
        steps=last_step - first_step,
        rank=rank,
    )


@cute.jit
def place_of(tile: cutlass.Constexpr, work: Work, index: Int32) -> Place:
    """Where one of this CTA's tiles lies: down groups of ``GROUP`` of the M side."""
    number = work.first + index * work.apart
    in_batch = work.across_m * work.across_n
    batch, number = number // in_batch, number % in_batch
    in_group = GROUP * work.across_n
    top = number // in_group * GROUP
    height = cutlass.min(work.across_m - top, GROUP)
    number = number % in_group
    return Place(
        m=(top + number % height) * (tile.cluster_m // tile.ctas) + work.place_m,
        n=number // height * tile.cluster_n + work.place_n,
        batch=batch,
    )
