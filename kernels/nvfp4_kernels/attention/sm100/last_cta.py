"""Split-KV merge by the CTA that finishes last for a block of rows, without another launch."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Int32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.merge.choose import VECTOR_BYTES
from nvfp4_kernels.attention.merge.merge import MergeArguments, SegmentMerge
from nvfp4_kernels.attention.merge.tile import MergeTile
from nvfp4_kernels.attention.sm100.scheduler import Sizes, WorkTile
from nvfp4_kernels.attention.sm100.tile import WARPS, AttentionTile, Variant
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.sm100.limits import WARP_ROWS

SYNC_BARRIER = 2  # named barrier of the softmax warps
THREADS = WARPS * WARP_ROWS
MAX_PREFETCH = 8  # segments


def last_cta_tile(tile: AttentionTile, variant: Variant) -> MergeTile:
    """Tile of the merge; the queries' memory bounds the segments in flight per thread."""
    prefetch = min(MAX_PREFETCH, tile.query_bytes // (THREADS * VECTOR_BYTES))
    return MergeTile(
        "float32", variant.dtype, tile.head_dim, variant.sinks, prefetch, variant.quantized
    )


@dataclass(frozen=True)
class LastCta:
    """Role of the softmax warps with split-KV, after the epilogue has stored a partial result.

    Every CTA with keys increments a semaphore per block of rows; the last CTA merges all
    partial results in the order of the splits, independent of the order in which CTAs finish. The
    semaphore wraps around to zero, ready for the next launch. If no CTA has keys, the CTA of the
    first split stores the result of rows without keys.
    """

    tile: AttentionTile
    variant: Variant

    @cute.jit
    def run(
        self,
        arguments: MergeArguments,
        counters: cute.Pointer,
        sizes: Sizes,
        shared: Array,
        is_last: Array,
        work: WorkTile,
        warp: Int32,
    ) -> None:
        """Increment the semaphore; if this CTA is the last, merge the block of rows.

        Args:
            arguments: partial results, and the merged result.
            counters: semaphores, int32 [batch, KV heads], zero before and after the launch.
            sizes: sizes of the launch.
            shared: shared memory of the queries, which is free by now.
            is_last: int32 in shared memory, through which one thread informs the others.
            work: work tile of the CTA.
            warp: index among the softmax warps.
        """
        thread = warp * WARP_ROWS + cute.arch.lane_idx()
        self._sync()  # every part of the CTA has been stored, and staged rows have been read
        if thread == 0:
            none = (work.parts == 0) & (work.split == 0)
            last = cutlass.select_(none, Int32(1), Int32(0))
            if work.split < work.parts:
                index = work.batch * sizes.kv_heads + work.kv_head
                counter = Array(counters, shape=(1,)).data_ptr(index)
                last = self._count(counter, work.parts)
            is_last.store(last)
        self._sync()
        if is_last.load() != 0:
            self._merge(arguments._replace(segments=work.parts), shared, work, thread)

    def _sync(self) -> None:
        """Barrier over the softmax warps."""
        ptx.barrier_cta_sync(SYNC_BARRIER, thread_count=THREADS)

    def _count(self, counter: cute.Pointer, parts: Int32) -> Int32:
        """Increment the semaphore that ``parts`` CTAs share; return 1 in the last CTA, else 0."""
        # Releases this CTA's partial results, ordered by the barrier, and acquires those of earlier
        # CTAs.
        before = ptx.inline_ptx(
            "atom.acq_rel.gpu.global.inc.u32 {$w0}, [{$r0}], {$r1};",
            write_only_types=[Int32],
            read_only_args=[counter, parts - 1],
        )
        return cutlass.select_(before == parts - 1, Int32(1), Int32(0))

    @cute.jit
    def _merge(
        self, arguments: MergeArguments, shared: Array, work: WorkTile, thread: Int32
    ) -> None:
        """Merge all rows of the CTA; a thread merges 16 bytes of a row at a time."""
        tile = last_cta_tile(self.tile, self.variant)
        merge = SegmentMerge(tile)
        slots = Array(shared.data_ptr(), shape=(1,), dtype=TYPES[tile.dtype])
        rows = cutlass.min(work.rows - work.first_row, Int32(self.tile.tile_rows))
        for step in cutlass.range(0, cute.ceil_div(rows * tile.vectors, THREADS), unroll=1):
            number = step * THREADS + thread
            index = work.first_row + number // tile.vectors
            token = work.first_query + index // work.group
            head = work.kv_head * work.group + index % work.group
            inside: Boolean = number < rows * tile.vectors
            row = cutlass.select_(inside, token * arguments.num_heads + head, Int32(0))
            column = number % tile.vectors * tile.width
            merge.run(arguments, row, column, inside, slots, thread, THREADS)
