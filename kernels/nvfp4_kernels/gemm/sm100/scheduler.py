"""Tile scheduler: the tiles of a cluster, in raster order."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Array, Int32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.gemm.sm100.tile import TILE_K, Tile

# Tiles along the M side that are taken together: their M operands stay in L2 while the N side
# passes by.
GROUP = 8


@dataclass(frozen=True)
class TileCoord:
    """Coordinates of a tile: indices along M, along N and in the batch.

    ``weight`` is the index in the batch of weights; if grouped, the expert.
    """

    m: Int32
    n: Int32
    batch: Int32
    weight: Int32


@dataclass(frozen=True)
class RasterOrder:
    """Raster order of all tiles; the host prepares divisors, as a division takes a hundred cycles.

    Attributes:
        across_m, across_n: number of cluster tiles (tiles that a cluster computes together) along
            either side.
        each, extra: number of cluster tiles per cluster, and number of clusters with one more.
        matrix, group, last: fast divisors: tiles per matrix, tiles per group, height of the last
            group.
        clusters: fast divisor: number of clusters of the grid; None unless grouped.
    """

    across_m: Int32
    across_n: Int32
    each: Int32
    extra: Int32
    matrix: cute.FastDivmodDivisorV2
    group: cute.FastDivmodDivisorV2
    last: cute.FastDivmodDivisorV2
    clusters: Any = None


@dataclass(frozen=True)
class SchedulerState:
    """Scheduler state of one CTA: its tiles and its range of K.

    Attributes:
        first: index of the cluster's first tile in raster order; the following tiles are
            ``tile_stride`` apart.
        tile_stride: number of clusters of the grid.
        num_tiles: number of the cluster's tiles; if grouped, until ``resolve_tile_count``, the
            number of all token tiles in use, as loaded by ``prefetch_tile_count``.
        raster: raster order of all tiles.
        cta_m, cta_n: coordinates of this CTA's tile in the cluster.
        weight_batch_stride: 1 if every matrix of the batch has its own weight, else 0.
        first_k_step, k_steps: first K step and number of K steps of this CTA.
        rank: rank of this CTA in its cluster.
        groups: int32 [1 + batch] if grouped, else None: number of token tiles in use, then the
            expert of each tile.
    """

    first: Int32
    tile_stride: Int32
    num_tiles: Int32
    raster: RasterOrder
    cta_m: Int32
    cta_n: Int32
    weight_batch_stride: Int32
    first_k_step: Int32
    k_steps: Int32
    rank: Int32
    groups: Any = None


def clusters_across(rows: Int32, tile_rows: int, in_cluster: int) -> Int32:
    """Number of cluster tiles, of ``in_cluster`` · ``tile_rows`` rows each, that cover ``rows``."""
    return cute.ceil_div(rows, tile_rows * in_cluster)


@cute.jit
def raster_order(
    across_m: Int32,
    across_n: Int32,
    batch: Int32,
    clusters: Int32,
    grouped: cutlass.Constexpr = False,
) -> RasterOrder:
    """Raster order for a grid of ``clusters`` clusters."""
    tiles = across_m * across_n * batch
    return RasterOrder(
        across_m=across_m,
        across_n=across_n,
        each=tiles // clusters,
        extra=tiles % clusters,
        matrix=cute.FastDivmodDivisorV2(across_m * across_n),
        group=cute.FastDivmodDivisorV2(GROUP * across_n),
        last=cute.FastDivmodDivisorV2((across_m - 1) % GROUP + 1),
        clusters=cute.FastDivmodDivisorV2(clusters) if grouped else None,
    )


@cute.jit
def scheduler_state(
    tile: cutlass.Constexpr,
    raster: RasterOrder,
    k: Int32,
    weight_batch: Any,
    groups: Any,
    rank: Int32,
) -> SchedulerState:
    """Initial ``SchedulerState`` of this CTA."""
    # Shifts, as nothing is negative: divisions of signed numbers take four instructions.
    k_steps = (k + (TILE_K - 1)) >> (TILE_K.bit_length() - 1)
    first_k_step, last_step = Int32(0), k_steps
    if cutlass.const_expr(tile.split_k > 1):
        halvings = tile.split_k.bit_length() - 1
        first_k_step = rank * k_steps >> halvings
        last_step = (rank + 1) * k_steps >> halvings
    first = cute.arch.block_idx()[0] // tile.cluster
    tile_stride = cute.arch.grid_dim()[0] // tile.cluster
    return SchedulerState(
        first=first,
        tile_stride=tile_stride,
        num_tiles=raster.each + Int32(first < raster.extra),
        raster=raster,
        cta_m=Int32(0) if tile.split_k > 1 else rank % tile.cluster_m // tile.ctas,
        cta_n=Int32(0) if tile.split_k > 1 else rank // tile.cluster_m,
        weight_batch_stride=Int32(0) if tile.grouped else Int32(weight_batch > 1),
        first_k_step=first_k_step,
        k_steps=last_step - first_k_step,
        rank=rank,
        groups=groups,
    )


@cute.jit
def prefetch_tile_count(tile: cutlass.Constexpr, state: SchedulerState) -> SchedulerState:
    """Prefetch the number of token tiles in use into ``state``, if grouped.

    A role issues the load before it waits for other warps, and calls ``resolve_tile_count``
    afterwards. If the preceding kernel may be the routing, the role first waits for that kernel.
    With ``routed_before`` the preceding kernel is a GEMM that reads the same groups: that GEMM
    triggers its dependent launch only after waiting for the routing, so that the groups are in
    memory, and no kernel overwrites the groups before this kernel ends.
    """
    if cutlass.const_expr(not tile.grouped):
        return state
    if cutlass.const_expr(tile.counts_first):
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
    return replace(state, num_tiles=Array(state.groups, shape=(1,)).load(0))


@cute.jit
def resolve_tile_count(tile: cutlass.Constexpr, state: SchedulerState) -> SchedulerState:
    """Compute the number of the cluster's tiles from the number of token tiles, if grouped.

    The batch is the outermost index of the raster order, so that only the end of the order is
    unknown to the host.
    """
    if cutlass.const_expr(not tile.grouped):
        return state
    raster = state.raster
    tiles = state.num_tiles * (raster.across_m * raster.across_n)
    # From this cluster's first tile on every ``tile_stride``-th, if there are as many.
    return replace(
        state, num_tiles=(tiles + state.tile_stride - 1 - state.first) // raster.clusters
    )


@cute.jit
def tile_coord(tile: cutlass.Constexpr, state: SchedulerState, index: Int32) -> TileCoord:
    """Coordinates of this CTA's ``index``-th tile.

    Raster order: the cluster tiles of a matrix along M are split into groups of ``GROUP``; within
    a group, M varies fastest, then N. The batch is outermost.
    """
    number = state.first + index * state.tile_stride
    raster = state.raster
    batch, number = divmod(number, raster.matrix)
    across, down = Int32(0), number
    if raster.across_n > 1:
        group, number = divmod(number, raster.group)
        across, down = number // GROUP, number % GROUP
        if raster.across_m < (group + 1) * GROUP:
            across, down = divmod(number, raster.last)
        down += group * GROUP
    return TileCoord(
        m=down * (tile.cluster_m // tile.ctas) + state.cta_m,
        n=across * tile.cluster_n + state.cta_n,
        batch=batch,
        weight=_weight(tile, state, batch),
    )


def _weight(tile: Tile, state: SchedulerState, batch: Int32) -> Int32:
    if tile.grouped:
        return Array(state.groups, shape=(1,)).load(1 + batch)
    return batch * state.weight_batch_stride
