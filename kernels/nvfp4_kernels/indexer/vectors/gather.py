"""Copying vectors from the pages of several sequences to rows side by side."""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import Array, Int32, Int64, Uint8
from cutlass.cute.runtime import make_ptr
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.indexer.vectors.layout import PIECE, THREADS, VectorLayout


@dataclass(frozen=True)
class Pages:
    """A cache, and whose its pages are.

    Attributes:
        cache: bytes.
        stride: of pages, in bytes.
        block_size: vectors of a page.
        table: int32 [batch, table_stride], pages of each sequence.
        starts: int32 [batch + 1], the row of each sequence's first vector, and the end.
    """

    cache: cute.Pointer
    stride: Int64
    block_size: Int32
    table: cute.Pointer
    table_stride: Int32
    starts: cute.Pointer
    batch: Int32


@dataclass(frozen=True)
class GatherVectors:
    """One compiled variant.

    Attributes:
        layout: of the vectors.
        align: bytes that pages start on multiples of.
    """

    layout: VectorLayout
    align: int

    def signature(self) -> tuple[Any, ...]:
        def pointer(dtype: type[cutlass.Numeric], align: int) -> Any:
            return make_ptr(dtype, align, cute.AddressSpace.gmem, assumed_align=align)

        return (
            pointer(Uint8, self.align), pointer(Int32, 4), pointer(Int32, 4), pointer(Uint8, 16),
            pointer(Uint8, 4), Int64(0), *[Int32(0)] * 4,
        )  # fmt: skip

    @cute.jit
    def __call__(
        self,
        cache: cute.Pointer,
        table: cute.Pointer,
        starts: cute.Pointer,
        data: cute.Pointer,
        scales: cute.Pointer,
        page_stride: Int64,
        block_size: Int32,
        table_stride: Int32,
        batch: Int32,
        rows: Int32,
        stream: cuda_driver.CUstream,
    ) -> None:
        """To ``data`` and ``scales`` of ``rows`` vectors; see ``Pages``."""
        pages = Pages(cache, page_stride, block_size, table, table_stride, starts, batch)
        self.kernel(pages, data, scales).launch(
            grid=(cute.ceil_div(rows * self.layout.copiers, THREADS), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, pages: Pages, data: cute.Pointer, scales: cute.Pointer) -> None:
        thread = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        row, piece = thread // self.layout.copiers, thread % self.layout.copiers
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        # The rows after the last sequence are nobody's.
        if row < Array(pages.starts, shape=(1,))[pages.batch]:
            if piece < self.layout.pieces:
                self._copy(pages, data, scales, row, piece)

    @cute.jit
    def _copy(
        self, pages: Pages, data: cute.Pointer, scales: cute.Pointer, row: Int32, piece: Int32
    ) -> None:
        layout = self.layout
        sequence = self._sequence(pages, row)
        key = row - Array(pages.starts, shape=(1,))[sequence]
        entry = Int64(sequence) * pages.table_stride + key // pages.block_size
        page = Int64(Array(pages.table, shape=(1,))[entry]) * pages.stride
        at = key % pages.block_size
        cache = Array(pages.cache, shape=(1,))
        found = cache.load(
            page + at * layout.data_bytes + piece * PIECE, PIECE, alignment=self.align
        )
        out = Int64(row) * layout.data_bytes + piece * PIECE
        Array(data, shape=(1,)).store(found, out, alignment=PIECE)
        if cutlass.const_expr(layout.scale_bytes > 0):
            if piece < layout.scale_lanes:
                size = layout.scale_bytes // layout.scale_lanes
                start = page + pages.block_size * layout.data_bytes
                start += at * layout.scale_bytes + piece * size
                some = cache.load(start, size, alignment=min(size, self.align))
                out = Int64(row) * layout.scale_bytes + piece * size
                Array(scales, shape=(1,)).store(some, out, alignment=size)

    @cute.jit
    def _sequence(self, pages: Pages, row: Int32) -> Int32:
        """The last one that starts at ``row`` or before: those without vectors are passed over."""
        starts = Array(pages.starts, shape=(1,))
        low, beyond = Int32(0), pages.batch
        while beyond - low > 1:
            middle = (low + beyond) // 2
            if starts[middle] <= row:
                low = middle
            else:
                beyond = middle
        return low
