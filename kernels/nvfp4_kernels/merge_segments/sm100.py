"""``merge_segments`` on sm_100: every byte of a segment that has keys is read once, no other."""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass import AddressSpace, Array, Boolean, Float32, Int32, Int64, Vector
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_layout
from nvfp4_kernels.compile import launch
from nvfp4_kernels.device.math import LOG2_E
from nvfp4_kernels.device.rowwise.operands import dtype_name
from nvfp4_kernels.device.rowwise.place import pointer
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.merge_segments.choose import LOAD, THREADS, choose_ahead

LN_2 = 0.6931471805599453
INFINITY = float("inf")
EMPTY = float("-inf")  # lse of a segment without keys


@dataclass(frozen=True)
class Segments:
    """What is merged.

    Attributes:
        outs, lses: of all segments.
        count: how many segments.
        rows: of a segment.
        row: this thread's.
        inside: whether there is that row.
        index: of this thread's first element in a segment.
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
    """One configuration. A thread merges 16 bytes of a row, ``ahead`` segments at a time.

    Attributes:
        dtype: of the segments, e.g. ``"float32"``.
        out_dtype: of the result.
        head_dim: D.
        sinks: whether there are any.
        ahead: segments whose bytes are all on their way before a thread uses any.
    """

    dtype: str
    out_dtype: str
    head_dim: int
    sinks: bool
    ahead: int

    @property
    def width(self) -> int:
        """Elements that a thread merges."""
        return 8 * LOAD // TYPES[self.dtype].width

    def signature(self) -> tuple[Any, ...]:
        rows, out = pointer(TYPES[self.dtype], LOAD), pointer(TYPES[self.out_dtype], LOAD)
        word = pointer(Float32, 4)
        return (rows, word, word, out, word, Int32(0), Int32(0), Int32(0))

    @cute.jit
    def __call__(
        self,
        outs: cute.Pointer,
        lses: cute.Pointer,
        sinks: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        segments: Int32,
        rows: Int32,
        heads: Int32,
        stream: cuda_driver.CUstream,
    ) -> None:
        """``outs`` [segments, rows, D]; row r is of head ``r % heads``."""
        threads = Int64(rows) * (self.head_dim // self.width)
        self.kernel(outs, lses, sinks, out, lse, segments, rows, heads).launch(
            grid=(cute.ceil_div(threads, THREADS).to(Int32), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        outs: cute.Pointer,
        lses: cute.Pointer,
        sinks: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        segments: Int32,
        rows: Int32,
        heads: Int32,
    ) -> None:
        pieces = self.head_dim // self.width
        thread = Int64(cute.arch.block_idx()[0]) * THREADS + cute.arch.thread_idx()[0]
        row, index = (thread // pieces).to(Int32), thread * self.width
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        inside = row < rows
        sink = Float32(EMPTY)
        if cutlass.const_expr(self.sinks):
            sink = Array(sinks, shape=(1,)).load(row % heads)
        merged, found = self._merge(Segments(outs, lses, segments, rows, row, inside, index), sink)
        if inside:
            Array(out, shape=(1,)).store(
                merged.to(TYPES[self.out_dtype]), index, alignment=self._store_alignment
            )
            if thread % pieces == 0:
                Array(lse, shape=(1,)).store(found, row)

    @property
    def _store_alignment(self) -> int:
        return min(LOAD, self.width * TYPES[self.out_dtype].width // 8)

    @cute.jit
    def _merge(self, segments: Segments, sink: Float32) -> tuple[Vector, Float32]:
        """The result, and the logarithm of the sum; logarithms are natural.

        Copies to shared memory are in flight without a register each: of loads to registers, ptxas
        starts three and waits. A thread reads what it has copied itself.
        """
        elements = self.ahead * THREADS * self.width
        slots = Array(TYPES[self.dtype], elements, space=AddressSpace.smem, alignment=LOAD)
        largest = sink
        total = cutlass.select_(sink == EMPTY, Float32(0.0), Float32(1.0))
        sums = Vector.from_elements((0.0,) * self.width, Float32)
        coming = self._load_logs(segments, Int32(0))
        for first in cutlass.range(0, segments.count, self.ahead, unroll=1):
            logs = [
                cutlass.select_(coming[n] == INFINITY, Float32(EMPTY), coming[n])
                for n in range(self.ahead)
            ]
            # Of a slot, what was read before the next copy may come.
            ptx.bar_warp_sync(cute.arch.FULL_MASK)
            for n in cutlass.range_constexpr(self.ahead):
                self._copy_part(segments, first, n, logs[n], self._slot(slots, n))
            ptx.cp_async_commit_group()
            coming = self._load_logs(segments, first + self.ahead)
            before = largest
            for log in logs:
                largest = cute.arch.fmax(largest, log)
            # Without any key: finite, so that its distance to −inf is no NaN.
            top = cutlass.select_(largest == EMPTY, Float32(0.0), largest)
            rescale = _exp(before - top)
            total, sums = total * rescale, sums * rescale
            weights = [_exp(log - top) for log in logs]
            ptx.cp_async_wait_group(0)
            for n, weight in enumerate(weights):
                part = self._slot(slots, n).load(0, self.width, alignment=LOAD)
                total, sums = total + weight, sums + part.to(Float32) * weight
        found = largest + cute.math.log2(total) * LN_2
        return sums * (1.0 / cutlass.select_(total == 0.0, Float32(1.0), total)), found

    def _slot(self, slots: Array, segment: int) -> Array:
        """This thread's 16 bytes of a segment; threads side by side."""
        return slots.subview((segment * THREADS + cute.arch.thread_idx()[0]) * self.width)

    def _load_logs(self, segments: Segments, first: Int32) -> Vector:
        """Of ``ahead`` segments; −inf where there is none."""
        # Strides times a constant stay in registers from one round to the next.
        step = Int64(segments.rows)
        start = step * first + segments.row
        load = "mov.b32 {$w0}, 0fFF800000; @{$r1} ld.global.f32 {$w0}, [{$r0}];"
        logs = [
            ptx.inline_ptx(
                load,
                write_only_types=[Float32],
                read_only_args=[
                    Array(segments.lses, shape=(1,)).data_ptr(start + step * n),
                    segments.inside & (first + n < segments.count),
                ],
            )
            for n in range(self.ahead)
        ]
        return Vector.from_elements(tuple(logs), Float32)

    def _copy_part(
        self, segments: Segments, first: Int32, n: int, log: Float32, slot: Array
    ) -> None:
        """16 bytes; zeros if the segment has no keys, whatever lies there."""
        step = Int64(segments.rows) * self.head_dim
        source = Array(segments.outs, shape=(1,)).subview(step * first + segments.index + step * n)
        size = cutlass.select_(log == EMPTY, Int32(0), Int32(LOAD))
        ptx.cp_async_shared_global(slot, source, LOAD, ptx.LoadCacheModifier.CG, cp_size=size)


def _exp(x: Float32) -> Float32:
    return cute.math.exp2(x * LOG2_E, approx=True, ftz=True)


def merge_segments(
    outs: Tensor,
    lses: Tensor,
    sinks: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.merge_segments.op.merge_segments``; the result goes to ``out``."""
    segments, *_, head_dim = outs.shape
    for name, x in (("outs", outs), ("lses", lses), ("sinks", sinks)):
        check_layout(name, x)
    if head_dim * outs.element_size() % LOAD:
        raise InvalidArgument(
            f"outs: D is {head_dim}, must be a multiple of {LOAD // outs.element_size()}, "
            f"{LOAD} bytes; pad it with zeros"
        )
    out = outs.new_empty(outs.shape[1:], dtype=out_dtype) if out is None else out
    lse = lses.new_empty(lses.shape[1:])
    if lse.numel():
        rows, heads = lse.numel(), 1 if sinks is None else len(sinks)
        ahead = choose_ahead(segments, rows, head_dim * outs.element_size())
        dtypes = dtype_name(outs), dtype_name(out)
        kernel = MergeSegmentsSm100(*dtypes, head_dim, sinks is not None, ahead)
        launch(kernel, outs, lses, sinks, out, lse, segments, rows, heads)
    return out, lse
