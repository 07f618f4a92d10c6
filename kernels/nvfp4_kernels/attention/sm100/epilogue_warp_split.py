"""Epilogue where four warps split the keys of a row: their partial results are combined."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Uint8, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.sm100.barriers import Barriers, wait_o_full
from nvfp4_kernels.attention.sm100.epilogue import WIDTHS, AttentionResult, Epilogue
from nvfp4_kernels.attention.sm100.math import mul_packed
from nvfp4_kernels.attention.sm100.quantized_rows import store_codes
from nvfp4_kernels.attention.sm100.rows import (
    VECTOR_BYTES,
    recomputed_lane,
    store_vector,
    swizzled_offset,
)
from nvfp4_kernels.attention.sm100.scheduler import QueryRow, WorkTile
from nvfp4_kernels.attention.sm100.softmax import SoftmaxState
from nvfp4_kernels.attention.sm100.tile import WARPS
from nvfp4_kernels.device.math import exp2, finite
from nvfp4_kernels.sm100.limits import BLOCK, WARP_ROWS
from nvfp4_kernels.sm100.tensor_memory import load_columns

SYNC_BARRIER = 1  # named barrier of the softmax warps
THREADS = WARPS * WARP_ROWS
STATE_BYTES = 8  # of a row's ``SoftmaxState`` in shared memory
OUT_COLUMNS = 8  # columns that a thread adds up and stores at a time


@dataclass(frozen=True)
class Staged:
    """Partial sums of all warps in shared memory.

    Attributes:
        shared: shared memory of the queries, reused.
        rows: number of rows per warp.
        columns: number of float32 columns per row.
    """

    shared: Array
    rows: int
    columns: int


@dataclass(frozen=True)
class WarpSplitEpilogue(Epilogue):
    """Epilogue where warps split the keys: each warp's O is a sum over a quarter of the keys.

    Partial sums are staged in shared memory as float32, as many columns at a time as fit in the
    memory of the queries, and are added up in the order of the warps. With few rows, as in most
    decodes, all columns fit at once: a row continues in the memory of absent rows.
    """

    @property
    def _few_rows(self) -> int:
        """Maximum number of rows per warp for which all columns fit at once."""
        return WARP_ROWS * self._staged_columns // self.tile.head_dim

    @property
    def _columns_at_once(self) -> int:
        """Number of columns per row staged at once; with NVFP4, whole blocks if a block fits."""
        room = self._staged_columns
        return room - room % BLOCK if self.variant.stores_codes and room > BLOCK else room

    @property
    def _staged_dtype(self) -> type[cutlass.Numeric]:
        return Float32

    @property
    def _staged_bits(self) -> int:
        return Float32.width

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
        """See ``Epilogue.run``."""
        tile = self.tile
        head = work.kv_head * work.group + row.head
        row_index = self._row_index(result, work, row, head)
        combined, rescale = self._combine(shared, state, warp)
        lse, factor = self._normalise(result, combined, head)
        factor = factor * rescale * v_scale
        if row.live and warp == 0:
            Array(result.lse, shape=(1,)).store(lse, row_index)
        units = self._row_units(row, tiles, row_index)
        if tiles > 0:
            wait_o_full(tile, barriers, query_tile, work.kv_tile(query_tile, tiles - 1))
        source = lanes + tile.o_column(query_tile)
        pair = Int32(0)
        if cutlass.const_expr(self.variant.stores_codes):
            pair = self._first_pair(result, work, row, head)
        if work.rows - work.first_row <= self._few_rows:
            self._sync()  # earlier contents have been read
            self._stage_few(shared, warp, source, tiles, factor)
            self._sync()
            staged = Staged(shared, self._few_rows, tile.head_dim)
            self._store(result, staged, units, pair, warp, 0, [])
        else:
            self._store_by_columns(result, shared, units, pair, warp, source, tiles, factor)
        # Tensor memory is freed only after the last reads of it.
        ptx.tcgen05_fence(ptx.Tcgen05Fence.BEFORE_THREAD_SYNC)

    @cute.jit
    def _store_by_columns(
        self,
        result: AttentionResult,
        shared: Array,
        units: Int32,
        pair: Int32,
        warp: Int32,
        source: Int32,
        tiles: Int32,
        factor: Float32,
    ) -> None:
        """Stage and store all rows, as many columns at a time as fit in shared memory."""
        waiting: list[Float32] = []
        every, most = self.tile.head_dim, self._columns_at_once
        for first in cutlass.range_constexpr(0, every, most):
            staged = Staged(shared, WARP_ROWS, min(most, every - first))
            self._sync()  # earlier contents have been read
            self._stage_columns(shared, warp, source + first, staged.columns, tiles, factor)
            self._sync()
            waiting = self._store(result, staged, units, pair, warp, first, waiting)

    @cute.jit
    def _stage_few(
        self, shared: Array, warp: Int32, source: Int32, tiles: Int32, factor: Float32
    ) -> None:
        """Stage all columns of the first ``_few_rows`` rows, multiplied by ``factor``."""
        rows, columns, lane = self._few_rows, self._staged_columns, recomputed_lane()
        width = next(width for width in WIDTHS if columns % width == 0)
        for start in cutlass.range_constexpr(0, self.tile.head_dim, width):
            values = [Float32(0.0)] * width
            if tiles > 0:
                values = load_columns(source + start, width)
                ptx.tcgen05_wait(ptx.Tcgen05Wait.LOAD)
            if lane < rows:
                place = warp * WARP_ROWS + start // columns * rows + lane
                self._stage(shared, place, start % columns, mul_packed(values, factor))

    def _store(
        self,
        result: AttentionResult,
        staged: Staged,
        units: Int32,
        pair: Int32,
        warp: Int32,
        first: int,
        waiting: list[Float32],
    ) -> list[Float32]:
        """Add up staged columns over the warps; store sums to the result, from column ``first`` on.

        ``waiting`` and the returned list: see ``_store_quantized``.
        """
        if self.variant.stores_codes:
            return self._store_quantized(result, staged, units, pair, warp, first, waiting)
        self._store_combined(result, staged, units, warp, first)
        return []

    def _sync(self) -> None:
        """Barrier over the softmax warps."""
        ptx.barrier_cta_sync(SYNC_BARRIER, thread_count=THREADS)

    def _combine(
        self, shared: Array, state: SoftmaxState, warp: Int32
    ) -> tuple[SoftmaxState, Float32]:
        """Combined state of a row over all four warps, and the factor that rescales this warp's O.

        If the row sees no key of a warp's quarters, that warp has row_sum 0 and row_max −∞.
        """
        lane = cute.arch.lane_idx()
        self._sync()
        own = Vector.from_elements((state.row_max, state.row_sum), Float32).bitcast(Uint8)
        shared.store(own, (warp * WARP_ROWS + lane) * STATE_BYTES, alignment=STATE_BYTES)
        self._sync()
        parts = [self._load_state(shared, other * WARP_ROWS + lane) for other in range(WARPS)]
        row_max = parts[0].row_max
        for part in parts[1:]:
            row_max = cute.arch.fmax(row_max, part.row_max)
        row_sum = Float32(0.0)
        for part in parts:
            row_sum = row_sum + part.row_sum * exp2(part.row_max - finite(row_max))
        return SoftmaxState(row_max, row_sum), exp2(state.row_max - finite(row_max))

    def _load_state(self, shared: Array, index: Int32) -> SoftmaxState:
        data = shared.load(index * STATE_BYTES, STATE_BYTES, alignment=STATE_BYTES)
        state = data.bitcast(Float32)
        return SoftmaxState(state[0], state[1])

    def _store_combined(
        self, result: AttentionResult, staged: Staged, units: Int32, warp: Int32, first: int
    ) -> None:
        """Add up staged columns of all rows over the warps; store 16-bit or float32 sums."""
        rows, items = staged.rows, staged.columns // OUT_COLUMNS
        thread = warp * WARP_ROWS + recomputed_lane()
        for begin in range(0, rows * items, THREADS):
            number = begin + thread
            row, column = number // items % rows, number % items * OUT_COLUMNS
            target = cute.arch.shuffle_sync(units, row)
            live = (target >= 0) & (number < rows * items)
            values = self._sum_warps(staged, row, column, OUT_COLUMNS)
            width = VECTOR_BYTES * 8 // self._dtype.width
            for start in range(0, OUT_COLUMNS, width):
                elements = tuple(values[start : start + width])
                vector = Vector.from_elements(elements, Float32).to(self._dtype).bitcast(Uint8)
                byte = (first + column + start) * (self._dtype.width // 8)
                store_vector(result.out, target, byte, vector, live)

    def _store_quantized(
        self,
        result: AttentionResult,
        staged: Staged,
        units: Int32,
        pair: Int32,
        warp: Int32,
        first: int,
        waiting: list[Float32],
    ) -> list[Float32]:
        """Add up, quantise and store all rows' columns from ``first`` on, a thread per block.

        If less than a block is staged at once, ``waiting`` holds the thread's sums of the block's
        earlier columns; the updated list is returned.
        """
        rows, columns = staged.rows, min(staged.columns, BLOCK)
        assert staged.columns % columns == 0
        blocks = staged.columns // columns  # of a row
        scale = self._quantizer.scale(result.input_scale)
        thread = warp * WARP_ROWS + recomputed_lane()
        for begin in range(0, rows * blocks, THREADS):
            number = begin + thread
            row, block = number // blocks % rows, number % blocks
            target = cute.arch.shuffle_sync(units, row)
            scales = cute.arch.shuffle_sync(pair, row)
            live = (target >= 0) & (number < rows * blocks)
            values = [*waiting, *self._sum_warps(staged, row, block * columns, columns)]
            if len(values) < BLOCK:
                assert rows * blocks <= THREADS
                return values
            quantized = self._quantizer.block(values, scale)
            block = block + first // BLOCK
            store_codes(result.out, target, block, quantized.codes, live)
            self._quantizer.store_scale(result.scales, scales, block, quantized.scale, live)
        return []

    def _sum_warps(self, staged: Staged, row: Int32, column: Int32, columns: int) -> list[Float32]:
        """Sum ``columns`` columns of a row, starting at ``column``, over the four warps."""
        loaded = [  # all before the first is used
            [
                staged.shared.load(self._place(staged, warp, row, byte), VECTOR_BYTES, alignment=16)
                for byte in (column * 4 + start for start in range(0, columns * 4, VECTOR_BYTES))
            ]
            for warp in range(WARPS)
        ]
        sums: list[Float32] = [Float32(0.0)] * columns
        for vectors in loaded:
            part = [x for each in vectors for x in each.bitcast(Float32).to_elements()]
            sums = [a + b for a, b in zip(sums, part, strict=True)]
        return sums

    def _place(self, staged: Staged, warp: int, row: Int32, byte: Int32) -> Int32:
        """Offset of ``byte`` in a warp's staged row; long rows continue in absent rows' memory."""
        width, own = self.tile.row_bytes, warp * WARP_ROWS + row
        if staged.columns > self._staged_columns:
            own, byte = own + byte // width * staged.rows, byte % width
        return swizzled_offset(width, own, byte)
