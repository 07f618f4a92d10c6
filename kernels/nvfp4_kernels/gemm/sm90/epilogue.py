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
from cutlass.experimental.cuda import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.formats.fp8_rows import GROUP
from nvfp4_kernels.formats.fragments import TILE
from nvfp4_kernels.gemm.sm90 import store_fp8
from nvfp4_kernels.gemm.sm90.exchange import Exchange
from nvfp4_kernels.gemm.sm90.scaling import RowFactors, Scaling, ScalingOperands
from nvfp4_kernels.gemm.sm90.scheduler import SchedulerState, TileCoord
from nvfp4_kernels.gemm.sm90.split_k import SplitK
from nvfp4_kernels.gemm.sm90.tile import BARRIER, PITCH, EpilogueConfig, Tile
from nvfp4_kernels.sm90.limits import WARPGROUP

SLOTS = 2


@dataclass(frozen=True)
class OutputTensor:
    """Result ``data`` [m, n], and the tensor map of its boxes."""

    data: cute.Pointer
    tensor_map: TensorMap
    m: Int32
    n: Int32


def map_of_result(
    tile: Tile, output: EpilogueConfig, out: cute.Pointer, m: Int32, n: Int32
) -> TensorMap:
    """Tensor map of the result, in boxes of 64 rows of the weight."""
    dtype, box = TYPES[output.dtype], [TILE, output.box_tokens(tile)]
    columns, swizzle = n, TensorMapSwizzle.s128b
    if output.is_fp8:
        columns, swizzle = cute.ceil_div(n, GROUP) * GROUP, TensorMapSwizzle.none
    steps = [Int64(columns * dtype.width // 128)]
    return create_tensor_map_tiled(out.toint(), dtype, [columns, m], steps, box, swizzle=swizzle)


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
        # As for the exchange: other warpgroups may still read theirs.
        elements = self.output.shared_bytes(tile) * 8 // dtype.width // tile.warpgroups
        own = scratch.subview(group * elements)
        first = self._first_row(coord, group)
        upper = first + warp * 16 + lane // 4
        scaling = Scaling(tile, self.output)
        inverse = scaling.inverse(factors, coord)
        rows = [scaling.row(factors, coord, upper + at, result.n) for at in (0, 8)]
        for start in cutlass.range_constexpr(0, tile.own_tokens, box):
            slot = own.subview(start // box % SLOTS * (box * TILE))
            if leader:
                # An odd number of boxes ends in the slot that the next tile begins with.
                turned = start == 0 and tile.own_tokens // box % SLOTS
                ptx.cp_async_bulk_wait_group(0 if turned else SLOTS - 1, read=True)
            self._sync(group)
            of_box = self._first_token(coord, group) + start
            for token in cutlass.range_constexpr(0, box, 16):
                count = min(16, tile.own_tokens - start - token)
                values = [
                    self._fragment(
                        sums, factors, result, rows, inverse, start, token + eight, of_box
                    )
                    for eight in range(0, count, 8)
                ]
                if cutlass.const_expr(self.output.is_fp8):
                    for eight in cutlass.range_constexpr(len(values)):
                        store_fp8.store_words(slot, token + 8 * eight, warp, lane, values[eight])
                else:
                    self._transpose(values, slot, token, warp, lane, dtype)
            ptx.fence_proxy(ptx.Proxy.ASYNC_SHARED, space=ptx.SharedSpace.shared_cta)
            self._sync(group)
            if leader:
                where = [first, of_box]
                ptx.cp_async_bulk_tensor_global_shared_cta(result.tensor_map.get_ptr(), slot, where)
                ptx.cp_async_bulk_commit_group()

    def _fragment(
        self,
        sums: list[list[Float32]],
        factors: ScalingOperands,
        result: OutputTensor,
        rows: list[RowFactors],
        inverse: Float32 | None,
        start: int,
        token: int,
        first_token: Int32,
    ) -> list[list[Float32]]:
        """Results of two tokens, of 8 from ``token`` on, for the upper and the lower row.

        ``start``: index of the box's first token among the warpgroup's tokens; ``token``: index in
        the box; ``first_token``: index of the box's first token in the result.
        """
        scaling = Scaling(self.tile, self.output)
        pair = first_token + token + cute.arch.lane_idx() % 4 * 2
        scales = [scaling.token(factors, pair + c, result.m) for c in range(2)]
        found = []
        for half in range(2):
            at = 4 * ((start + token) // 8) + 2 * half
            found.append(
                [
                    scaling.finished(
                        [each[at + c] for each in sums], rows[half], scales[c], inverse
                    )
                    for c in range(2)
                ]
            )
        return found

    def _transpose(
        self,
        values: list[list[list[Float32]]],
        slot: Array,
        token: int,
        warp: Int32,
        lane: Int32,
        dtype: Any,
    ) -> None:
        """Convert and transpose a warp's 16 rows × 16 (or the last 8) tokens into ``slot``.

        ``values``: of each 8 tokens, as ``_fragment`` returns them; ``slot``: [token, row];
        ``token``: index of the first token in ``slot``.
        """
        words = [_packed(of_row, dtype) for eight in values for of_row in eight]
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
        scaling = Scaling(tile, self.output)
        inverse = scaling.inverse(factors, coord)
        for start in cutlass.range_constexpr(0, tile.own_tokens, chunk):
            self._sync(group)
            self._spill(sums, own, start, thread)
            self._sync(group)
            column = self._first_row(coord, group) + row
            if column < self._columns(result):
                factors_of_row = scaling.row(factors, coord, column, result.n)
                for step in cutlass.range(chunk // 2, unroll=1):
                    token = step * 2 + thread // TILE
                    at = self._first_token(coord, group) + start + token
                    if at < result.m:
                        places = [(w * chunk + token) * PITCH + row for w in range(tile.weights)]
                        parts = [own.load(each) for each in places]
                        scale = scaling.token(factors, at, result.m)
                        value = scaling.finished(parts, factors_of_row, scale, inverse)
                        self._store(result, at, column, value)

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
        columns = self._columns(result)
        inside = column < columns
        scaling = Scaling(tile, self.output)
        inverse = scaling.inverse(factors, coord)
        factors_of_row = scaling.row(factors, coord, cutlass.min(column, columns - 1), result.n)
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
                            scale = scaling.token(factors, at, result.m)
                            value = scaling.finished(values, factors_of_row, scale, inverse)
                            self._store(result, at, column, value)

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
        data = Array(result.data, shape=(1,))
        if self.output.is_fp8:
            place = Int64(token) * self._columns(result) + store_fp8.place(column)
            data.store(store_fp8.byte(Float32(value)), place)
        else:
            dtype = TYPES[self.output.dtype]
            data.store(Float32(value).to(dtype), Int64(token) * result.n + column)

    # --- coordinates --------------------------------------------------------------------------

    def _columns(self, result: OutputTensor) -> Int32:
        """Number of columns that are stored: N, or for E4M3 all columns of whole groups."""
        return cute.ceil_div(result.n, GROUP) * GROUP if self.output.is_fp8 else result.n

    def _first_row(self, coord: TileCoord, group: Int32) -> Int32:
        return coord.rows * self.tile.rows + group // self.tile.team * TILE

    def _first_token(self, coord: TileCoord, group: Int32) -> Int32:
        """Index of the first token that a warpgroup finishes."""
        tile = self.tile
        return coord.tokens * tile.tokens + group % tile.team * tile.own_tokens

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
