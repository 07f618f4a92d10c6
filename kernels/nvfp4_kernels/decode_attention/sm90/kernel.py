"""Decode attention of sm_90: one token of each sequence, its store, splits and their merge at once.

    page of a step  --full-->  Q·Kᵀ, softmax, Vᵀ·Pᵀ  -->  merge over the cluster

Each warp has all of this to itself up to the merge, so that nobody waits for anybody else.
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda_driver
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Float32, GridConstant, Int32, Int64
from cutlass.cute.runtime import make_ptr
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap

from nvfp4_kernels.decode_attention.sm90.loader import Cache, Loader, Ring, Strides, cache_map
from nvfp4_kernels.decode_attention.sm90.mainloop import Decoder, Logits
from nvfp4_kernels.decode_attention.sm90.merge import Merge, Result
from nvfp4_kernels.decode_attention.sm90.scheduler import work_of
from nvfp4_kernels.decode_attention.sm90.tile import THREADS, WARPS, DecodeTile, Variant
from nvfp4_kernels.decode_attention.sm90.token import Rows, Token
from nvfp4_kernels.device.types import TYPES


@dataclass(frozen=True)
class DecodeAttentionSm90:
    """One compiled variant."""

    tile: DecodeTile
    variant: Variant

    def signature(self) -> tuple[Any, ...]:
        """Arguments of ``__call__``, see there."""
        dtype = TYPES[self.variant.dtype]
        types = [*[dtype] * 5, Float32, Int32, Int32, Int64]
        aligned = [*[16] * 5, 4, 4, 4, 8]
        pointers = [
            make_ptr(t, 16, cute.AddressSpace.gmem, assumed_align=a)
            for t, a in zip(types, aligned, strict=True)
        ]
        return (*pointers, *[Int64(0)] * 10, *[Float32(0.0)] * 2, *[Int32(0)] * 4)

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        key: cute.Pointer,
        value: cute.Pointer,
        kv_cache: cute.Pointer,
        out: cute.Pointer,
        sinks: cute.Pointer,
        block_table: cute.Pointer,
        seq_lens: cute.Pointer,
        slot_mapping: cute.Pointer,
        q_token: Int64,
        q_head: Int64,
        key_token: Int64,
        key_head: Int64,
        value_token: Int64,
        value_head: Int64,
        cache_row: Int64,
        cache_head: Int64,
        cache_page: Int64,
        table_stride: Int64,
        scale: Float32,
        soft_cap: Float32,
        batch: Int32,
        kv_heads: Int32,
        pages: Int32,
        window: Int32,
        stream: cuda_driver.CUstream,
    ) -> None:
        """Strides count elements; ``sinks`` is null, ``soft_cap`` and ``window`` 0 without one."""
        tile, variant = self.tile, self.variant
        strides = Strides(cache_row, cache_head, cache_page)
        self.kernel(
            cache_map(variant, tile, kv_cache, strides, kv_heads, pages),
            Rows(q, q_token, q_head),
            Rows(key, key_token, key_head),
            Rows(value, value_token, value_head),
            kv_cache,
            strides,
            block_table,
            table_stride,
            seq_lens,
            slot_mapping,
            Result(out, sinks),
            Logits(scale, soft_cap),
            window,
        ).launch(
            grid=(tile.splits, kv_heads, batch),
            block=(THREADS, 1, 1),
            cluster=(tile.splits, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=tile.resident,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        tensor_map: GridConstant[TensorMap],
        queries: Rows,
        keys: Rows,
        values: Rows,
        kv_cache: cute.Pointer,
        strides: Strides,
        block_table: cute.Pointer,
        table_stride: Int64,
        seq_lens: cute.Pointer,
        slot_mapping: cute.Pointer,
        result: Result,
        logits: Logits,
        window: Int32,
    ) -> None:
        """Every warp: settled keys first, then the token, then all steps."""
        tile, variant = self.tile, self.variant
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        leader = ptx.elect_sync()
        if leader and warp == 0:
            ptx.prefetch_tensormap(tensor_map.get_ptr())
        cache = Cache(kv_cache, tensor_map, strides, block_table, table_stride, slot_mapping)
        merge, token = Merge(tile, variant), Token(tile, variant)
        rings = Array(Float32, WARPS * merge.part_words, space=AddressSpace.smem, alignment=1024)
        barriers = Array(Int64, WARPS * tile.stages, space=AddressSpace.smem, alignment=8)
        ring = Ring(rings.subview(warp * merge.part_words), barriers.subview(warp * tile.stages))
        # Lengths, table and keys of earlier tokens are older than the kernel before this one.
        work = work_of(tile, variant, seq_lens, window, warp)
        Loader(tile, variant).start(cache, ring, work, leader)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        # Not before this kernel has waited: the next one may read without waiting what ran earlier.
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        part = Decoder(tile, variant).run(
            cache,
            ring,
            work,
            token.queries(queries, work),
            token.piece(keys, work),
            token.piece(values, work),
            logits,
            leader,
        )
        merge.run(part, rings, result, work, warp)
