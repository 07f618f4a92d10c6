"""Decode attention kernel of sm_90: store of the new token, attention over split keys, merge."""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Float32, GridConstant, Int32, Int64, Uint8
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap

from nvfp4_kernels.attention.decode.sm90.loader import (
    Cache,
    CacheScales,
    Ring,
    Strides,
    TmaLoader,
    cache_map,
)
from nvfp4_kernels.attention.decode.sm90.mainloop import LogitScaling, Mainloop
from nvfp4_kernels.attention.decode.sm90.merge import DecodeResult, Merge
from nvfp4_kernels.attention.decode.sm90.scheduler import work_tile
from nvfp4_kernels.attention.decode.sm90.tile import THREADS, WARPS, DecodeTile, Variant
from nvfp4_kernels.attention.decode.sm90.token import NewToken, TokenTensor
from nvfp4_kernels.device.arguments import example, without_unread
from nvfp4_kernels.device.types import TYPES


class DecodeArguments(NamedTuple):
    """Arguments of a launch.

    Attributes:
        q, key, value: queries, key and value of each sequence's new token.
        kv_cache: [page, head, row, 2·D], each key followed by its value.
        cache_strides: strides of ``kv_cache``.
        cache_scales: scales of an E4M3 cache.
        block_table: int32 [sequences, table_stride], pages.
        table_stride: elements between rows of the block table.
        seq_lens: int32 [sequences], lengths including the new token.
        slot_mapping: int64 [sequences], slots of the new tokens; negative: not stored.
        result: output and sinks.
        logits: scale and soft cap; a cap of 0 means none.
        window: number of keys that a token sees; 0: all.
        batch, kv_heads, pages: sizes.
    """

    q: TokenTensor
    key: TokenTensor
    value: TokenTensor
    kv_cache: cute.Pointer
    cache_strides: Strides
    cache_scales: CacheScales
    block_table: cute.Pointer
    table_stride: Int64
    seq_lens: cute.Pointer
    slot_mapping: cute.Pointer
    result: DecodeResult
    logits: LogitScaling
    window: Int32
    batch: Int32
    kv_heads: Int32
    pages: Int32


@dataclass(frozen=True)
class DecodeAttentionSm90:
    """Decode attention with mma.sync: a cluster per sequence and KV head; its CTAs split the keys.

        leader's TMA  --full-->  Q·Kᵀ, softmax, Vᵀ·Pᵀ  -->  merge over the cluster

    All 4 warps of a CTA have the same role: each has its own ring, filled by the warp's leader, and
    is independent of other warps until the merge. ``full`` is an mbarrier per stage and warp, with
    an arrive count of ``TMA_ARRIVALS`` and the bytes of a step; a warp barrier releases a stage. In
    the merge, a cluster barrier precedes and another follows the reads of partial results.
    """

    tile: DecodeTile
    variant: Variant

    def signature(self) -> tuple[DecodeArguments]:
        """Example arguments of ``__call__``, for ``cute.compile``."""
        dtype = TYPES[self.variant.dtype]
        types = dict.fromkeys(("data", "out"), dtype) | {
            "kv_cache": Uint8 if self.tile.fp8 else dtype,
            "k_scale": Float32,
            "v_scale": Float32,
            "sinks": Float32,
            "block_table": Int32,
            "seq_lens": Int32,
            "slot_mapping": Int64,
        }
        names = "k_scale", "v_scale", "sinks", "block_table", "seq_lens"
        alignment = dict.fromkeys(names, 4) | {"slot_mapping": 8}
        return (example(DecodeArguments, types, alignment),)

    @property
    def unread(self) -> list[str]:
        """Names of the arguments that the kernel does not read."""
        options = [
            name for name in ("window", "soft_cap", "sinks") if not getattr(self.variant, name)
        ]
        scales = [] if self.tile.fp8 else ["k_scale", "v_scale"]
        return ["batch", "kv_heads", "pages", *options, *scales]

    @cute.jit
    def __call__(self, arguments: DecodeArguments, stream: cuda_driver.CUstream) -> None:
        """Launch a cluster of ``splits`` CTAs per sequence and KV head."""
        tile, kv_heads = self.tile, arguments.kv_heads
        cache, strides = arguments.kv_cache, arguments.cache_strides
        tensor_map = cache_map(self.variant, tile, cache, strides, kv_heads, arguments.pages)
        self.kernel(tensor_map, without_unread(arguments, self.unread)).launch(
            grid=(tile.splits, kv_heads, arguments.batch),
            block=(THREADS, 1, 1),
            cluster=(tile.splits, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=tile.ctas_per_sm,
            preferred_smem_carveout=100,  # percent
        )

    @cute.kernel
    def kernel(self, tensor_map: GridConstant[TensorMap], arguments: DecodeArguments) -> None:
        """Start TMA loads of cached keys, load the new token, run the main loop, and merge."""
        tile, variant = self.tile, self.variant
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        leader = ptx.elect_sync()
        if leader and warp == 0:
            ptx.prefetch_tensormap(tensor_map.get_ptr())
        cache = Cache(
            arguments.kv_cache,
            tensor_map,
            arguments.cache_strides,
            arguments.block_table,
            arguments.table_stride,
            arguments.slot_mapping,
            self._scales(arguments.cache_scales),
        )
        merge, token = Merge(tile, variant), NewToken(tile, variant)
        rings = Array(Float32, WARPS * merge.part_words, space=AddressSpace.smem, alignment=1024)
        barriers = Array(Int64, WARPS * tile.stages, space=AddressSpace.smem, alignment=8)
        ring = Ring(rings.subview(warp * merge.part_words), barriers.subview(warp * tile.stages))
        # No preceding kernel that may still run writes lengths, table and earlier tokens' keys.
        work = work_tile(tile, variant, arguments.seq_lens, arguments.window, warp)
        TmaLoader(tile, variant).start(cache, ring, work, leader)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        # After the wait: the next kernel may then read results of earlier kernels without a wait.
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        part = Mainloop(tile, variant).run(
            cache,
            ring,
            work,
            token.queries(arguments.q, work),
            token.vector(arguments.key, work),
            token.vector(arguments.value, work),
            self._logits(arguments.logits, cache),
            leader,
        )
        merge.run(part, rings, arguments.result, cache.scales[1], work, warp)

    def _scales(self, scales: CacheScales) -> list[Float32]:
        """Load the scales of keys and values; 1 unless the cache is E4M3."""
        if not self.tile.fp8:
            return [Float32(1.0)] * 2
        return [Float32(Array(each, shape=(1,)).load(0)) for each in scales]

    def _logits(self, logits: LogitScaling, cache: Cache) -> LogitScaling:
        """``logits`` of keys as stored."""
        if not self.tile.fp8:
            return logits
        return LogitScaling(logits.scale * cache.scales[0], logits.soft_cap)
