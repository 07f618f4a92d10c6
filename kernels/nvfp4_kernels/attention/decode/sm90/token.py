"""New token of a sequence: loads of its queries, key and value, and the store into the cache."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Int64, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.decode.sm90.loader import Cache
from nvfp4_kernels.attention.decode.sm90.scheduler import WorkTile
from nvfp4_kernels.attention.decode.sm90.tile import (
    CHUNK,
    KEYS,
    MMA_HEADS,
    ROW_WORDS,
    DecodeTile,
    Variant,
)

VECTOR = 8  # elements: 16 bytes


class TokenTensor(NamedTuple):
    """Tensor [token, head, D] in global memory; strides in elements are multiples of ``VECTOR``."""

    data: cute.Pointer
    token_stride: Int64
    head_stride: Int64

    def start(self, token: Int32, head: Int32) -> Int64:
        """Offset in elements of the vector of token ``token`` and head ``head``."""
        return Int64(token) * self.token_stride + Int64(head) * self.head_stride


@dataclass(frozen=True)
class NewToken:
    """Loads of the token's queries, key and value, and the store into the cache."""

    tile: DecodeTile
    variant: Variant

    def queries(self, q: TokenTensor, work: WorkTile) -> list[list[Uint32]]:
        """Load A fragments of Q·Kᵀ, one per 16 elements of D: a group's heads, padded to 16."""
        lane, zero = cute.arch.lane_idx(), Uint32(0)
        data, fragments = Array(q.data, shape=(1,)), []
        for head_tile in range(self.tile.head_tiles):
            head = head_tile * MMA_HEADS + lane // 4
            live = head < self.tile.group
            inside = cutlass.min(head, Int32(self.tile.group - 1))
            start = q.start(work.sequence, work.kv_head * self.tile.group + inside)
            words = []
            for half in range(2 * self.tile.steps):
                pair = data.load(start + (half * 8 + lane % 4 * 2), 2, alignment=4)
                words.append(cutlass.select_(live, Uint32(pair.bitcast(Uint32)[0]), zero))
            fragments.append(words)
        upper = fragments[0]
        lower = fragments[1] if self.tile.head_tiles == 2 else [zero] * len(upper)
        return [
            [upper[2 * step], lower[2 * step], upper[2 * step + 1], lower[2 * step + 1]]
            for step in range(self.tile.steps)
        ]

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
        vectors = tile.head_dim // VECTOR
        zeros = Vector.from_elements((0,) * 4, Uint32).bitcast(Float32)
        if lane < vectors:
            slot = Int64(Array(cache.slots, shape=(1,)).load(Int64(work.sequence)))
            if slot >= 0:
                size = self.variant.page_size
                offset = (
                    slot // size * cache.strides.page
                    + Int64(work.kv_head) * cache.strides.head
                    + slot % size * cache.strides.row
                )
                target = Array(cache.data, shape=(1,))
                target.store(key, offset + lane * VECTOR, alignment=16)
                target.store(value, offset + (lane + vectors) * VECTOR, alignment=16)
            stage.store(key.bitcast(Float32), self._stage_word(lane, row), alignment=16)
            stage.store(value.bitcast(Float32), self._stage_word(lane + vectors, row), alignment=16)
            for after in cutlass.range(row + 1, (row // KEYS + 1) * KEYS, unroll=1):
                stage.store(zeros, self._stage_word(lane + vectors, after), alignment=16)
        ptx.bar_warp_sync(cute.arch.FULL_MASK)

    def _stage_word(self, vector: Int32, row: Int32) -> Int32:
        """Index of the word where a 16-byte vector of a row begins in a stage."""
        return row // KEYS * (self.tile.box_bytes // 4) + swizzled_word(vector, row % KEYS)


def swizzled_word(vector: Int32, row: Int32) -> Int32:
    """Index of the word where a 16-byte vector of a row begins in a box."""
    per_chunk = CHUNK // VECTOR
    chunk, inside = vector // per_chunk, vector % per_chunk
    return (chunk * KEYS + row) * ROW_WORDS + (inside ^ (row % per_chunk)) * 4
