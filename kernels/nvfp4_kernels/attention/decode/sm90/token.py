"""New token of a sequence: loads of its queries, key and value, and the store into the cache."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Array, BFloat16, Float16, Float32, Int32, Int64, Uint8, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.decode.sm90.loader import Cache
from nvfp4_kernels.attention.decode.sm90.scheduler import WorkTile
from nvfp4_kernels.attention.decode.sm90.tile import (
    KEYS,
    MMA_HEADS,
    VECTOR_BYTES,
    DecodeTile,
    Variant,
)
from nvfp4_kernels.device.divisor import Divisor
from nvfp4_kernels.device.narrow import to_e4m3
from nvfp4_kernels.device.widen import widen
from nvfp4_kernels.sm90.limits import ROW_BYTES

VECTOR = 8  # elements of 16 bits: 16 bytes
# Largest exponent of a row of bfloat16 queries as float16: exponents down to −24 remain.
QUERY_EXPONENT = 14


class TokenTensor(NamedTuple):
    """Tensor [token, head, D] in global memory; strides in elements are multiples of ``VECTOR``."""

    data: cute.Pointer
    token_stride: Int64
    head_stride: Int64

    def start(self, token: Int32, head: Int32) -> Int64:
        """Offset in elements of the vector of token ``token`` and head ``head``."""
        return Int64(token) * self.token_stride + Int64(head) * self.head_stride


class Queries(NamedTuple):
    """Queries of a group of heads.

    Attributes:
        fragments: A fragments of Q·Kᵀ, 16 heads, one for each 16 elements of D.
        factors: factor of each head's scores, in the lanes of the head, one for each 8 heads; empty
            if all are 1.
    """

    fragments: list[list[Uint32]]
    factors: list[Float32]


@dataclass(frozen=True)
class NewToken:
    """Loads of the token's queries, key and value, and the store into the cache."""

    tile: DecodeTile
    variant: Variant

    def queries(self, q: TokenTensor, work: WorkTile) -> Queries:
        """Load the queries of the group's heads, padded to 16 heads.

        With E4M3 keys, which are converted to float16, bfloat16 queries are converted as well.
        """
        lane, zero = cute.arch.lane_idx(), Uint32(0)
        data, rows, factors = Array(q.data, shape=(1,)), [], []
        for head_tile in range(self.tile.head_tiles):
            head = head_tile * MMA_HEADS + lane // 4
            live = head < self.tile.group
            inside = cutlass.min(head, Int32(self.tile.group - 1))
            start = q.start(work.sequence, work.kv_head * self.tile.group + inside)
            words = []
            for half in range(2 * self.tile.steps):
                pair = data.load(start + self._column(half, lane), 2, alignment=4)
                words.append(cutlass.select_(live, Uint32(pair.bitcast(Uint32)[0]), zero))
            if self.tile.fp8 and self.variant.dtype == "bfloat16":
                words, factor = _as_float16(words)
                factors.append(factor)
            rows.append(words)
        upper = rows[0]
        lower = rows[1] if self.tile.head_tiles == 2 else [zero] * len(upper)
        fragments = [
            [upper[2 * step], lower[2 * step], upper[2 * step + 1], lower[2 * step + 1]]
            for step in range(self.tile.steps)
        ]
        return Queries(fragments, factors)

    def _column(self, half: int, lane: Int32) -> Int32:
        """First of two elements of D in a lane's ``half``-th word of a row.

        A lane has four neighbouring elements of each 16 if keys are E4M3, as the word that
        ``ldmatrix`` gives the lane; otherwise two in each 8.
        """
        if self.tile.fp8:
            return half // 2 * 16 + lane % 4 * 4 + half % 2 * 2
        return half * 8 + lane % 4 * 2

    def vector(self, x: TokenTensor, work: WorkTile) -> Vector:
        """Load this lane's 16 bytes of the token's key or value ``x``."""
        at = cute.arch.lane_idx() % (self.tile.head_dim // VECTOR) * VECTOR
        start = x.start(work.sequence, work.kv_head)
        return Array(x.data, shape=(1,)).load(start + at, VECTOR, alignment=16)

    @cute.jit
    def store(
        self, cache: Cache, stage: Array, key: Vector, value: Vector, work: WorkTile, row: Int32
    ) -> None:
        """Store the key and value into the stage and, unless the slot is negative, into the cache.

        ``row``: row of the token in the stage. Values of later rows of the same box are zeroed, as
        P = 0 times NaN is NaN.
        """
        tile = self.tile
        lane = cute.arch.lane_idx()
        pieces = tile.head_dim // VECTOR
        size = VECTOR * tile.element_bytes
        zeros = Vector.from_elements((0,) * (size // 4), Uint32).bitcast(Float32)
        if lane < pieces:
            new_key = self._as_cached(key, cache.scales[0])
            new_value = self._as_cached(value, cache.scales[1])
            slot = Int64(Array(cache.slots, shape=(1,)).load(Int64(work.sequence)))
            if slot >= 0:
                page_size = self.variant.page_size
                offset = (
                    slot // page_size * cache.strides.page
                    + Int64(work.kv_head) * cache.strides.head
                    + slot % page_size * cache.strides.row
                )
                target = Array(cache.data, shape=(1,))
                target.store(new_key, offset + lane * VECTOR, alignment=size)
                target.store(new_value, offset + (lane + pieces) * VECTOR, alignment=size)
            stage.store(new_key.bitcast(Float32), self._stage_word(lane, row), alignment=size)
            stage.store(
                new_value.bitcast(Float32), self._stage_word(lane + pieces, row), alignment=size
            )
            for after in cutlass.range(row + 1, (row // KEYS + 1) * KEYS, unroll=1):
                stage.store(zeros, self._stage_word(lane + pieces, after), alignment=size)
        ptx.bar_warp_sync(cute.arch.FULL_MASK)

    def _as_cached(self, piece: Vector, scale: Float32) -> Vector:
        """Return 8 elements as the cache stores them, divided by ``scale`` if it is E4M3."""
        if not self.tile.fp8:
            return piece
        divisor = Divisor.of(scale)
        values = [divisor.quotient(value) for value in widen(piece).to_elements()]
        words = tuple(to_e4m3(values[first : first + 4]) for first in (0, 4))
        return Vector.from_elements(words, Uint32).bitcast(Uint8)

    def _stage_word(self, piece: Int32, row: Int32) -> Int32:
        """Index of the word where a piece of 8 elements of a row begins in a stage."""
        box = row // KEYS * (self.tile.box_bytes // 4)
        if self.tile.fp8:
            return box + swizzled_word(self.tile, piece // 2, row % KEYS) + piece % 2 * 2
        return box + swizzled_word(self.tile, piece, row % KEYS)


def swizzled_word(tile: DecodeTile, vector: Int32, row: Int32) -> Int32:
    """Index of the word where a 16-byte vector of a row begins in a box."""
    per_chunk = tile.chunk_bytes // VECTOR_BYTES
    chunk, inside = vector // per_chunk, vector % per_chunk
    # The swizzle's pattern advances every 128 bytes.
    step = row if tile.chunk_bytes == ROW_BYTES else row // (ROW_BYTES // tile.chunk_bytes)
    return (chunk * KEYS + row) * (4 * per_chunk) + (inside ^ (step % per_chunk)) * 4


def _as_float16(words: list[Uint32]) -> tuple[list[Uint32], Float32]:
    """Convert bfloat16 queries to float16, and return the factor that undoes their scaling.

    Each head's row, in four neighbouring lanes, is multiplied by a power of two, so that its
    largest exponent is ``QUERY_EXPONENT``. Elements less than 2^-31 of the largest lose bits, by at
    most 2^-39 of the largest.
    """
    values = widen(Vector.from_elements(tuple(words), Uint32).bitcast(BFloat16)).to_elements()
    peak = Float32(0.0)
    for value in values:
        peak = cute.arch.fmax(peak, cute.math.abs(Float32(value)))
    for distance in (1, 2):
        peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, distance))
    # A smaller exponent than the least needed would make the factor infinite.
    exponent = cutlass.max(Int32(peak.bitcast(Uint32) >> 23), Int32(QUERY_EXPONENT + 1))
    up = Uint32(Int32(254 + QUERY_EXPONENT) - exponent << 23).bitcast(Float32)
    down = Uint32(exponent - QUERY_EXPONENT << 23).bitcast(Float32)
    scaled = Vector.from_elements(tuple(value * up for value in values), Float32).to(Float16)
    return [Uint32(word) for word in scaled.bitcast(Uint32).to_elements()], down
