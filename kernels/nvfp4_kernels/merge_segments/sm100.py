"""The kernel of ``merge_segments`` on sm_100, and its launch."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass import AddressSpace, Array, Boolean, Float32, Int32, Int64, Uint8, Vector
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_layout
from nvfp4_kernels.compile import launch
from nvfp4_kernels.device.arguments import example, without_unread
from nvfp4_kernels.device.math import LOG2_E
from nvfp4_kernels.device.nvfp4_block import amax, global_scale, quantize
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import dtype_name, multiprocessors
from nvfp4_kernels.merge_segments.choose import THREADS, VECTOR_BYTES, choose_prefetch
from nvfp4_kernels.nvfp4_rows import Nvfp4Rows
from nvfp4_kernels.sm100.limits import ATOM_BYTES, ATOM_ROWS, BLOCK, MMA_K

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
        segments, rows, num_heads: sizes; row r is of head ``r % num_heads``.
        scales: bytes, blocked, of an operand whose rows from ``first_row`` on are the tokens; if
            quantised.
        input_scale: float32 [], the operand's global scale; if quantised.
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
    """Segments, and what a thread merges of them.

    Attributes:
        outs, lses: of all segments.
        count: number of segments.
        rows: of a segment.
        row: this thread's.
        inside: whether the row exists.
        index: this thread's first element in a segment.
    """

    outs: cute.Pointer
    lses: cute.Pointer
    count: Int32
    rows: Int32
    row: Int32
    inside: Boolean
    index: Int64


@dataclass(frozen=True)
class MergeSegmentsSm100:
    """Merge with a running maximum: a thread merges 16 bytes of a row.

    All threads have the same role. Each copies ``prefetch`` segments at a time to shared memory
    with cp.async and reads only what it has copied itself. Segments without keys are not read.

    Attributes:
        dtype: of the segments, e.g. ``"float32"``.
        out_dtype: of the result; if it is quantised, of what is quantised.
        head_dim: D.
        sinks: whether heads have sinks.
        prefetch: segments whose copies are in flight before a thread uses the first.
        quantized: whether the result is NVFP4.
    """

    dtype: str
    out_dtype: str
    head_dim: int
    sinks: bool
    prefetch: int
    quantized: bool = False

    @property
    def width(self) -> int:
        """Elements that a thread merges."""
        return 8 * VECTOR_BYTES // TYPES[self.dtype].width

    def signature(self) -> tuple[MergeArguments]:
        """Example of ``__call__``'s arguments."""
        scalars = ("lses", "sinks", "lse", "input_scale")
        out = Uint8 if self.quantized else TYPES[self.out_dtype]
        types = {"outs": TYPES[self.dtype], "out": out, "scales": Uint8}
        types |= dict.fromkeys(scalars, Float32)
        return (example(MergeArguments, types, dict.fromkeys(scalars, 4)),)

    @property
    def unread(self) -> tuple[str, ...]:
        """Arguments that the kernel does not read."""
        sinks = () if self.sinks else ("sinks",)
        return sinks if self.quantized else (*sinks, "scales", "input_scale", "first_row")

    @cute.jit
    def __call__(self, arguments: MergeArguments, stream: cuda_driver.CUstream) -> None:
        """Launch a thread per 16 bytes of a segment."""
        threads = Int64(arguments.rows) * (self.head_dim // self.width)
        self.kernel(without_unread(arguments, self.unread)).launch(
            grid=(cute.ceil_div(threads, THREADS).to(Int32), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: MergeArguments) -> None:
        """Merge this thread's vector of a row; the row's first thread also stores its LSE."""
        vectors = self.head_dim // self.width
        thread = Int64(cute.arch.block_idx()[0]) * THREADS + cute.arch.thread_idx()[0]
        row, index = (thread // vectors).to(Int32), thread * self.width
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        inside = row < arguments.rows
        sink = Float32(EMPTY)
        if cutlass.const_expr(self.sinks):
            sink = Array(arguments.sinks, shape=(1,)).load(row % arguments.num_heads)
        segments = Segments(
            arguments.outs,
            arguments.lses,
            arguments.segments,
            arguments.rows,
            row,
            inside,
            index,
        )
        merged, lse = self._merge(segments, sink)
        result = merged.to(TYPES[self.out_dtype])
        if cutlass.const_expr(self.quantized):
            self._store_quantized(arguments, result.to(Float32), row, index, inside)
        elif inside:
            Array(arguments.out, shape=(1,)).store(result, index, alignment=self._store_alignment)
        if inside and thread % vectors == 0:
            Array(arguments.lse, shape=(1,)).store(lse, row)

    @cute.jit
    def _store_quantized(
        self, arguments: MergeArguments, values: Vector, row: Int32, index: Int64, inside: Boolean
    ) -> None:
        """Quantise blocks, each in the first of the threads that have merged a part of it."""
        scale = global_scale(Array(arguments.input_scale, shape=(1,)).load(0))
        elements = list(values.to_elements())
        for distance in cutlass.range_constexpr(1, BLOCK // self.width):
            elements += [
                cute.arch.shuffle_sync_down(values[n], distance) for n in range(self.width)
            ]
        block = Vector.from_elements(tuple(elements), Float32)
        column = (index % self.head_dim).to(Int32)
        if inside and column % BLOCK == 0:
            quantized = quantize(block, amax(block), scale)
            codes = quantized.codes.bitcast(Uint8)
            Array(arguments.out, shape=(1,)).store(codes, index // 2, alignment=BLOCK // 2)
            heads = arguments.num_heads
            token, wide = arguments.first_row + row // heads, row % heads * self.head_dim + column
            across = heads * self.head_dim // MMA_K
            place = Int64(token // ATOM_ROWS * across + wide // MMA_K) * ATOM_BYTES
            quarter = ATOM_ROWS // 4
            place += token % quarter * 16 + token % ATOM_ROWS // quarter * 4
            place += wide % MMA_K // BLOCK
            Array(arguments.scales, shape=(1,)).store(quantized.scale, place)

    @property
    def _store_alignment(self) -> int:
        return min(VECTOR_BYTES, self.width * TYPES[self.out_dtype].width // 8)

    @cute.jit
    def _merge(self, segments: Segments, sink: Float32) -> tuple[Vector, Float32]:
        """Merged vector and LSE of this thread's row.

        Copies to shared memory need no registers while in flight; of loads to registers, ptxas
        issues three and waits.
        """
        elements = self.prefetch * THREADS * self.width
        slots = Array(TYPES[self.dtype], elements, space=AddressSpace.smem, alignment=VECTOR_BYTES)
        row_max = sink
        row_sum = cutlass.select_(sink == EMPTY, Float32(0.0), Float32(1.0))
        out = Vector.from_elements((0.0,) * self.width, Float32)
        following = self._load_lses(segments, Int32(0))
        for first in cutlass.range(0, segments.count, self.prefetch, unroll=1):
            lses = [
                cutlass.select_(following[n] == INFINITY, Float32(EMPTY), following[n])
                for n in range(self.prefetch)
            ]
            # The slots have been read before the next copies overwrite them.
            ptx.bar_warp_sync(cute.arch.FULL_MASK)
            for n in cutlass.range_constexpr(self.prefetch):
                self._copy_part(segments, first, n, lses[n], self._slot(slots, n))
            ptx.cp_async_commit_group()
            following = self._load_lses(segments, first + self.prefetch)
            before = row_max
            for lse in lses:
                row_max = cute.arch.fmax(row_max, lse)
            # Finite without any key, so that its distance to −inf is no NaN.
            finite_max = cutlass.select_(row_max == EMPTY, Float32(0.0), row_max)
            rescale = _exp(before - finite_max)
            row_sum, out = row_sum * rescale, out * rescale
            weights = [_exp(lse - finite_max) for lse in lses]
            ptx.cp_async_wait_group(0)
            for n, weight in enumerate(weights):
                part = self._slot(slots, n).load(0, self.width, alignment=VECTOR_BYTES)
                row_sum, out = row_sum + weight, out + part.to(Float32) * weight
        merged_lse = row_max + cute.math.log2(row_sum) * LN_2
        divisor = cutlass.select_(row_sum == 0.0, Float32(1.0), row_sum)
        return out * (1.0 / divisor), merged_lse

    def _slot(self, slots: Array, segment: int) -> Array:
        """This thread's 16 bytes of a segment in shared memory."""
        return slots.subview((segment * THREADS + cute.arch.thread_idx()[0]) * self.width)

    def _load_lses(self, segments: Segments, first: Int32) -> Vector:
        """LSEs of ``prefetch`` segments from ``first`` on; −inf past the last."""
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
            for n in range(self.prefetch)
        ]
        return Vector.from_elements(tuple(lses), Float32)

    def _copy_part(
        self, segments: Segments, first: Int32, n: int, lse: Float32, slot: Array
    ) -> None:
        """Copy 16 bytes of a segment; zeros, without reading, if it has no keys."""
        step = Int64(segments.rows) * self.head_dim
        source = Array(segments.outs, shape=(1,)).subview(step * first + segments.index + step * n)
        size = cutlass.select_(lse == EMPTY, Int32(0), Int32(VECTOR_BYTES))
        ptx.cp_async_shared_global(
            slot, source, VECTOR_BYTES, ptx.LoadCacheModifier.CG, cp_size=size
        )


def _exp(x: Float32) -> Float32:
    return cute.math.exp2(x * LOG2_E, approx=True, ftz=True)


def merge_segments(
    outs: Tensor,
    lses: Tensor,
    sinks: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | Nvfp4Rows | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.merge_segments.op.merge_segments``; writes to ``out`` if it is given.

    As NVFP4, ``(..., D)`` is tokens, heads and D, and ``out_dtype`` what is quantised.

    Raises:
        InvalidArgument: a tensor that is not contiguous or misaligned, or D elements that are no
            multiple of 16 bytes.
    """
    segments, *_, head_dim = outs.shape
    for name, x in (("outs", outs), ("lses", lses), ("sinks", sinks)):
        check_layout(name, x)
    if head_dim * outs.element_size() % VECTOR_BYTES:
        raise InvalidArgument(
            f"outs: D is {head_dim}, must be a multiple of {VECTOR_BYTES // outs.element_size()}, "
            f"{VECTOR_BYTES} bytes; pad it with zeros"
        )
    out = outs.new_empty(outs.shape[1:], dtype=out_dtype) if out is None else out
    nvfp4, data = (out, out.data) if isinstance(out, Nvfp4Rows) else (None, out)
    lse = lses.new_empty(lses.shape[1:])
    if lse.numel():
        rows = lse.numel()
        sms = multiprocessors(outs.device)
        prefetch = choose_prefetch(segments, rows, head_dim * outs.element_size(), sms)
        dtypes = dtype_name(outs.dtype), dtype_name(out_dtype)
        fields = head_dim, sinks is not None, prefetch, nvfp4 is not None
        kernel = MergeSegmentsSm100(*dtypes, *fields)
        arguments = MergeArguments(
            outs=outs,
            lses=lses,
            sinks=sinks,
            out=data,
            lse=lse,
            segments=segments,
            rows=rows,
            num_heads=lse.shape[-1] if lse.ndim > 1 else 1,
            **scale_arguments(nvfp4),
        )
        launch(kernel, arguments)
    return data, lse


def scale_arguments(rows: Nvfp4Rows | None) -> dict[str, Any]:
    """Arguments of a launch that say where the scales of its result belong."""
    if rows is None:
        return {"scales": None, "input_scale": None, "first_row": 0}
    return {
        "scales": rows.scales,
        "input_scale": rows.global_scale,
        "first_row": rows.first_row,
    }
