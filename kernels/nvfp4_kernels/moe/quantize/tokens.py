"""Rows of token tiles, and lookup of their tokens in kernels."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Int64, Vector
from cutlass.experimental import primitives as ptx


class Tokens(NamedTuple):
    """Input rows in global memory; part of kernels' arguments.

    Attributes:
        x: [m, k], or [tiles, T, k].
        slots: int32 [tiles, T], slot of each row, -1 for padding.
        weights: routing weights, float32 [m, top_k], or null.
    """

    x: cute.Pointer
    slots: cute.Pointer
    weights: cute.Pointer


TOKEN_TYPES = {"slots": Int32, "weights": Float32, "groups": Int32}
TOKEN_ALIGNMENT = dict.fromkeys(TOKEN_TYPES, 4)


def load_count(groups: cute.Pointer) -> Int32:
    """Number of token tiles in use."""
    return Array(groups, shape=(1,)).load(0)


def load_slot(source: Array, row: Int64, there_is: Boolean | None = None) -> Int32:
    """Slot of a row; -1 if absent. ``there_is`` None: the row certainly exists."""
    if there_is is None:
        return source.load(row)
    return ptx.inline_ptx(
        "mov.b32 {$w0}, -1; @{$r1} ld.global.b32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[source.data_ptr(row), there_is],
    )


def load_weight(source: cute.Pointer, slot: Int32) -> Float32:
    """Routing weight of a slot; 1 without weights."""
    return ptx.inline_ptx(
        "mov.f32 {$w0}, 0f3F800000; @{$r1} ld.global.f32 {$w0}, [{$r0}];",
        write_only_types=[Float32],
        read_only_args=[Array(source, shape=(1,)).data_ptr(Int64(slot)), slot >= 0],
    )


def weigh(elements: Vector, weight: Float32) -> Vector:
    """Apply a routing weight to elements in float32, rounded to the elements' type."""
    return (elements.to(Float32) * weight).to(elements.dtype)


def first_element(slot: Int32, row: Int64, top_k: cutlass.Constexpr, k: Int32 | int) -> Int64:
    """Offset in x of the row's token; of the row itself if x is tiled already (``top_k`` == 0)."""
    return (Int64(slot // top_k) if top_k else row) * Int64(k)
