"""One thread's 16 elements of a head: position, norm and rotary embedding."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Int64, Uint8, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device import narrow
from nvfp4_kernels.device.divisor import Divisor
from nvfp4_kernels.device.math import rounded
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.device.widen import widen
from nvfp4_kernels.rotary.store.tile import PIECE, HeadTile, Variant

LOAD_BYTES = 16


@dataclass(frozen=True)
class Part:
    """A thread's elements of a head: two pieces of 8 elements.

    Attributes:
        first, second: index in the head of each piece's first element.
        rotating: whether the elements are rotated.
        angle: ``first``, clamped to rotated elements; with ``neox``, index of the first cosine.
        live: whether the thread has elements of its own; otherwise the thread re-reads the elements
            of the last live thread.
    """

    first: Int32
    second: Int32
    rotating: Boolean
    angle: Int32
    live: Boolean


@dataclass(frozen=True)
class Angles:
    """Cosines and sines of a thread's eight pairs."""

    cos: list[Float32]
    sin: list[Float32]


def part_of(tile: HeadTile, lane: Int32) -> Part:
    """``Part`` of the thread with index ``lane`` among the threads of a head."""
    part = cutlass.min(lane, Int32(tile.parts - 1))
    if tile.rotary_parts == tile.parts:
        first, second = part * PIECE, part * PIECE + tile.rotary_dim // 2
        return Part(first, second, Boolean(True), part * PIECE, lane < tile.parts)
    rotating = part < tile.rotary_parts
    rest = tile.rotary_dim + (part - tile.rotary_parts) * PIECE
    first = Int32(cutlass.select_(rotating, part * PIECE, rest))
    apart = cutlass.select_(
        rotating, Int32(tile.rotary_dim // 2), Int32((tile.head_dim - tile.rotary_dim) // 2)
    )
    angle = cutlass.min(part, Int32(tile.rotary_parts - 1)) * PIECE
    return Part(first, first + Int32(apart), rotating, angle, lane < tile.parts)


def load(source: cute.Pointer, start: Int64, count: int) -> list[Float32]:
    """Load ``count`` elements, up to 16 bytes at a time, and convert them to float32."""
    array, width = Array(source, shape=(1,)), source.dtype.width // 8
    each = min(count, LOAD_BYTES // width)
    vectors = [
        array.load(start + first, each, alignment=each * width) for first in range(0, count, each)
    ]
    return [value for vector in vectors for value in widen(vector).to_elements()]


@dataclass(frozen=True)
class Heads:
    """Loads, norm and rotary embedding of heads."""

    tile: HeadTile
    variant: Variant

    def pieces(self, source: cute.Pointer, start: Int64, part: Part) -> list[Vector]:
        """Load both pieces of the head whose first element is ``start`` in ``source``."""
        array = Array(source, shape=(1,))
        return [
            Vector(array.load(start + at, PIECE, alignment=LOAD_BYTES))
            for at in (part.first, part.second)
        ]

    def factors(self, weight: cute.Pointer, part: Part) -> list[Vector]:
        """Load the norm's weights for both pieces."""
        count = LOAD_BYTES * 8 // weight.dtype.width
        array = Array(weight, shape=(1,))
        return [
            Vector.from_elements(
                tuple(
                    value
                    for first in range(0, PIECE, count)
                    for value in array.load(
                        Int64(at + first), count, alignment=LOAD_BYTES
                    ).to_elements()
                ),
                weight.dtype,
            )
            for at in (part.first, part.second)
        ]

    def angles(self, table: cute.Pointer, position: Int64, part: Part) -> Angles:
        """Load the cosines and sines of this thread's pairs at a position."""
        half = self.tile.rotary_dim // 2
        start = position * self.tile.rotary_dim
        if self.variant.neox:
            starts, count = [start + part.angle], PIECE
        else:  # four pairs lie in either piece
            count = PIECE // 2
            starts = [start + part.angle // 2, start + (part.angle + half) // 2]
        cos, sin = (
            [value for at in starts for value in load(table, at + offset, count)]
            for offset in (0, half)
        )
        return Angles(cos, sin)

    def normalised(
        self, pieces: list[Vector], factors: list[Vector], part: Part, eps: Float32
    ) -> list[Vector]:
        """RMSNorm of a head: the thread's pieces, normalised; all threads of the warp take part."""
        values = [piece.to(Float32) for piece in pieces]
        squares = Float32(0.0)
        for value in (value for piece in values for value in piece.to_elements()):
            squares = rounded("add", squares, rounded("mul", value, value))
        if self.tile.parts != self.tile.lanes:
            squares = Float32(cutlass.select_(part.live, squares, Float32(0.0)))
        distance = 1
        while distance < self.tile.lanes:
            squares = squares + cute.arch.shuffle_sync_bfly(squares, distance)
            distance *= 2
        mean = rounded("div", squares, Float32(self.tile.head_dim))
        inverse = rounded("div", Float32(1.0), _root(mean + eps))
        return [
            ((piece * inverse).to(weight.dtype) * weight).to(TYPES[self.variant.dtype])
            for piece, weight in zip(values, factors, strict=True)
        ]

    def rotated(self, pieces: list[Vector], angles: Angles, part: Part) -> list[Vector]:
        """Pieces after rotation; pieces past R are unchanged."""
        first, second = (list(widen(piece).to_elements()) for piece in pieces)
        if self.variant.neox:
            pairs = list(zip(first, second, strict=True))
        else:
            every = first + second
            pairs = list(zip(every[::2], every[1::2], strict=True))
        turned = [
            self._turned(*pair, cos, sin)
            for pair, cos, sin in zip(pairs, angles.cos, angles.sin, strict=True)
        ]
        if self.variant.neox:
            values = [low for low, _ in turned] + [high for _, high in turned]
        else:
            values = [value for pair in turned for value in pair]
        result = []
        for piece, start in zip(pieces, (0, PIECE), strict=True):
            vector = Vector.from_elements(tuple(values[start : start + PIECE]), Float32)
            vector = vector.to(TYPES[self.variant.dtype])
            if self.tile.rotary_parts != self.tile.parts:
                vector = _select(part.rotating, vector, piece)
            result.append(vector)
        return result

    def _turned(
        self, low: Float32, high: Float32, cos: Float32, sin: Float32
    ) -> tuple[Float32, Float32]:
        if self.variant.table_dtype != "float32":
            # Products of 16-bit numbers are exact: whether they are fused does not show.
            return low * cos - high * sin, high * cos + low * sin
        products = [rounded("mul", x, y) for x, y in ((low, cos), (high, sin))]
        crossed = [rounded("mul", x, y) for x, y in ((high, cos), (low, sin))]
        return rounded("sub", *products), rounded("add", *crossed)


def to_e4m3(piece: Vector, scale: Divisor) -> Vector:
    """Divide ``piece`` by ``scale`` and round to E4M3, nearest even, saturating; return bytes."""
    values = [scale.quotient(value) for value in widen(piece).to_elements()]
    words = [narrow.to_e4m3(values[first : first + 4]) for first in range(0, PIECE, 4)]
    return Vector.from_elements(tuple(words), Uint32).bitcast(Uint8)


def _root(value: Float32) -> Float32:
    return ptx.inline_ptx(
        "sqrt.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value]
    )


def _select(condition: Boolean, yes: Vector, no: Vector) -> Vector:
    """Select ``yes`` if ``condition``, else ``no``, word by word."""
    words = [
        Uint32(cutlass.select_(condition, Uint32(a), Uint32(b)))
        for a, b in zip(
            yes.bitcast(Uint32).to_elements(), no.bitcast(Uint32).to_elements(), strict=True
        )
    ]
    return Vector.from_elements(tuple(words), Uint32).bitcast(yes.dtype)
