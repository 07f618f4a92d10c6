"""Top-k kernel of sm_90 and sm_100."""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Int64, Uint64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.indexer.topk.keys import MAX_KEY, MIN_KEY
from nvfp4_kernels.indexer.topk.result import TopkResult, clear_bitmap, write
from nvfp4_kernels.indexer.topk.row import RowSlice, row_slice
from nvfp4_kernels.indexer.topk.sample import sample_threshold
from nvfp4_kernels.indexer.topk.select import histogram_pass, rank_ties
from nvfp4_kernels.indexer.topk.shared import (
    CLUSTER_HISTOGRAMS,
    TOTAL,
    ThreadGroup,
    clear,
    cta_group,
)
from nvfp4_kernels.indexer.topk.stream import stream
from nvfp4_kernels.indexer.topk.tile import BATCH, MAX_TIES, QUAD, TopkTile


class TopkArguments(NamedTuple):
    """Arguments of a launch; pointers are to global memory.

    Attributes:
        logits: float32 [rows, stride], scores.
        ids: int32 [rows, stride], ids to write instead of column indices, or null.
        lens: int32 [rows], length of each row.
        starts: int32 [rows], first column of each row; null: 0.
        indices: int32 [rows, top_k], output.
        valid: int32 [rows], output: number of columns selected from each row; the remaining
            ``indices`` are −1.
        stride: elements from one row to the next.
        top_k: number of columns to select from each row.
        rows: number of rows.
    """

    logits: cute.Pointer
    ids: cute.Pointer
    lens: cute.Pointer
    starts: cute.Pointer
    indices: cute.Pointer
    valid: cute.Pointer
    stride: Int64
    top_k: Int32
    rows: Int32


@dataclass(frozen=True)
class IndexerTopk:
    """One compiled variant of the top-k kernel.

    A cluster processes a row, and all threads have the same role. Threads synchronise by
    ``bar.sync`` and ``barrier.cluster`` alone, without mbarriers. Candidates are in shared memory,
    and the CTAs of a cluster exchange histograms and ties through distributed shared memory.

    Attributes:
        tile: threads, cluster and shared memory.
        has_starts: whether each row has its own first column.
        has_ids: whether to write ids instead of column indices.
    """

    tile: TopkTile
    has_starts: bool = False
    has_ids: bool = False

    def __post_init__(self) -> None:
        assert self.tile.capacity > BATCH

    def signature(self) -> tuple[TopkArguments]:
        """Example arguments of ``__call__``, for ``cute.compile``."""
        indices = dict.fromkeys(("ids", "lens", "starts", "indices", "valid"), Int32)
        return (example(TopkArguments, {"logits": Float32, **indices}, alignment=4),)

    @cute.jit
    def __call__(self, arguments: TopkArguments, stream: cuda_driver.CUstream) -> None:
        """Launch one cluster per row."""
        self.kernel(arguments).launch(
            grid=(arguments.rows * self.tile.cluster, 1, 1),
            block=(self.tile.threads, 1, 1),
            cluster=(self.tile.cluster, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: TopkArguments) -> None:
        """Select a row's top-k elements, or all elements if there are at most ``top_k``."""
        top_k = arguments.top_k
        group = cta_group(self.tile)
        index = cute.arch.block_idx()[0] // self.tile.cluster
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        clear(group)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        length = Array(arguments.lens, shape=(1,))[index]
        start = index * arguments.stride
        if cutlass.const_expr(self.has_starts):
            start += Array(arguments.starts, shape=(1,))[index]
        out = self._result(arguments, index, start)
        if length <= top_k:
            self._choose_all(group, out, length, top_k)
        else:
            self._choose(group, row_slice(group, arguments.logits, start, length), out, top_k)
        if (group.rank == 0) & (group.thread == 0):
            Array(arguments.valid, shape=(1,)).store(cutlass.min(length, top_k), index)

    def _result(self, arguments: TopkArguments, row: Int32, start: Int64) -> TopkResult:
        """Destination of a row's columns; ``start``: offset of the row's first column in logits."""
        out = Array(arguments.indices, shape=(1,)).subview(Int64(row) * arguments.top_k)
        ids = Array(arguments.ids, shape=(1,)).subview(start) if self.has_ids else None
        return TopkResult(out, ids)

    @cute.jit
    def _choose_all(
        self, group: ThreadGroup, result: TopkResult, length: Int32, top_k: Int32
    ) -> None:
        """Write all ``length`` columns of a row, then −1 up to ``top_k`` entries."""
        first = group.rank * self.tile.threads + group.thread
        for at in range(first, top_k, self.tile.threads * self.tile.cluster):
            if at < length:
                result.store(at, at)
            else:
                result.indices.store(Int32(-1), at)

    @cute.jit
    def _choose(self, group: ThreadGroup, row: RowSlice, result: TopkResult, top_k: Int32) -> None:
        """Select and write the top-k columns of a row."""
        tile = self.tile
        low, hint = Uint64(MIN_KEY), Uint64(MAX_KEY)
        if row.quads > tile.cluster * tile.capacity // QUAD:
            low, hint = sample_threshold(group, row, top_k)
        high, need, within = Uint64(MAX_KEY), top_k, Int32(0)
        entries, histogram = Int32(0), Int32(CLUSTER_HISTOGRAMS[0])
        reading = Boolean(True)
        while reading:
            entries = stream(group, row, low, top_k)
            low, high, need, within = histogram_pass(
                group, entries, low, Uint64(MAX_KEY), hint, top_k, histogram, tile.cluster
            )
            histogram = sum(CLUSTER_HISTOGRAMS) - histogram
            # Too few elements reach a threshold that was too high: read the row again, without.
            reading = group.shared.counters[TOTAL] < top_k
            if reading:
                low, hint = Uint64(MIN_KEY), Uint64(MAX_KEY)
        while within > MAX_TIES:
            low, high, need, within = histogram_pass(
                group, entries, low, high, high, need, histogram, tile.cluster
            )
            histogram = sum(CLUSTER_HISTOGRAMS) - histogram
        clear_bitmap(group, row)
        threshold = rank_ties(group, entries, low, high, need, within, tile.cluster)
        write(group, row, entries, threshold, within, result)
