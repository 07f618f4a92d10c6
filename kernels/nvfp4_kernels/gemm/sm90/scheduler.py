"""Tile scheduler: which tiles a cluster computes, in which order, and which part of K."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_kernels.fragments import TILE

# Tiles of tokens that are taken together: they stay in L2 while the weights pass by.
GROUP = 8


@dataclass(frozen=True)
class RasterOrder:
    """Extent of all tiles: blocks of rows × tiles of tokens."""

    rows: Int32
    tokens: Int32


@dataclass(frozen=True)
class TileCoord:
    """A tile: index of its block of rows, and of its tokens."""

    rows: Int32
    tokens: Int32


@dataclass(frozen=True)
class SchedulerState:
    """Tiles and part of K of one CTA.

    Attributes:
        first: number of its cluster's first tile; the others follow ``weight_per_warpgroup``.
        num_tiles: how many tiles there are.
        raster: of all tiles.
        rank: of this CTA in its cluster.
        first_k_step, steps: of K, the part that this CTA adds up, in stages.
    """

    first: Int32
    weight_per_warpgroup: Int32
    num_tiles: Int32
    raster: RasterOrder
    rank: Int32
    first_k_step: Int32
    steps: Int32


@cute.jit
def scheduler_state(
    tile: cutlass.Constexpr, raster: RasterOrder, k: Int32, rank: Int32
) -> SchedulerState:
    """This CTA's ``SchedulerState``."""
    steps = cute.ceil_div(k, TILE * tile.k_tiles)
    part = rank if tile.split_k > 1 else Int32(0)
    first_k_step = part * steps // tile.split_k
    last_step = (part + 1) * steps // tile.split_k
    first = cute.arch.block_idx()[0] // tile.split_k
    weight_per_warpgroup = cute.arch.grid_dim()[0] // tile.split_k
    tiles = raster.rows * raster.tokens
    return SchedulerState(
        first=first,
        weight_per_warpgroup=weight_per_warpgroup,
        num_tiles=(tiles - first + weight_per_warpgroup - 1) // weight_per_warpgroup,
        raster=raster,
        rank=rank,
        first_k_step=first_k_step,
        steps=last_step - first_k_step,
    )


@cute.jit
def tile_coord(state: SchedulerState, index: Int32) -> TileCoord:
    """Coordinates of one of this CTA's tiles: along the rows in groups of ``GROUP`` token tiles."""
    number = state.first + index * state.weight_per_warpgroup
    raster = state.raster
    rows, tokens = number, Int32(0)
    if raster.tokens > 1:
        group = number // (GROUP * raster.rows)
        number -= group * (GROUP * raster.rows)
        width = cutlass.min(Int32(GROUP), raster.tokens - group * GROUP)
        rows = number // width
        tokens = group * GROUP + number - rows * width
    return TileCoord(rows=rows, tokens=tokens)
