"""Estimate of a threshold that slightly more than ``top_k`` elements of a row reach."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, Uint64

from nvfp4_kernels.indexer.topk.keys import LOWEST, MAX_KEY, MIN_KEY, min_key, order_bits, order_of
from nvfp4_kernels.indexer.topk.row import RowSlice, load_quad, prefetch_quads
from nvfp4_kernels.indexer.topk.select import histogram_pass
from nvfp4_kernels.indexer.topk.shared import CTA_HISTOGRAM, ThreadGroup
from nvfp4_kernels.indexer.topk.tile import LINE, QUAD, QUADS, SAMPLE, WARP, TopkTile

LINES = SAMPLE // (LINE * QUAD)
DEVIATIONS = 4.0  # standard deviations above the expected number of maxima
EXTRA_MAXIMA = 6.0  # beyond the standard deviations: small counts are not normally distributed


@cute.jit
def sample_threshold(group: ThreadGroup, row: RowSlice, top_k: Int32) -> tuple[Uint64, Uint64]:
    """Estimate the threshold; also return the sample's greatest key, which few elements exceed.

    Every CTA of the row takes the same sample. Each thread keeps the maximum of the elements that
    the thread samples. The number of maxima that reach the threshold is the number expected to come
    from the row's ``top_k`` largest elements, plus a margin. If this number exceeds the number of
    threads, the result is ``MIN_KEY`` and ``MAX_KEY``.
    """
    tile = group.tile
    best = Float32(LOWEST)
    values: list[Float32] = []
    for n in cutlass.range_constexpr(tile.thread_sample // QUAD):
        line = group.thread // LINE + n * (tile.threads // LINE)
        values += load_quad(row, _sampled(row, line) * LINE + group.thread % LINE)
    _prefetch(group, row)
    for n in cutlass.range_constexpr(tile.thread_sample):
        best = cute.arch.fmax(best, values[n])  # ignores NaN
    order = order_bits(best)
    group.shared.buffer.store(min_key(order), group.thread)
    least, greatest = _range(group, order)
    low, hint = min_key(least), min_key(greatest) | Uint64(0xFFFFFFFF)
    rank = _rank(tile, row, top_k)
    if rank > tile.threads:
        low, hint, rank = Uint64(MIN_KEY), Uint64(MAX_KEY), Int32(0)
    high, need, spare = hint, rank, rank
    # A bin may hold many maxima, and the threshold is its least key.
    while (spare > rank // 8) & (order_of(low) != order_of(high)):
        low, high, need, within = histogram_pass(
            group, Int32(tile.threads), low, high, high, need, CTA_HISTOGRAM, 1
        )
        spare = within - need
    return min_key(order_of(low)), hint


@cute.jit
def _prefetch(group: ThreadGroup, row: RowSlice) -> None:
    """Prefetch to L2 the first elements of the CTA's slice, while the sample is loaded."""
    quad = row.first + group.warp * (WARP * QUADS)
    if (group.lane == 0) & (quad < row.last):
        prefetch_quads(row, quad, cutlass.min(row.last - quad, WARP * QUADS))


def _sampled(row: RowSlice, line: Int32) -> Int32:
    """Index, among the row's lines, of the sample's line number ``line``.

    The sample has a pseudo-random line of each of ``LINES`` equal parts of the row.
    """
    step = (1 << 32) // LINES
    inside = (line.bitcast(Uint32) * Uint32(2654435761)) >> Uint32(LINES.bit_length() - 1)
    position = line.bitcast(Uint32) * Uint32(step) + inside
    return cute.arch.mul_hi(Uint32(row.quads // LINE), position).to(Int32)


def _rank(tile: TopkTile, row: RowSlice, top_k: Int32) -> Int32:
    """Rank of the threshold among the threads' maxima; the greatest maximum has rank 1."""
    without = 1.0 - top_k.to(Float32) / row.length.to(Float32)
    for _ in range(tile.thread_sample.bit_length() - 1):
        without = without * without
    expected = tile.threads * (1.0 - without)
    return (expected + DEVIATIONS * cute.math.sqrt(expected) + EXTRA_MAXIMA).to(Int32)


@cute.jit
def _range(group: ThreadGroup, order: Uint32) -> tuple[Uint32, Uint32]:
    """Least and greatest ``order`` over all threads of the group."""
    ends = group.shared.ties  # unused at this point
    least = cute.arch.warp_redux_sync(order, "min")
    greatest = cute.arch.warp_redux_sync(order, "max")
    if group.lane == 0:
        ends.store(Uint64(least), group.warp)
        ends.store(Uint64(greatest), WARP + group.warp)
    group.sync()
    warp = cutlass.min(group.lane, group.tile.warps - 1)
    least = cute.arch.warp_redux_sync(Uint32(ends[warp]), "min")
    greatest = cute.arch.warp_redux_sync(Uint32(ends[WARP + warp]), "max")
    return least, greatest
