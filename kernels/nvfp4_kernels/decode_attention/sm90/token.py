"""The token that comes: its queries, and its key and value on their way into the cache."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Int64, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.decode_attention.sm90.loader import Cache
from nvfp4_kernels.decode_attention.sm90.scheduler import Work
from nvfp4_kernels.decode_attention.sm90.tile import (
    CHUNK,
    EIGHT,
    KEYS,
    ROW_WORDS,
    DecodeTile,
    Variant,
)

PIECE = 8  # elements of 16 bytes


@dataclass(frozen=True)
class Rows:
    """[token, head, D] in global memory; strides count elements, multiples of ``PIECE``."""

    data: cute.Pointer
    token_stride: Int64
    head_stride: Int64

    def start(self, token: Int32, head: Int32) -> Int64:
        """Of a row."""
        return Int64(token) * self.token_stride + Int64(head) * self.head_stride


@dataclass(frozen=True)
class Token:
    """Reads what the kernel before this one has written."""

    tile: DecodeTile
    variant: Variant

    def queries(self, rows: Rows, work: Work) -> list[list[Uint32]]:
        """A of each 16 of D: the heads of a group, and zeros up to 16."""
        lane, zero = cute.arch.lane_idx(), Uint32(0)
        data, found = Array(rows.data, shape=(1,)), []
        for eight in range(self.tile.eights):
            head = eight * EIGHT + lane // 4
            live = head < self.tile.group
            inside = cutlass.min(head, Int32(self.tile.group - 1))
            start = rows.start(work.sequence, work.kv_head * self.tile.group + inside)
            words = []
            for half in range(2 * self.tile.steps):
                pair = data.load(start + (half * 8 + lane % 4 * 2), 2, alignment=4)
                words.append(cutlass.select_(live, Uint32(pair.bitcast(Uint32)[0]), zero))
            found.append(words)
        upper, lower = found[0], found[1] if self.tile.eights == 2 else [zero] * len(found[0])
        return [
            [upper[2 * step], lower[2 * step], upper[2 * step + 1], lower[2 * step + 1]]
            for step in range(self.tile.steps)
        ]

    def piece(self, rows: Rows, work: Work) -> Vector:
        """This lane's 16 bytes of the token's key, or of its value."""
        at = cute.arch.lane_idx() % (self.tile.head_dim // PIECE) * PIECE
        start = rows.start(work.sequence, work.kv_head)
        return Array(rows.data, shape=(1,)).load(start + at, PIECE, alignment=16)

    @cute.jit
    def put(
        self, cache: Cache, stage: Array, key: Vector, value: Vector, work: Work, row: Int32
    ) -> None:
        """Into the cache, if it belongs there, and into the step that was read there before.

        Zeros follow the token's value in its box: 0 times what lies there need not be 0.
        """
        tile = self.tile
        lane = cute.arch.lane_idx()
        pieces = tile.head_dim // PIECE
        zeros = Vector.from_elements((0,) * 4, Uint32).bitcast(Float32)
        if lane < pieces:
            slot = Int64(Array(cache.slots, shape=(1,)).load(Int64(work.sequence)))
            if slot >= 0:
                size = self.variant.page_size
                place = (
                    slot // size * cache.strides.page
                    + Int64(work.kv_head) * cache.strides.head
                    + slot % size * cache.strides.row
                )
                target = Array(cache.data, shape=(1,))
                target.store(key, place + lane * PIECE, alignment=16)
                target.store(value, place + (lane + pieces) * PIECE, alignment=16)
            stage.store(key.bitcast(Float32), self._place(lane, row), alignment=16)
            stage.store(value.bitcast(Float32), self._place(lane + pieces, row), alignment=16)
            for after in cutlass.range(row + 1, (row // KEYS + 1) * KEYS, unroll=1):
                stage.store(zeros, self._place(lane + pieces, after), alignment=16)
        ptx.bar_warp_sync(cute.arch.FULL_MASK)

    def _place(self, piece: Int32, row: Int32) -> Int32:
        """As ``place_of``, in a stage."""
        return row // KEYS * (self.tile.box_bytes // 4) + place_of(piece, row % KEYS)


def place_of(piece: Int32, row: Int32) -> Int32:
    """Word where 16 bytes of a row begin in a box."""
    of_chunk = CHUNK // PIECE
    chunk, inside = piece // of_chunk, piece % of_chunk
    return (chunk * KEYS + row) * ROW_WORDS + (inside ^ (row % of_chunk)) * 4
