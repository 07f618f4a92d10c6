"""Quantising vectors, to rows side by side or to the slots of a paged cache."""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import Array, BFloat16, Boolean, Float32, Int32, Int64, Uint8
from cutlass.cute.runtime import make_ptr
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.nvfp4_block import global_scale
from nvfp4_kernels.indexer.vectors.encode import Encoded, Encoder
from nvfp4_kernels.indexer.vectors.layout import ELEMENTS, THREADS, VectorLayout


@dataclass(frozen=True)
class Target:
    """Where vectors go.

    Attributes:
        data: bytes; of pages their first.
        scales: bytes; of pages null.
        slots: int64, of pages: the slot of each vector, negative to skip it; else null.
        page_stride: bytes.
        block_size: vectors of a page.
    """

    data: cute.Pointer
    scales: cute.Pointer
    slots: cute.Pointer
    page_stride: Int64
    block_size: Int32


@dataclass(frozen=True)
class StoreVectors:
    """One compiled variant.

    Attributes:
        layout: of the vectors.
        paged: whether they go to slots of a cache.
        native: as of ``Encoder``.
        read_align, write_align: bytes that vectors, and pages, start on multiples of.
    """

    layout: VectorLayout
    paged: bool
    native: bool
    read_align: int
    write_align: int

    def signature(self) -> tuple[Any, ...]:
        def pointer(dtype: type[cutlass.Numeric], align: int) -> Any:
            return make_ptr(dtype, align, cute.AddressSpace.gmem, assumed_align=align)

        return (
            pointer(BFloat16, self.read_align), pointer(Uint8, self.write_align),
            pointer(Uint8, 1), pointer(Int64, 8), pointer(Float32, 4),
            Int64(0), Int64(0), Int64(0), Int32(0), Int32(0), Int32(0),
        )  # fmt: skip

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        data: cute.Pointer,
        scales: cute.Pointer,
        slots: cute.Pointer,
        scale: cute.Pointer,
        token_stride: Int64,
        head_stride: Int64,
        page_stride: Int64,
        tokens: Int32,
        heads: Int32,
        block_size: Int32,
        stream: cuda_driver.CUstream,
    ) -> None:
        """``x``: [tokens, heads, D], strides in elements; ``scale``: NVFP4's global one."""
        target = Target(data, scales, slots, page_stride, block_size)
        threads = tokens * heads * self.layout.quantisers
        self.kernel(x, target, scale, token_stride, head_stride, tokens, heads).launch(
            grid=(cute.ceil_div(threads, THREADS), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,
        target: Target,
        scale: cute.Pointer,
        token_stride: Int64,
        head_stride: Int64,
        tokens: Int32,
        heads: Int32,
    ) -> None:
        layout = self.layout
        thread = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        vector, first = thread // layout.quantisers, thread % layout.quantisers * ELEMENTS
        inside = (vector < tokens * heads) & (first < layout.head_dim)
        # An idle lane reads its vector's first elements, which change no maximum.
        vector = cutlass.min(vector, tokens * heads - 1)
        token, head = vector // heads, vector % heads
        start = token * token_stride + head * head_stride
        start += Int32(cutlass.select_(first < layout.head_dim, first, Int32(0)))
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        elements = Array(x, shape=(1,)).load(start, ELEMENTS, alignment=self.read_align)
        factor = None
        if cutlass.const_expr(layout.name == "nvfp4"):
            factor = global_scale(Array(scale, shape=(1,)).load(0))
        encoded = Encoder(layout, self.native).run(elements, factor)
        self._store(target, encoded, vector, first, inside)

    @cute.jit
    def _store(
        self, target: Target, encoded: Encoded, vector: Int32, first: Int32, inside: Boolean
    ) -> None:
        layout = self.layout
        data_at = Int64(vector) * layout.data_bytes
        scale_at = Int64(vector) * layout.scale_bytes
        data, scales = Array(target.data, shape=(1,)), Array(target.scales, shape=(1,))
        if cutlass.const_expr(self.paged):
            slot = Array(target.slots, shape=(1,))[vector]
            inside = inside & (slot >= 0)
            page, at = slot // target.block_size, slot % target.block_size
            data_at = page * target.page_stride + at * layout.data_bytes
            scale_at = page * target.page_stride + target.block_size * layout.data_bytes
            scale_at += at * layout.scale_bytes
            scales = data
        if inside:
            count = encoded.data.numel()
            data_at += first * count // ELEMENTS
            data.store(encoded.data, data_at, alignment=min(count, self.write_align))
            if cutlass.const_expr(layout.scale_bytes > 0):
                size = encoded.scale.numel()
                elements = layout.head_dim // (layout.scale_bytes // size)
                if first % elements == 0:
                    scale_at += first // elements * size
                    scales.store(encoded.scale, scale_at, alignment=min(size, self.write_align))
