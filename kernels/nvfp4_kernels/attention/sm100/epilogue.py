"""Epilogue: normalise O, in tensor memory, by the row sums; store O and the LSE."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Int64, Uint8, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.sm100.barriers import Barriers, wait_o_full
from nvfp4_kernels.attention.sm100.math import LN_2, log2, mul_packed
from nvfp4_kernels.attention.sm100.quantized_rows import PAIR, RowQuantizer
from nvfp4_kernels.attention.sm100.rows import (
    VECTOR_BYTES,
    WarpRows,
    recomputed_lane,
    store_vector,
    swizzled_offset,
)
from nvfp4_kernels.attention.sm100.scheduler import QueryRow, WorkTile
from nvfp4_kernels.attention.sm100.softmax import SoftmaxState
from nvfp4_kernels.attention.sm100.tile import AttentionTile, Variant
from nvfp4_kernels.device.math import LOG2_E, NEGATIVE_INFINITY, exp2
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.sm100.limits import BLOCK, WARP_ROWS
from nvfp4_kernels.sm100.tensor_memory import load_columns

E2M1_BITS = 4
WIDTHS = (32, 16, 8)  # columns of O that a thread holds at a time


class AttentionResult(NamedTuple):
    """Result of a launch, and attention sinks, in global memory.

    Attributes:
        out: [rows, query heads, D]; if split-KV, float32 [splits, rows, query heads, D]; if
            quantised, bytes of codes [rows, query heads, D/2].
        lse: float32, of ``out``'s shape without D.
        sinks: float32 [query heads]; null without sinks.
        rows: number of queries of all sequences together.
        num_heads: number of query heads.
        scales: if quantised, bytes of the block scales of the next GEMM's operand, in the blocked
            layout; ``out`` holds the operand's rows from ``first_row`` on.
        input_scale: if quantised, float32 [], the operand's global scale.
        first_row: see ``scales``.
    """

    out: cute.Pointer
    lse: cute.Pointer
    sinks: cute.Pointer
    rows: Int32
    num_heads: Int32
    scales: cute.Pointer
    input_scale: cute.Pointer
    first_row: Int32


@dataclass(frozen=True)
class Epilogue:
    """Role of the softmax warps after the main loop; rows past the sequence's end are not stored.

    A thread has a row of O in tensor memory. Rows are staged in shared memory, so that neighbouring
    lanes store neighbouring bytes. A row is staged in the shared memory of its query or, if query
    warps already load the next query into this memory, part by part in separate shared memory.
    """

    tile: AttentionTile
    variant: Variant

    @property
    def _dtype(self) -> type[cutlass.Numeric]:
        return Float32 if self.variant.split else TYPES[self.variant.dtype]

    @property
    def _out_bits(self) -> int:
        """Bits per element of the result."""
        return E2M1_BITS if self.variant.stores_codes else self._dtype.width

    @property
    def _staged_dtype(self) -> type[cutlass.Numeric]:
        """Element type of rows staged in shared memory, unless quantised."""
        return self._dtype

    @property
    def _staged_bits(self) -> int:
        """Bits per element of the rows staged in shared memory."""
        return self._out_bits

    @property
    def _staged_bytes(self) -> int:
        """Bytes of an output row staged at once: as many as fit in shared memory per row."""
        tile, every = self.tile, self.tile.head_dim * self._staged_bits // 8
        if tile.stages_beside:
            return every if self.variant.stores_codes else tile.chunk_bytes
        return min(tile.row_bytes, every)

    @property
    def _staged_columns(self) -> int:
        """Number of columns of a row staged at once."""
        return self._staged_bytes * 8 // self._staged_bits

    @property
    def _quantizer(self) -> RowQuantizer:
        return RowQuantizer(self.tile, self.variant)

    def _is_stored(self, row: QueryRow, tiles: Int32) -> cutlass.Boolean:
        """Whether to store O of the row: the merge does not read O of a split without keys."""
        return row.live & (tiles > 0) if self.variant.split else row.live

    @cute.jit
    def run(
        self,
        result: AttentionResult,
        shared: Array,
        barriers: Barriers,
        lanes: Int32,
        query_tile: Int32,
        tiles: Int32,
        work: WorkTile,
        row: QueryRow,
        warp: Int32,
        state: SoftmaxState,
        v_scale: Float32,
    ) -> None:
        """Normalise and store the warp's rows of O; store the rows' LSE.

        Args:
            result: result of the launch.
            shared: shared memory in which rows are staged; the queries in it have been read.
            barriers: mbarriers of the CTA.
            lanes: address of the warp's lanes in tensor memory.
            query_tile: query tile of the warp.
            tiles: number of key tiles of the query tile.
            work: work tile of the CTA.
            row: row of the thread.
            warp: index of the warp in the query tile.
            state: row_max and row_sum of the row after the last key tile.
            v_scale: factor that dequantises V.
        """
        tile = self.tile
        head = work.kv_head * work.group + row.head
        row_index = self._row_index(result, work, row, head)
        lse, factor = self._normalise(result, state, head)
        factor = factor * v_scale
        if row.live:
            Array(result.lse, shape=(1,)).store(lse, row_index)
        units = self._row_units(row, tiles, row_index)
        if tiles > 0:
            wait_o_full(tile, barriers, query_tile, work.kv_tile(query_tile, tiles - 1))
        source = lanes + tile.o_column(query_tile)
        for first in cutlass.range_constexpr(0, tile.head_dim, self._staged_columns):
            if cutlass.const_expr(self.variant.stores_codes):
                pair = self._first_pair(result, work, row, head)
                self._stage_quantized(result, shared, warp, source, tiles, factor, pair, row.live)
            else:
                columns = self._staged_columns
                self._stage_columns(shared, warp, source + first, columns, tiles, factor)
            ptx.bar_warp_sync(cute.arch.FULL_MASK)
            self._store_rows(result, shared, units, warp, first * self._out_bits // 8)
            ptx.bar_warp_sync(cute.arch.FULL_MASK)
        # Tensor memory is freed, or overwritten, only after the last reads of it.
        ptx.tcgen05_fence(ptx.Tcgen05Fence.BEFORE_THREAD_SYNC)

    @cute.jit
    def _row_index(
        self, result: AttentionResult, work: WorkTile, row: QueryRow, head: Int32
    ) -> Int64:
        """Index of this thread's row, i.e. split, token and head, in ``out``."""
        index = Int64(work.first_query + row.token)
        if cutlass.const_expr(self.variant.split):
            index += Int64(work.split) * result.rows
        return index * result.num_heads + head

    def _row_units(self, row: QueryRow, tiles: Int32, row_index: Int64) -> Int32:
        """Start of the row in ``out``, in units of 16 bytes; negative if the row is not stored."""
        units = (row_index * (self.tile.head_dim * self._out_bits // 128)).to(Int32)
        return cutlass.select_(self._is_stored(row, tiles), units, Int32(-1))

    @cute.jit
    def _stage_columns(
        self,
        shared: Array,
        warp: Int32,
        source: Int32,
        columns: cutlass.Constexpr,
        tiles: Int32,
        factor: Float32,
    ) -> None:
        """Stage ``columns`` columns of O from ``source`` on, multiplied by ``factor``."""
        own = warp * WARP_ROWS + recomputed_lane()
        width = next(width for width in WIDTHS if columns % width == 0)
        for start in cutlass.range_constexpr(0, columns, width):
            values = [Float32(0.0)] * width
            if tiles > 0:
                values = load_columns(source + start, width)
                ptx.tcgen05_wait(ptx.Tcgen05Wait.LOAD)
            self._stage(shared, own, start, mul_packed(values, factor))

    def _stage(self, shared: Array, own: Int32, column: int, values: list[Float32]) -> None:
        """Store values of this thread's row to shared memory, 16 bytes at a time."""
        each, dtype = 128 // self._staged_bits, self._staged_dtype
        for start in range(0, len(values), each):
            part = Vector.from_elements(tuple(values[start : start + each]), Float32)
            byte = (column + start) * self._staged_bits // 8
            offset = swizzled_offset(self.tile.staging_row_bytes, own, byte)
            shared.store(part.to(dtype).bitcast(Uint8), offset, alignment=16)

    def _first_pair(
        self, result: AttentionResult, work: WorkTile, row: QueryRow, head: Int32
    ) -> Int32:
        return self._quantizer.first_pair(result.first_row, result.num_heads, work, row, head)

    @cute.jit
    def _stage_quantized(
        self,
        result: AttentionResult,
        shared: Array,
        warp: Int32,
        source: Int32,
        tiles: Int32,
        factor: Float32,
        first: Int32,
        live: cutlass.Boolean,
    ) -> None:
        """Stage a row of O · ``factor`` as NVFP4 codes; store scales from pair ``first`` on."""
        own, quantizer = warp * WARP_ROWS + recomputed_lane(), self._quantizer
        scale, bits = quantizer.scale(result.input_scale), Uint32(0)
        for start in cutlass.range_constexpr(0, self.tile.head_dim, PAIR):
            values = [Float32(0.0)] * PAIR
            if tiles > 0:
                values = load_columns(source + start, PAIR)
                ptx.tcgen05_wait(ptx.Tcgen05Wait.LOAD)
            values = mul_packed(values, factor)
            blocks = [quantizer.block(values[n : n + BLOCK], scale) for n in (0, BLOCK)]
            words = [block.codes[n] for block in blocks for n in (0, 1)]
            codes = Vector.from_elements(tuple(words), Uint32).bitcast(Uint8)
            offset = swizzled_offset(self.tile.staging_row_bytes, own, start * E2M1_BITS // 8)
            shared.store(codes, offset, alignment=16)
            pair = Uint32(blocks[0].scale) | Uint32(blocks[1].scale) << 8
            number = start // PAIR
            if cutlass.const_expr(not quantizer.whole_atoms):
                quantizer.store_scales(result.scales, first, number, pair, live)
            elif cutlass.const_expr(number % 2 == 0):
                bits = pair
            else:
                bits = bits | pair << 16
                quantizer.store_scales(result.scales, first, number - 1, bits, live)

    def _store_rows(
        self, result: AttentionResult, shared: Array, units: Int32, warp: Int32, first_byte: int
    ) -> None:
        """Store the warp's staged rows to global memory, coalesced over neighbouring lanes."""
        rows = WarpRows(self._staged_bytes, recomputed_lane())
        for iteration in range(rows.iterations):
            target = rows.from_row_owner(units, iteration)
            row = warp * WARP_ROWS + rows.row(iteration)
            for number in range(rows.vectors_per_lane):
                byte = rows.byte(number)
                offset = swizzled_offset(self.tile.staging_row_bytes, row, byte)
                vector = shared.load(offset, VECTOR_BYTES, alignment=16)
                store_vector(result.out, target, byte + first_byte, vector, target >= 0)

    @cute.jit
    def _normalise(
        self, result: AttentionResult, state: SoftmaxState, head: Int32
    ) -> tuple[Float32, Float32]:
        """LSE of a row and the factor that normalises O; the sink counts except in a split."""
        row_max, row_sum = state.row_max, state.row_sum
        rescale = Float32(1.0)
        unit = Float32(1 << self.tile.p_shift(self.variant.dtype))
        if cutlass.const_expr(self.variant.sinks and not self.variant.split):
            sink = Array(result.sinks, shape=(1,)).load(head) * LOG2_E
            new_max = cute.arch.fmax(row_max, sink)
            new_max = cutlass.select_(new_max == NEGATIVE_INFINITY, Float32(0.0), new_max)
            rescale = exp2(row_max - new_max)
            row_sum = row_sum * rescale + unit * exp2(sink - new_max)
            row_max = new_max
        empty = row_sum == 0.0
        factor = cutlass.select_(empty, Float32(0.0), rescale / row_sum)
        lse = (row_max + log2(row_sum * (1.0 / unit))) * LN_2
        return cutlass.select_(empty, Float32(NEGATIVE_INFINITY), lse), factor
