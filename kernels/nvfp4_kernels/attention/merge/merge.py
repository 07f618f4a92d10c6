"""Merge of segments: a thread merges 16 bytes of a row over all segments in one pass."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Int64, Uint8, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.merge.choose import VECTOR_BYTES
from nvfp4_kernels.attention.merge.tile import MergeTile
from nvfp4_kernels.device.math import LOG2_E
from nvfp4_kernels.device.nvfp4_block import amax, global_scale, quantize, scale_offset
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.sm100.limits import BLOCK, MMA_K

LN_2 = 0.6931471805599453
INFINITY = float("inf")
EMPTY = float("-inf")  # lse of a segment without keys


class MergeArguments(NamedTuple):
    """Arguments of a launch.

    Attributes:
        outs: results [segments, rows, D].
        lses: float32 [segments, rows].
        sinks: float32 [num_heads], or null.
        out: merged result [rows, D]; if quantised, bytes of codes [rows, D/2].
        lse: float32 [rows].
        segments, rows, num_heads: sizes; row r belongs to head ``r % num_heads``.
        scales: if quantised, bytes of the block scales of the next GEMM's operand, in the blocked
            layout; the operand's rows from ``first_row`` on are the tokens.
        input_scale: if quantised, float32 [], the operand's global scale.
        first_row: see ``scales``.
    """

    outs: cute.Pointer
    lses: cute.Pointer
    sinks: cute.Pointer
    out: cute.Pointer
    lse: cute.Pointer
    segments: Int32
    rows: Int32
    num_heads: Int32
    scales: cute.Pointer
    input_scale: cute.Pointer
    first_row: Int32


@dataclass(frozen=True)
class Segments:
    """Segments to merge, with a thread's part: 16 bytes of each segment.

    Attributes:
        outs, lses: results and LSEs of all segments.
        count: number of segments.
        rows: number of rows per segment.
        row: row of this thread.
        inside: whether the row exists.
        index: offset in elements of this thread's part in a segment.
        slots: shared memory for ``prefetch`` parts of every thread.
        thread, threads: index of this thread, and number of threads that share the slots.
    """

    outs: cute.Pointer
    lses: cute.Pointer
    count: Int32
    rows: Int32
    row: Int32
    inside: Boolean
    index: Int64
    slots: Array
    thread: Int32
    threads: int


@dataclass(frozen=True)
class SegmentMerge:
    """Merge and store of 16 bytes of a row by each thread.

    With cp.async, a thread copies parts of ``prefetch`` segments at a time to shared memory, and
    reads only its own copies. Segments without keys are not read.
    """

    tile: MergeTile

    @cute.jit
    def run(
        self,
        arguments: MergeArguments,
        row: Int32,
        column: Int32,
        inside: Boolean,
        slots: Array,
        thread: Int32,
        threads: cutlass.Constexpr,
    ) -> None:
        """Merge and store ``width`` columns from ``column`` on; with column 0, also store the LSE.

        Args:
            arguments: arguments of the launch.
            row: row of a token and head.
            column: first column, a multiple of ``width``.
            inside: whether the row exists; all threads of a warp must call this function.
            slots: see ``Segments``.
            thread: see ``Segments``.
            threads: see ``Segments``.
        """
        index = Int64(row) * self.tile.head_dim + column
        sink = Float32(EMPTY)
        if cutlass.const_expr(self.tile.sinks):
            sink = Array(arguments.sinks, shape=(1,)).load(row % arguments.num_heads)
        segments = Segments(
            arguments.outs, arguments.lses, arguments.segments, arguments.rows, row, inside, index,
            slots, thread, threads,
        )  # fmt: skip
        merged, lse = self._merge(segments, sink)
        result = merged.to(TYPES[self.tile.out_dtype])
        if cutlass.const_expr(self.tile.quantized):
            self._store_quantized(arguments, result.to(Float32), row, column, index, inside)
        elif inside:
            Array(arguments.out, shape=(1,)).store(result, index, alignment=self.tile.store_bytes)
        if inside and column == 0:
            Array(arguments.lse, shape=(1,)).store(lse, row)

    @cute.jit
    def _store_quantized(
        self,
        arguments: MergeArguments,
        values: Vector,
        row: Int32,
        column: Int32,
        index: Int64,
        inside: Boolean,
    ) -> None:
        """Quantise and store blocks, each by the first of the threads that share the block."""
        scale = global_scale(Array(arguments.input_scale, shape=(1,)).load(0))
        elements = list(values.to_elements())
        for distance in cutlass.range_constexpr(1, BLOCK // self.tile.width):
            elements += [
                cute.arch.shuffle_sync_down(values[n], distance) for n in range(self.tile.width)
            ]
        block = Vector.from_elements(tuple(elements), Float32)
        if inside and column % BLOCK == 0:
            quantized = quantize(block, amax(block), scale)
            codes = quantized.codes.bitcast(Uint8)
            Array(arguments.out, shape=(1,)).store(codes, index // 2, alignment=BLOCK // 2)
            heads = arguments.num_heads
            token, wide = (
                arguments.first_row + row // heads,
                row % heads * self.tile.head_dim + column,
            )
            across = heads * self.tile.head_dim // MMA_K
            place = scale_offset(token, wide // BLOCK, across)
            Array(arguments.scales, shape=(1,)).store(quantized.scale, place)

    @cute.jit
    def _merge(self, segments: Segments, sink: Float32) -> tuple[Vector, Float32]:
        """Merged vector and LSE of this thread's row.

        Segments are copied to shared memory, as copies need no registers while in flight; ptxas
        would issue only three loads to registers before a wait.
        """
        row_max = sink
        row_sum = cutlass.select_(sink == EMPTY, Float32(0.0), Float32(1.0))
        out = Vector.from_elements((0.0,) * self.tile.width, Float32)
        following = self._load_lses(segments, Int32(0))
        for first in cutlass.range(0, segments.count, self.tile.prefetch, unroll=1):
            lses = [
                cutlass.select_(following[n] == INFINITY, Float32(EMPTY), following[n])
                for n in range(self.tile.prefetch)
            ]
            # The slots have been read before the next copies overwrite them.
            ptx.bar_warp_sync(cute.arch.FULL_MASK)
            for n in cutlass.range_constexpr(self.tile.prefetch):
                self._copy_part(segments, first, n, lses[n], self._slot(segments, n))
            ptx.cp_async_commit_group()
            following = self._load_lses(segments, first + self.tile.prefetch)
            before = row_max
            for lse in lses:
                row_max = cute.arch.fmax(row_max, lse)
            # 0 if no segment had a key: −inf − (−inf) would be NaN.
            finite_max = cutlass.select_(row_max == EMPTY, Float32(0.0), row_max)
            rescale = _exp(before - finite_max)
            row_sum, out = row_sum * rescale, out * rescale
            weights = [_exp(lse - finite_max) for lse in lses]
            ptx.cp_async_wait_group(0)
            for n, weight in enumerate(weights):
                part = self._slot(segments, n).load(0, self.tile.width, alignment=VECTOR_BYTES)
                row_sum, out = row_sum + weight, out + part.to(Float32) * weight
        merged_lse = row_max + cute.math.log2(row_sum) * LN_2
        divisor = cutlass.select_(row_sum == 0.0, Float32(1.0), row_sum)
        return out * (1.0 / divisor), merged_lse

    def _slot(self, segments: Segments, n: int) -> Array:
        """This thread's 16 bytes of shared memory for the ``n``-th segment in flight."""
        return segments.slots.subview((n * segments.threads + segments.thread) * self.tile.width)

    def _load_lses(self, segments: Segments, first: Int32) -> Vector:
        """LSEs of ``prefetch`` segments from ``first`` on; −inf past the last segment."""
        # Multiples of the stride stay in registers from one iteration to the next.
        step = Int64(segments.rows)
        start = step * first + segments.row
        load = "mov.b32 {$w0}, 0fFF800000; @{$r1} ld.global.f32 {$w0}, [{$r0}];"
        lses = [
            ptx.inline_ptx(
                load,
                write_only_types=[Float32],
                read_only_args=[
                    Array(segments.lses, shape=(1,)).data_ptr(start + step * n),
                    segments.inside & (first + n < segments.count),
                ],
            )
            for n in range(self.tile.prefetch)
        ]
        return Vector.from_elements(tuple(lses), Float32)

    def _copy_part(
        self, segments: Segments, first: Int32, n: int, lse: Float32, slot: Array
    ) -> None:
        """Copy 16 bytes of segment ``first + n``; zeros, without a read, if ``lse`` is −inf."""
        step = Int64(segments.rows) * self.tile.head_dim
        source = Array(segments.outs, shape=(1,)).subview(step * first + segments.index + step * n)
        size = cutlass.select_(lse == EMPTY, Int32(0), Int32(VECTOR_BYTES))
        ptx.cp_async_shared_global(
            slot, source, VECTOR_BYTES, ptx.LoadCacheModifier.CG, cp_size=size
        )


def _exp(x: Float32) -> Float32:
    return cute.math.exp2(x * LOG2_E, approx=True, ftz=True)
