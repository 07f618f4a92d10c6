"""Tile scheduler: the tiles of a cluster, in raster order, and each CTA's range of K.

If grouped, the number of token tiles and the expert of each tile are read on the device from
``groups`` of ``nvfp4_kernels.moe.routing.Routing``.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Int32

from nvfp4_kernels.gemm.sm90.tile import Tile

# Tiles of tokens that are taken together: they stay in L2 while the weights pass by.
GROUP = 8


@dataclass(frozen=True)
class RasterOrder:
    """Numbers of row tiles and token tiles, over which the raster order runs."""

    rows: Int32
    tokens: Int32


@dataclass(frozen=True)
class TileCoord:
    """Coordinates of a tile: indices of the row tile, the token tile and the expert."""

    rows: Int32
    tokens: Int32
    expert: Int32


@dataclass(frozen=True)
class SchedulerState:
    """Scheduler state of one CTA: its tiles and its range of K.

    Attributes:
        first: index of the cluster's first tile in raster order; the following tiles are
            ``stride`` apart.
        stride: number of clusters of the grid.
        num_tiles: number of the cluster's tiles.
        raster: raster order of all tiles.
        rank: rank of this CTA in its cluster.
        first_k_step, steps: first K step and number of K steps of this CTA, a stage each.
        groups: if grouped, int32 [1 + tiles]: number of tiles in use, then the expert of each tile.
    """

    first: Int32
    stride: Int32
    num_tiles: Int32
    raster: RasterOrder
    rank: Int32
    first_k_step: Int32
    steps: Int32
    groups: cute.Pointer | None


@cute.jit
def scheduler_state(
    tile: cutlass.Constexpr,
    raster: RasterOrder,
    groups: cute.Pointer | None,
    k: Int32,
    rank: Int32,
) -> SchedulerState:
    """Initial ``SchedulerState`` of this CTA; if grouped, ``groups`` limits the number of tiles."""
    if cutlass.const_expr(tile.grouped):
        raster = RasterOrder(rows=raster.rows, tokens=Array(groups, shape=(1,)).load(0))
    steps = cute.ceil_div(k, tile.tile_k * tile.k_tiles)
    part = rank if tile.split_k > 1 else Int32(0)
    first_k_step = part * steps // tile.split_k
    last_step = (part + 1) * steps // tile.split_k
    first = cute.arch.block_idx()[0] // tile.split_k
    stride = cute.arch.grid_dim()[0] // tile.split_k
    tiles = raster.rows * raster.tokens
    return SchedulerState(
        first=first,
        stride=stride,
        num_tiles=(tiles - first + stride - 1) // stride,
        raster=raster,
        rank=rank,
        first_k_step=first_k_step,
        steps=last_step - first_k_step,
        groups=groups,
    )


@cute.jit
def tile_coord(state: SchedulerState, index: Int32) -> TileCoord:
    """Coordinates of this CTA's ``index``-th tile.

    Raster order: the token tiles are split into groups of ``GROUP``; within a group, token tiles
    vary fastest, then row tiles.
    """
    number = state.first + index * state.stride
    raster = state.raster
    rows, tokens = number, Int32(0)
    if raster.tokens > 1:
        group = number // (GROUP * raster.rows)
        number -= group * (GROUP * raster.rows)
        width = cutlass.min(Int32(GROUP), raster.tokens - group * GROUP)
        rows = number // width
        tokens = group * GROUP + number - rows * width
    expert = Int32(0)
    if cutlass.const_expr(state.groups is not None):
        # Past the tiles in use nothing is written, not even the experts of such tiles.
        if index < state.num_tiles:
            expert = Array(state.groups, shape=(1,)).load(1 + tokens)
    return TileCoord(rows=rows, tokens=tokens, expert=expert)


def matrix(tile: Tile, coord: TileCoord, product: int) -> Int32:
    """Index of a product's weight among all experts' weights: gate and up of an expert adjacent."""
    return coord.expert * tile.weights + product % tile.weights
