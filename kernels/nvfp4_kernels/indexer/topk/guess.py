"""A bound that a few more elements of a row than are wanted are likely to reach."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, Uint64

from nvfp4_kernels.indexer.topk.keys import LEAST, LOWEST, MOST, least_of, order_of, ordered
from nvfp4_kernels.indexer.topk.row import Row, load_quad, prefetch_quads
from nvfp4_kernels.indexer.topk.select import narrow
from nvfp4_kernels.indexer.topk.shared import OF_CTA, Cta
from nvfp4_kernels.indexer.topk.tile import LINE, QUAD, QUADS, SAMPLE, WARP, Config

LINES = SAMPLE // (LINE * QUAD)
DEVIATIONS = 4.0  # by which more groups than expected must reach the bound
GROUPS = 6.0  # that must besides: few are not normally distributed


@cute.jit
def guess(cta: Cta, row: Row, top_k: Int32) -> tuple[Uint64, Uint64]:
    """The bound, and a key that few are above: the greatest of the sample.

    Every CTA of the row takes the same sample. Each thread keeps the largest value of its group of
    elements; as many groups as reach the bound hold an expected ``top_k`` of the row, and more.
    """
    config = cta.config
    best = Float32(LOWEST)
    values: list[Float32] = []
    for n in cutlass.range_constexpr(config.group // QUAD):
        line = cta.thread // LINE + n * (config.threads // LINE)
        values += load_quad(row, _sampled(row, line) * LINE + cta.thread % LINE)
    _prefetch(cta, row)
    for n in cutlass.range_constexpr(config.group):
        best = cute.arch.fmax(best, values[n])  # ignores NaN
    order = ordered(best)
    cta.shared.buffer.store(least_of(order), cta.thread)
    least, greatest = _range(cta, order)
    low, hint = least_of(least), least_of(greatest) | Uint64(0xFFFFFFFF)
    groups = _groups(config, row, top_k)
    if groups > config.threads:
        low, hint, groups = Uint64(LEAST), Uint64(MOST), Int32(0)
    high, need, spare = hint, groups, groups
    # One part may hold many groups, and the bound is its least key.
    while (spare > groups // 8) & (order_of(low) != order_of(high)):
        low, high, need, within = narrow(
            cta, Int32(config.threads), low, high, high, need, OF_CTA, 1
        )
        spare = within - need
    return least_of(order_of(low)), hint


@cute.jit
def _prefetch(cta: Cta, row: Row) -> None:
    """What the CTA reads first, after the sample, which is waited for."""
    quad = row.first + cta.warp * (WARP * QUADS)
    if (cta.lane == 0) & (quad < row.last):
        prefetch_quads(row, quad, cutlass.min(row.last - quad, WARP * QUADS))


def _sampled(row: Row, line: Int32) -> Int32:
    """The ``line``-th line of the sample: anywhere in its part of the row."""
    step = (1 << 32) // LINES
    inside = (line.bitcast(Uint32) * Uint32(2654435761)) >> Uint32(LINES.bit_length() - 1)
    place = line.bitcast(Uint32) * Uint32(step) + inside
    return cute.arch.mul_hi(Uint32(row.quads // LINE), place).to(Int32)


def _groups(config: Config, row: Row, top_k: Int32) -> Int32:
    """How many must reach the bound."""
    without = 1.0 - top_k.to(Float32) / row.length.to(Float32)
    for _ in range(config.group.bit_length() - 1):
        without = without * without
    expected = config.threads * (1.0 - without)
    return (expected + DEVIATIONS * cute.math.sqrt(expected) + GROUPS).to(Int32)


@cute.jit
def _range(cta: Cta, order: Uint32) -> tuple[Uint32, Uint32]:
    """The least and the greatest of all threads' values."""
    ends = cta.shared.ties  # which is free
    least = cute.arch.warp_redux_sync(order, "min")
    greatest = cute.arch.warp_redux_sync(order, "max")
    if cta.lane == 0:
        ends.store(Uint64(least), cta.warp)
        ends.store(Uint64(greatest), WARP + cta.warp)
    cta.meet()
    warp = cutlass.min(cta.lane, cta.config.warps - 1)
    least = cute.arch.warp_redux_sync(Uint32(ends[warp]), "min")
    greatest = cute.arch.warp_redux_sync(Uint32(ends[WARP + warp]), "max")
    return least, greatest
