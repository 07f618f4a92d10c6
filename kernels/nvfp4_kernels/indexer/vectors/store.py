"""Kernel that quantises vectors and stores them in contiguous rows or in slots of a paged cache."""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import Array, BFloat16, Boolean, Float32, Int32, Int64, Uint8
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.device.nvfp4_block import global_scale
from nvfp4_kernels.indexer.vectors.encode import Encoded, Encoder
from nvfp4_kernels.indexer.vectors.layout import LANE_ELEMENTS, THREADS, VectorLayout


class StoreArguments(NamedTuple):
    """Arguments of a launch; pointers are to global memory.

    Attributes:
        x: bfloat16 [tokens, num_heads, head_dim].
        data: bytes of the output vectors; for a cache, bytes of the first page.
        scales: bytes of the output scales; null for a cache, and in bf16.
        slots: int64 [tokens], cache slot of each token, negative to skip the token; null for
            contiguous rows.
        page_stride: bytes from one page to the next.
        block_size: number of vectors per page.
        global_scale: NVFP4's global scale, float32; else null.
        token_stride, head_stride: strides of ``x`` in elements.
        tokens, num_heads: sizes of ``x``.
    """

    x: cute.Pointer
    data: cute.Pointer
    scales: cute.Pointer
    slots: cute.Pointer
    page_stride: Int64
    block_size: Int32
    global_scale: cute.Pointer
    token_stride: Int64
    head_stride: Int64
    tokens: Int32
    num_heads: Int32


@dataclass(frozen=True)
class StoreVectors:
    """One compiled variant of the kernel that stores vectors; each thread encodes 16 elements.

    Attributes:
        layout: layout of the vectors.
        paged: whether vectors go to slots of a cache.
        native_e2m1: see ``Encoder``.
        read_align: alignment in bytes of the vectors of ``x``.
        write_align: alignment in bytes of the pages, or of contiguous output.
    """

    layout: VectorLayout
    paged: bool
    native_e2m1: bool
    read_align: int
    write_align: int

    def signature(self) -> tuple[StoreArguments]:
        """Example arguments of ``__call__``, for ``cute.compile``."""
        types = {
            "x": BFloat16, "data": Uint8, "scales": Uint8, "slots": Int64, "global_scale": Float32,
        }  # fmt: skip
        alignment = {
            "x": self.read_align, "data": self.write_align, "scales": 1, "slots": 8,
            "global_scale": 4,
        }  # fmt: skip
        return (example(StoreArguments, types, alignment),)

    @cute.jit
    def __call__(self, arguments: StoreArguments, stream: cuda_driver.CUstream) -> None:
        """Launch ``layout.quantize_lanes`` threads per vector."""
        threads = arguments.tokens * arguments.num_heads * self.layout.quantize_lanes
        self.kernel(arguments).launch(
            grid=(cute.ceil_div(threads, THREADS), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: StoreArguments) -> None:
        """Load, encode and store this thread's 16 elements."""
        layout, heads = self.layout, arguments.num_heads
        thread = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        vector, first = thread // layout.quantize_lanes, thread % layout.quantize_lanes
        first = first * LANE_ELEMENTS
        inside = (vector < arguments.tokens * heads) & (first < layout.head_dim)
        # An idle lane reads its vector's first elements, which change no maximum.
        vector = cutlass.min(vector, arguments.tokens * heads - 1)
        token, head = vector // heads, vector % heads
        start = token * arguments.token_stride + head * arguments.head_stride
        start += Int32(cutlass.select_(first < layout.head_dim, first, Int32(0)))
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        x = Array(arguments.x, shape=(1,))
        elements = x.load(start, LANE_ELEMENTS, alignment=self.read_align)
        scale = None
        if cutlass.const_expr(layout.fmt == "nvfp4"):
            scale = global_scale(Array(arguments.global_scale, shape=(1,)).load(0))
        encoded = Encoder(layout, self.native_e2m1).run(elements, scale)
        self._store(arguments, encoded, vector, first, inside)

    @cute.jit
    def _store(
        self,
        arguments: StoreArguments,
        encoded: Encoded,
        vector: Int32,
        first: Int32,
        inside: Boolean,
    ) -> None:
        """Store 16 elements of a vector, from ``first`` on, if ``inside``.

        A scale is stored by the lane with the first of the scale's elements.
        """
        layout = self.layout
        data_at = Int64(vector) * layout.data_bytes
        scale_at = Int64(vector) * layout.scale_bytes
        data, scales = Array(arguments.data, shape=(1,)), Array(arguments.scales, shape=(1,))
        if cutlass.const_expr(self.paged):
            slot = Array(arguments.slots, shape=(1,))[vector]
            inside = inside & (slot >= 0)
            page, at = slot // arguments.block_size, slot % arguments.block_size
            data_at = page * arguments.page_stride + at * layout.data_bytes
            scale_at = page * arguments.page_stride + arguments.block_size * layout.data_bytes
            scale_at += at * layout.scale_bytes
            scales = data
        if inside:
            count = encoded.data.numel()
            data_at += first * count // LANE_ELEMENTS
            data.store(encoded.data, data_at, alignment=min(count, self.write_align))
            if cutlass.const_expr(layout.scale_bytes > 0):
                size = encoded.scale.numel()
                elements = layout.head_dim // (layout.scale_bytes // size)
                if first % elements == 0:
                    scale_at += first // elements * size
                    scales.store(encoded.scale, scale_at, alignment=min(size, self.write_align))
