"""Reductions over the threads of a CTA, in a fixed order."""

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Float32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.row_vectors.tile import WARP

Operation = Callable[[Float32, Float32], Float32]


def largest(a: Float32, b: Float32) -> Float32:
    """Maximum; NaN if either operand is NaN."""
    return cute.arch.fmax(a, b, nan=True)


def total(a: Float32, b: Float32) -> Float32:
    """Sum of both operands."""
    return a + b


@cute.jit
def reduce_cta(warps: cutlass.Constexpr, value: Float32, operation: cutlass.Constexpr) -> Float32:
    """Reduce ``value`` over the CTA's threads, of ``warps`` warps, to the same bits in each thread.

    0 must be the neutral element of ``operation``. Every call allocates its own shared memory, so
    that no barrier is needed before the next call.
    """
    partial = Array(Float32, warps, space=AddressSpace.smem, alignment=16)
    warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
    value = _over_warp(value, operation)
    if lane == 0:
        partial.store(value, warp)
    ptx.barrier_cta_sync()
    value = Float32(0.0)
    if lane < warps:
        value = Float32(partial.load(lane))
    return _over_warp(value, operation)


def _over_warp(value: Float32, operation: Operation) -> Float32:
    """Reduce over the warp by butterfly shuffles: both partners form the same result."""
    distance = 1
    while distance < WARP:
        value = operation(value, cute.arch.shuffle_sync_bfly(value, distance))
        distance *= 2
    return value
