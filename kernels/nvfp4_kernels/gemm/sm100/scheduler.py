"""Which tiles a cluster computes, one after the other."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_kernels.gemm.sm100.tile import TILE_K

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
class Order:
    """The order of all tiles; made on the host, since dividing takes a GPU a hundred cycles.

    Attributes:
        across_m, across_n: clusters of tiles along either side.
        each, extra: tiles of every cluster of the grid, and how many clusters have one more.
        matrix, group, last: divisors: tiles of a matrix, of a group, and the last group's height.
    """

    across_m: Int32
    across_n: Int32
    each: Int32
    extra: Int32
    matrix: cute.FastDivmodDivisorV2
    group: cute.FastDivmodDivisorV2
    last: cute.FastDivmodDivisorV2


@dataclass(frozen=True)
class Work:
    """What one CTA does.

    Attributes:
        first: number of its cluster's first tile; the others follow ``apart``.
        apart: clusters of the grid.
        mine: how many tiles there are.
        order: of all tiles.
        place_m, place_n: of this CTA's tile among those of its cluster.
        weight_stride: 1 if every matrix of the batch has weights of its own, else 0.
        first_step, steps: of K, the part that this CTA adds up.
        rank: of this CTA in its cluster.
    """

    first: Int32
    apart: Int32
    mine: Int32
    order: Order
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
def order_of(across_m: Int32, across_n: Int32, batch: Int32, clusters: Int32) -> Order:
    """For a grid of ``clusters``."""
    tiles = across_m * across_n * batch
    return Order(
        across_m=across_m,
        across_n=across_n,
        each=tiles // clusters,
        extra=tiles % clusters,
        matrix=cute.FastDivmodDivisorV2(across_m * across_n),
        group=cute.FastDivmodDivisorV2(GROUP * across_n),
        last=cute.FastDivmodDivisorV2((across_m - 1) % GROUP + 1),
    )


@cute.jit
def work_of(
    tile: cutlass.Constexpr, order: Order, k: Int32, weight_batch: Int32, rank: Int32
) -> Work:
    """This CTA's ``Work``."""
    steps = cute.ceil_div(k, TILE_K)
    part = rank if tile.split_k > 1 else Int32(0)
    first_step = part * steps // tile.split_k
    last_step = (part + 1) * steps // tile.split_k
    first = cute.arch.block_idx()[0] // tile.cluster
    apart = cute.arch.grid_dim()[0] // tile.cluster
    return Work(
        first=first,
        apart=apart,
        mine=order.each + Int32(first < order.extra),
        order=order,
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
    order = work.order
    batch, number = divmod(number, order.matrix)
    group, number = divmod(number, order.group)
    across, down = number // GROUP, number % GROUP
    if order.across_m < (group + 1) * GROUP:
        across, down = divmod(number, order.last)
    return Place(
        m=(group * GROUP + down) * (tile.cluster_m // tile.ctas) + work.place_m,
        n=across * tile.cluster_n + work.place_n,
        batch=batch,
    )
