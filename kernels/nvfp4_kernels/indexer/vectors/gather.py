"""Kernel that copies vectors from the pages of several sequences to contiguous rows."""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import Array, Int32, Int64, Uint8
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.indexer.vectors.layout import CHUNK, THREADS, VectorLayout


class GatherArguments(NamedTuple):
    """Arguments of a launch; pointers are to global memory.

    Attributes:
        cache: bytes of the first page.
        page_stride: bytes from one page to the next.
        block_size: number of vectors per page.
        table: int32 [batch, table_stride], page numbers of each sequence.
        table_stride: entries from one sequence's row to the next.
        starts: int32 [batch + 1], output row of each sequence's first vector; the last entry is
            the number of output rows in use.
        batch: number of sequences.
        data: bytes of ``rows`` vectors, output.
        scales: bytes of the vectors' scales, output; null if the format has none.
        rows: number of output rows.
    """

    cache: cute.Pointer
    page_stride: Int64
    block_size: Int32
    table: cute.Pointer
    table_stride: Int32
    starts: cute.Pointer
    batch: Int32
    data: cute.Pointer
    scales: cute.Pointer
    rows: Int32


@dataclass(frozen=True)
class GatherVectors:
    """One compiled variant of the kernel that gathers vectors; each thread copies 16 bytes of data.

    Attributes:
        layout: layout of the vectors.
        align: alignment in bytes of the pages.
    """

    layout: VectorLayout
    align: int

    def signature(self) -> tuple[GatherArguments]:
        """Example arguments of ``__call__``, for ``cute.compile``."""
        types = {"cache": Uint8, "table": Int32, "starts": Int32, "data": Uint8, "scales": Uint8}
        alignment = {"cache": self.align, "table": 4, "starts": 4, "data": CHUNK, "scales": 4}
        return (example(GatherArguments, types, alignment),)

    @cute.jit
    def __call__(self, arguments: GatherArguments, stream: cuda_driver.CUstream) -> None:
        """Launch ``layout.copy_lanes`` threads per row."""
        self.kernel(arguments).launch(
            grid=(cute.ceil_div(arguments.rows * self.layout.copy_lanes, THREADS), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: GatherArguments) -> None:
        """Copy this thread's chunk of an output row."""
        thread = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        row, chunk = thread // self.layout.copy_lanes, thread % self.layout.copy_lanes
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        # Rows after the last sequence belong to none.
        if row < Array(arguments.starts, shape=(1,))[arguments.batch]:
            if chunk < self.layout.chunks:
                self._copy(arguments, row, chunk)

    @cute.jit
    def _copy(self, arguments: GatherArguments, row: Int32, chunk: Int32) -> None:
        """Copy chunk ``chunk`` of a row's data.

        The threads of the first ``scale_lanes`` chunks also copy an equal part of the row's scales
        each.
        """
        layout, block_size = self.layout, arguments.block_size
        sequence = self._sequence(arguments, row)
        key = row - Array(arguments.starts, shape=(1,))[sequence]
        entry = Int64(sequence) * arguments.table_stride + key // block_size
        page = Int64(Array(arguments.table, shape=(1,))[entry]) * arguments.page_stride
        at = key % block_size
        cache = Array(arguments.cache, shape=(1,))
        data = cache.load(
            page + at * layout.data_bytes + chunk * CHUNK, CHUNK, alignment=self.align
        )
        out = Int64(row) * layout.data_bytes + chunk * CHUNK
        Array(arguments.data, shape=(1,)).store(data, out, alignment=CHUNK)
        if cutlass.const_expr(layout.scale_bytes > 0):
            if chunk < layout.scale_lanes:
                size = layout.scale_bytes // layout.scale_lanes
                start = page + block_size * layout.data_bytes
                start += at * layout.scale_bytes + chunk * size
                scales = cache.load(start, size, alignment=min(size, self.align))
                out = Int64(row) * layout.scale_bytes + chunk * size
                Array(arguments.scales, shape=(1,)).store(scales, out, alignment=size)

    @cute.jit
    def _sequence(self, arguments: GatherArguments, row: Int32) -> Int32:
        """Index of the sequence that ``row`` belongs to, by bisection; never an empty sequence."""
        starts = Array(arguments.starts, shape=(1,))
        low, high = Int32(0), arguments.batch
        while high - low > 1:
            middle = (low + high) // 2
            if starts[middle] <= row:
                low = middle
            else:
                high = middle
        return low
