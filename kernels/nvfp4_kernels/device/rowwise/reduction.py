"""Reductions of a row over the threads that share the row, in a fixed order."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Float32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.rowwise.place import Place

Operation = Callable[[Float32, Float32], Float32]


def largest(a: Float32, b: Float32) -> Float32:
    """Maximum; NaN if either operand is NaN."""
    return cute.arch.fmax(a, b, nan=True)


def total(a: Float32, b: Float32) -> Float32:
    """Sum of both operands."""
    return a + b


@cute.jit
def reduce_row(place: Place, value: Float32, operation: cutlass.Constexpr) -> Float32:
    """Reduce ``value`` over the row's threads, to the same bits in each thread.

    0 must be the neutral element of ``operation``.

    All threads of the CTA take part. Every call allocates its own shared memory, so that no barrier
    is needed before the next call.
    """
    tile = place.tile
    partial = Array(Float32, tile.warps * tile.slots, space=AddressSpace.smem, alignment=16)
    value = _across_lanes(tile.lanes, value, operation)
    if place.lane == 0:
        partial.store(value, place.warp * tile.slots + place.slot)
    ptx.barrier_cta_sync()
    value = Float32(0.0)
    for first in cutlass.range_constexpr(0, tile.warps, tile.lanes):
        warp = first + place.lane
        if warp < tile.warps:
            value = operation(value, partial.load(warp * tile.slots + place.slot))
    return _across_lanes(tile.lanes, value, operation)


def _across_lanes(lanes: int, value: Float32, operation: Operation) -> Float32:
    """Butterfly reduction over lanes: both partners of an exchange form the same result."""
    offset = 1
    while offset < lanes:
        value = operation(value, cute.arch.shuffle_sync_bfly(value, offset))
        offset *= 2
    return value
