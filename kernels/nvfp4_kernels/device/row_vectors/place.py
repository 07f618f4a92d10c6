"""Coordinates of a thread's vectors, loads and stores of the vectors, and their sum of squares."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Int64, Vector

from nvfp4_kernels.device.row_vectors.tile import LOADED_WORDS, VECTOR, VectorTile


@dataclass(frozen=True)
class Place:
    """Coordinates of a thread's vectors.

    Attributes:
        tile: layout of the CTA.
        row: index of the CTA's row.
        first: index in the row of the first element of this thread's first vector.
        k: elements per row, a multiple of 8.
    """

    tile: VectorTile
    row: Int64
    first: Int32
    k: Int32

    @property
    def steps(self) -> range:
        return range(self.tile.steps)

    def element(self, step: int) -> Int32:
        """Index in the row of the first element of this thread's vector in ``step``."""
        return self.first + step * self.tile.threads * VECTOR

    def has(self, step: int) -> Boolean:
        """Whether the row has this thread's vector in ``step``."""
        return self.element(step) < self.k


def find(tile: VectorTile, k: Int32, whole_rows: bool) -> Place:
    """``Place`` of this thread; CTAs with neighbouring indices have parts of the same row.

    ``whole_rows``: whether a CTA has a whole row.
    """
    cta, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
    if whole_rows:
        return Place(tile, Int64(cta), thread * VECTOR, k)
    parts = cute.ceil_div(k, tile.elements)
    first = cta % parts * tile.elements + thread * VECTOR
    return Place(tile, Int64(cta // parts), first, k)


def steps_ahead(element: type[cutlass.Numeric], inputs: int) -> int:
    """Number of steps whose vectors, ``inputs`` per step, a thread loads before using the first."""
    return max(1, LOADED_WORDS // (inputs * VECTOR * element.width // 32))


def load(place: Place, step: int, source: cute.Pointer, start: Int64) -> Vector:
    """Load this thread's vector of ``step`` in a row that begins at element ``start``.

    Past the row's end the row's last vector is loaded: a branch would keep loads from being issued
    together.
    """
    element = cutlass.min(place.element(step), place.k - VECTOR)
    return Vector(Array(source, shape=(1,)).load(start + element, VECTOR, alignment=16))


@cute.jit
def store(
    place: Place, step: cutlass.Constexpr, target: cute.Pointer, start: Int64, values: Vector
) -> None:
    """Store this thread's vector of ``step`` to a row that begins at element ``start``."""
    if place.has(step):
        Array(target, shape=(1,)).store(values, start + place.element(step), alignment=16)


def squares(place: Place, step: int, values: Vector) -> Float32:
    """Sum of squares of this thread's float32 vector in ``step``; 0 past the row's end."""
    total = Float32(0.0)
    for n in range(VECTOR):
        total = cute.math.fma(values[n], values[n], total)
    return cutlass.select_(place.has(step), total, Float32(0.0))
