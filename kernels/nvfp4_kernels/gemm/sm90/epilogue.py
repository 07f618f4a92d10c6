"""Epilogue of a warpgroup: from sums to the result in global memory.

Rows of the weight are columns of the result, so that fragments must be transposed: by ``stmatrix``
into TMA boxes, or as float32 through rows of shared memory.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Int64, Vector
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap

from nvfp4_kernels.activation import SILU
from nvfp4_kernels.device.activation import activated
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.formats.fragments import TILE
from nvfp4_kernels.gemm.shards import ShardEnds
from nvfp4_kernels.gemm.sm90.dequantize import UNSCALE
from nvfp4_kernels.gemm.sm90.exchange import Exchange
from nvfp4_kernels.gemm.sm90.scheduler import SchedulerState, TileCoord, matrix
from nvfp4_kernels.gemm.sm90.split_k import SplitK
from nvfp4_kernels.gemm.sm90.tile import BARRIER, PITCH, EpilogueConfig, Tile
from nvfp4_kernels.sm90.limits import WARPGROUP

SLOTS = 2


@dataclass(frozen=True)
class ScalingOperands:
    """Factors and bias in global memory.

    Attributes:
        alpha: float32 [shards], one per shard of the weight's rows, or one per product of a pair;
            if grouped, [experts, products].
        ends: end of each shard but the last, along the weight's rows.
        bias: [n]; if grouped, [experts, products, n].
    """

    alpha: cute.Pointer
    ends: ShardEnds
    bias: cute.Pointer


@dataclass(frozen=True)
class OutputTensor:
    """Result ``data`` [m, n], and the tensor map of its boxes."""

    data: cute.Pointer
    tensor_map: TensorMap
    m: Int32
    n: Int32


@dataclass(frozen=True)
class Epilogue:
    """Role of a warpgroup, after its main loop."""

    tile: Tile
    output: EpilogueConfig

    @cute.jit
    def run(
        self,
        sums: list[list[Float32]],
        factors: ScalingOperands,
        result: OutputTensor,
        scratch: Array,
        received: Array | None,
        coord: TileCoord,
        state: SchedulerState,
        group: Int32,
    ) -> None:
        """Scale and store one tile.

        ``scratch``: boxes, transpose buffer or, with split-K, partial sums. ``received``: with
        split-K, the mbarrier that counts partial sums, see ``SplitK``.
        """
        if cutlass.const_expr(self.tile.weight_per_warpgroup):
            self.finish()
            sums = Exchange(self.tile, self.output).run(sums[0], scratch, group)
        if cutlass.const_expr(self.output.boxes):
            self._boxes(sums, factors, result, scratch, coord, group)
        elif cutlass.const_expr(self.tile.parts > 1):
            self._parts(sums, factors, result, scratch, received, coord, state, group)
        else:
            self._elements(sums, factors, result, scratch, coord, group)

    # --- in boxes -----------------------------------------------------------------------------

    @cute.jit
    def _boxes(
        self,
        sums: list[list[Float32]],
        factors: ScalingOperands,
        result: OutputTensor,
        scratch: Array,
        coord: TileCoord,
        group: Int32,
    ) -> None:
        """Store boxes of 64 rows × up to 64 tokens, with two boxes per warpgroup in flight."""
        tile, dtype = self.tile, TYPES[self.output.dtype]
        box = self.output.box_tokens(tile)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        warp, lane = thread // 32, thread % 32
        leader = thread == 0
        first = self._first_row(coord, group)
        upper = first + warp * 16 + lane // 4
        rows = [self._row(factors, result, coord, upper + at) for at in (0, 8)]
        for start in cutlass.range_constexpr(0, tile.own_tokens, box):
            slot = scratch.subview((group * SLOTS + start // box % SLOTS) * (box * TILE))
            if leader:
                # An odd number of boxes ends in the slot that the next tile begins with.
                turned = start == 0 and tile.own_tokens // box % SLOTS
                ptx.cp_async_bulk_wait_group(0 if turned else SLOTS - 1, read=True)
            self._sync(group)
            for token in cutlass.range_constexpr(0, box, 16):
                self._transpose(sums, rows, start + token, slot, token, warp, lane, dtype)
            ptx.fence_proxy(ptx.Proxy.ASYNC_SHARED, space=ptx.SharedSpace.shared_cta)
            self._sync(group)
            if leader:
                where = [first, self._first_token(coord, group) + start]
                ptx.cp_async_bulk_tensor_global_shared_cta(result.tensor_map.get_ptr(), slot, where)
                ptx.cp_async_bulk_commit_group()

    def _transpose(
        self,
        sums: list[list[Float32]],
        rows: list[tuple[list[Float32], list[Float32]]],
        first: int,
        slot: Array,
        token: int,
        warp: Int32,
        lane: Int32,
        dtype: Any,
    ) -> None:
        """Scale, convert and transpose a warp's 16 rows × 16 (or the last 8) tokens into ``slot``.

        ``slot``: [token, row]. ``first``: index of the first token among the warpgroup's tokens;
        ``token``: index of the same token in ``slot``.
        """
        words = []
        count = min(16, self.tile.own_tokens - first)
        for eight in range(0, count, 8):
            for half in range(2):
                at = 4 * ((first + eight) // 8) + 2 * half
                values = [self._value(sums, at + c, rows[half]) for c in range(2)]
                words.append(_packed(values, dtype))
        # Lanes 8 i to 8 i + 7 give the places of matrix i: tokens of the i // 2nd eight, and the
        # upper or the lower rows.
        row = token + lane % 8 + lane // 16 * 8
        piece = warp * 2 + lane // 8 % 2
        at = row * TILE + (piece ^ (row & 7)) * 8
        ptx.stmatrix(slot.subview(at), words, ptx.MMALayout.COL)

    # --- element by element -------------------------------------------------------------------

    @cute.jit
    def _elements(
        self,
        sums: list[list[Float32]],
        factors: ScalingOperands,
        result: OutputTensor,
        scratch: Array,
        coord: TileCoord,
        group: Int32,
    ) -> None:
        """Store element by element, a chunk of tokens at a time, transposed in shared memory."""
        tile = self.tile
        chunk = self.output.chunk(tile)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        own = scratch.subview(group * (tile.weights * chunk * PITCH))
        row = thread % TILE
        for start in cutlass.range_constexpr(0, tile.own_tokens, chunk):
            self._sync(group)
            self._spill(sums, own, start, thread)
            self._sync(group)
            column = self._first_row(coord, group) + row
            if column < result.n:
                scales, biases = self._row(factors, result, coord, column)
                for step in cutlass.range(chunk // 2, unroll=1):
                    token = step * 2 + thread // TILE
                    at = self._first_token(coord, group) + start + token
                    if at < result.m:
                        places = [(w * chunk + token) * PITCH + row for w in range(tile.weights)]
                        parts = [own.load(each) for each in places]
                        self._store(result, at, column, self._finished(parts, scales, biases))

    @cute.jit
    def _parts(
        self,
        sums: list[list[Float32]],
        factors: ScalingOperands,
        result: OutputTensor,
        parts: Array,
        received: Array | None,
        coord: TileCoord,
        state: SchedulerState,
        group: Int32,
    ) -> None:
        """Add up the partial sums of this CTA's share of the rows, and store the result."""
        tile = self.tile
        split = SplitK(tile)
        split.send(sums, parts, received, state.rank, group)
        threads = tile.warpgroups * WARPGROUP
        thread = cute.arch.thread_idx()[0]
        row = thread % tile.split_rows
        column = coord.rows * tile.rows + state.rank * tile.split_rows + row
        inside = column < result.n
        scales, biases = self._row(factors, result, coord, cutlass.min(column, result.n - 1))
        split.wait(received)
        if inside:
            vectors = tile.tokens // split.width
            for step in cutlass.range_constexpr(-(-vectors * tile.split_rows // threads)):
                vector = step * (threads // tile.split_rows) + thread // tile.split_rows
                if vector < vectors:
                    totals = [split.added(parts, w, row, vector) for w in range(tile.weights)]
                    for index in cutlass.range_constexpr(split.width):
                        at = coord.tokens * tile.tokens + split.token(vector, index)
                        if at < result.m:
                            values = [of_weight[index] for of_weight in totals]
                            self._store(result, at, column, self._finished(values, scales, biases))

    @cute.jit
    def _spill(self, sums: list[list[Float32]], own: Array, start: int, thread: Int32) -> None:
        """Write a chunk of sums, from token ``start`` on, into ``own``: [product, token, row]."""
        chunk = self.output.chunk(self.tile)
        row = thread // 32 * 16 + thread % 32 // 4
        pair = thread % 4 * 2
        for each in cutlass.range_constexpr(self.tile.weights):
            for token in cutlass.range_constexpr(0, chunk, 8):
                for c in cutlass.range_constexpr(4):
                    at = (each * chunk + token + pair + c % 2) * PITCH + row + c // 2 * 8
                    own.store(sums[each][4 * ((start + token) // 8) + c], at)

    def _store(self, result: OutputTensor, token: Int32, column: Int32, value: Float32) -> None:
        dtype = TYPES[self.output.dtype]
        Array(result.data, shape=(1,)).store(
            Float32(value).to(dtype), Int64(token) * result.n + column
        )

    # --- values -------------------------------------------------------------------------------

    def _first_row(self, coord: TileCoord, group: Int32) -> Int32:
        return coord.rows * self.tile.rows + group // self.tile.team * TILE

    def _first_token(self, coord: TileCoord, group: Int32) -> Int32:
        """Index of the first token that a warpgroup finishes."""
        tile = self.tile
        return coord.tokens * tile.tokens + group % tile.team * tile.own_tokens

    @cute.jit
    def _row(
        self, factors: ScalingOperands, result: OutputTensor, coord: TileCoord, row: Int32
    ) -> tuple[list[Float32], list[Float32]]:
        """Factors (alpha · ``UNSCALE``) and any biases of a row, one per product.

        Past the last row the values are undefined.
        """
        tile, alpha = self.tile, Array(factors.alpha, shape=(1,))
        if cutlass.const_expr(self.tile.grouped):
            scales = [alpha.load(matrix(tile, coord, w)) * UNSCALE for w in range(tile.weights)]
        elif cutlass.const_expr(self.tile.weights == 2):
            scales = [alpha.load(0) * UNSCALE, alpha.load(1) * UNSCALE]
        else:
            shard = Int32(0)
            for end in cutlass.range_constexpr(self.output.shards - 1):
                shard += Int32(row >= factors.ends[end])
            scales = [alpha.load(shard) * UNSCALE]
        biases: list[Float32] = []
        if cutlass.const_expr(bool(self.output.bias)):
            dtype, bias = TYPES[self.output.bias], Array(factors.bias, shape=(1,))
            at = cutlass.min(row, result.n - 1)
            for w in cutlass.range_constexpr(tile.weights):
                first = matrix(tile, coord, w) * result.n if tile.grouped else 0
                biases.append(dtype(bias.load(first + at)).to(Float32))
        return scales, biases

    def _value(
        self, sums: list[list[Float32]], index: int, row: tuple[list[Float32], list[Float32]]
    ) -> Float32:
        return self._finished([of_weight[index] for of_weight in sums], *row)

    def _finished(
        self, parts: list[Float32], scales: list[Float32], biases: list[Float32]
    ) -> Float32:
        values = [part * scale for part, scale in zip(parts, scales, strict=True)]
        if self.output.bias:
            values = [value + bias for value, bias in zip(values, biases, strict=True)]
        if self.tile.weights == 2:
            return activated(values, self.output.activation or SILU)
        if self.output.activation is not None:
            return activated(values, self.output.activation)
        return values[0]

    # --- barriers ------------------------------------------------------------------------------

    def _sync(self, group: Int32) -> None:
        """Barrier over the threads of one warpgroup."""
        ptx.barrier_cta_sync(BARRIER + group, thread_count=WARPGROUP)

    @cute.jit
    def finish(self) -> None:
        """Wait until TMA has read the boxes, so that shared memory may be reused."""
        if cutlass.const_expr(self.output.boxes):
            if cute.arch.thread_idx()[0] % WARPGROUP == 0:
                ptx.cp_async_bulk_wait_group(0, read=True)


def _packed(values: list[Float32], dtype: Any) -> Int32:
    """Pack two elements of a 16-bit dtype into a word, the first in the low half."""
    return Vector.from_elements(tuple(values), Float32).to(dtype).bitcast(Int32)[0]
