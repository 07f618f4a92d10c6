"""Which tiles a cluster computes, one after the other, and which part of K."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from nvfp4_kernels.fragments import TILE

# Tiles of tokens that are taken together: they stay in L2 while the weights pass by.
GROUP = 8


@dataclass(frozen=True)
class Order:
    """All tiles: blocks of rows × tiles of tokens."""

    rows: Int32
    tokens: Int32


@dataclass(frozen=True)
class Place:
    """A tile: index of its block of rows, and of its tokens."""

    rows: Int32
    tokens: Int32


@dataclass(frozen=True)
class Work:
    """What one CTA does.

    Attributes:
        first: number of its cluster's first tile; the others follow ``apart``.
        mine: how many tiles there are.
        order: of all tiles.
        rank: of this CTA in its cluster.
        first_step, steps: of K, the part that this CTA adds up, in stages.
    """

    first: Int32
    apart: Int32
    mine: Int32
    order: Order
    rank: Int32
    first_step: Int32
    steps: Int32


@cute.jit
def work_of(tile: cutlass.Constexpr, order: Order, k: Int32, rank: Int32) -> Work:
    """This CTA's ``Work``."""
    steps = cute.ceil_div(k, TILE * tile.k_tiles)
    part = rank if tile.split_k > 1 else Int32(0)
    first_step = part * steps // tile.split_k
    last_step = (part + 1) * steps // tile.split_k
    first = cute.arch.block_idx()[0] // tile.split_k
    apart = cute.arch.grid_dim()[0] // tile.split_k
    tiles = order.rows * order.tokens
    return Work(
        first=first,
        apart=apart,
        mine=(tiles - first + apart - 1) // apart,
        order=order,
        rank=rank,
        first_step=first_step,
        steps=last_step - first_step,
    )


@cute.jit
def place_of(work: Work, index: Int32) -> Place:
    """Where one of this CTA's tiles lies: along the rows in groups of ``GROUP`` tiles of tokens."""
    number = work.first + index * work.apart
    order = work.order
    rows, tokens = number, Int32(0)
    if order.tokens > 1:
        group = number // (GROUP * order.rows)
        number -= group * (GROUP * order.rows)
        width = cutlass.min(Int32(GROUP), order.tokens - group * GROUP)
        rows = number // width
        tokens = group * GROUP + number - rows * width
    return Place(rows=rows, tokens=tokens)
