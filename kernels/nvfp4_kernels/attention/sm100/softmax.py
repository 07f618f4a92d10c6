"""Softmax warps: P from S, with a running maximum and sum of each row."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.sm100.barriers import Barriers, wait_o_full
from nvfp4_kernels.attention.sm100.math import (
    exp2_mixed,
    fadd_reduce,
    fma_packed,
    fmax_reduce,
    mul_packed,
    to_e4m3,
)
from nvfp4_kernels.attention.sm100.scheduler import QueryRow, WorkTile
from nvfp4_kernels.attention.sm100.tile import KEYS, WARPS, AttentionTile, Variant
from nvfp4_kernels.device.math import LOG2_E, NEGATIVE_INFINITY, exp2, finite, tanh
from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.sm100.barriers import fence_and_arrive
from nvfp4_kernels.sm100.tensor_memory import SHAPE, load_columns, tensor_pointer

LOAD_COLUMNS = 16  # of one tcgen05.ld, which overlaps with exponentials of the one before


@dataclass(frozen=True)
class LogitScaling:
    """Factors that turn S into logits in units of ln 2.

    Attributes:
        scale: of S.
        soft_cap: unused without one.
    """

    scale: Float32
    soft_cap: Float32


@dataclass(frozen=True)
class SoftmaxState:
    """Running maximum and sum of a row, logits in units of ln 2.

    Attributes:
        row_max: the largest logit, or less than that by at most ``rescale_threshold``.
        row_sum: Σ 2^(logit − row_max + p_shift).
    """

    row_max: Float32
    row_sum: Float32


@dataclass(frozen=True)
class Probabilities:
    """P of one row and key tile.

    Attributes:
        words: P as the tensor core reads it.
        row_sum: sum of P before rounding.
        row_max: the largest logit.
    """

    words: list[Uint32]
    row_sum: Float32
    row_max: Float32


@dataclass(frozen=True)
class Softmax:
    """Role of four warps per query tile. A thread has a whole row: no shuffles.

    P is first computed with the row_max of earlier tiles, so that exponentials need not wait for
    this tile's maximum. Only where that exceeds row_max by more than ``rescale_threshold``, and
    where keys are masked, is P computed with a row_max that includes this tile.
    """

    tile: AttentionTile
    variant: Variant

    @cute.jit
    def run(
        self,
        barriers: Barriers,
        lanes: Int32,
        query_tile: Int32,
        tiles: Int32,
        work: WorkTile,
        row: QueryRow,
        warp: Int32,
        logits: LogitScaling,
    ) -> SoftmaxState:
        """Process all key tiles; ``lanes`` is the tensor memory of the warp."""
        tile, stages, keys = self.tile, self.tile.s_stages, self.tile.warp_keys
        quarter = warp if tile.warp_split_kv else Int32(0)
        leader = ptx.elect_sync()
        row_max, row_sum = Float32(NEGATIVE_INFINITY), Float32(0.0)
        for index in cutlass.range(tiles, unroll=1):
            stage = index % stages
            s_full = barriers.s_full.subview(query_tile * stages + stage)
            p_full = barriers.p_full.subview(query_tile * stages + stage)
            wait(s_full, index // stages)
            ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
            source = lanes + tile.s_column(query_tile, stage) + quarter * keys
            start = (work.first_tile + index) * KEYS + quarter * keys
            p = self._no_probabilities()
            done = Boolean(False)
            if index > 0 and start >= row.all_begin and start + keys <= row.all_end:
                p = self._exp_speculative(source, row_max, logits)
                exceeded = p.row_max - row_max > Float32(tile.rescale_threshold)
                done = not ptx.vote_sync(cute.arch.FULL_MASK, exceeded, ptx.VoteSync.ANY)
            rescale = Float32(1.0)
            if not done:
                before = row_max
                p, row_max = self._exp_masked(source, row_max, logits, row, start)
                rescale = exp2(before - finite(row_max))
                if index > 0:
                    wait_o_full(tile, barriers, query_tile, index - 1)
                    self._rescale(lanes + tile.o_column(query_tile), rescale)
            if cutlass.const_expr(tile.separate_p):
                fence_and_arrive(barriers.s_empty.subview(query_tile), leader)
                if index > 0:
                    wait_o_full(tile, barriers, query_tile, index - 1)
            self._store(lanes + tile.p_column(query_tile, stage), p.words, quarter)
            ptx.tcgen05_wait(ptx.Tcgen05Wait.STORE)
            fence_and_arrive(p_full, leader)
            row_sum = row_sum * rescale + p.row_sum
        return SoftmaxState(row_max, row_sum)

    @property
    def _words(self) -> int:
        """Words of P of one row and key tile."""
        return self.tile.p_columns * self.tile.warp_keys // KEYS

    def _no_probabilities(self) -> Probabilities:
        return Probabilities([Uint32(0)] * self._words, Float32(0.0), Float32(0.0))

    def _log2_scale(self, logits: LogitScaling) -> Float32:
        """Factor that turns what ``_soft_capped`` returns into logits in units of ln 2."""
        return (logits.soft_cap if self.variant.soft_cap else logits.scale) * LOG2_E

    def _soft_capped(self, scores: list[Float32], logits: LogitScaling) -> list[Float32]:
        if not self.variant.soft_cap:
            return scores
        return [tanh(score * (logits.scale / logits.soft_cap)) for score in scores]

    def _shift(self, row_max: Float32) -> Float32:
        return Float32(self.tile.p_shift) - row_max

    def _exp_speculative(
        self, source: Int32, row_max: Float32, logits: LogitScaling
    ) -> Probabilities:
        """P with the row_max of earlier tiles, software-pipelined over loads, exp2 and sums."""
        factor, shift = self._log2_scale(logits), self._shift(finite(row_max))
        words: list[Uint32] = []
        sums, maxima = [], []
        powers: list[Float32] = []
        following = load_columns(source, LOAD_COLUMNS)
        for first in range(0, self.tile.warp_keys, LOAD_COLUMNS):
            ptx.tcgen05_wait(ptx.Tcgen05Wait.LOAD)
            scores = self._soft_capped(following, logits)
            if first + LOAD_COLUMNS < self.tile.warp_keys:
                following = load_columns(source + first + LOAD_COLUMNS, LOAD_COLUMNS)
            if powers:
                words += self._converted(powers)
                sums.append(fadd_reduce(powers))
            powers = exp2_mixed(fma_packed(scores, factor, shift), self.tile.emulated_exp2)
            maxima.append(fmax_reduce(scores))
        words += self._converted(powers)
        sums.append(fadd_reduce(powers))
        return Probabilities(words, _sum(sums), fmax_reduce(maxima) * factor)

    @cute.jit
    def _exp_masked(
        self, source: Int32, row_max: Float32, logits: LogitScaling, row: QueryRow, start: Int32
    ) -> tuple[Probabilities, Float32]:
        """P of masked logits with a row_max that includes this tile, and that row_max."""
        factor = self._log2_scale(logits)
        scores = self._soft_capped(self._load(source), logits)
        if start < row.all_begin or start + self.tile.warp_keys > row.all_end:
            scores = self._mask(scores, row.begin - start, row.end - start)
        row_max = cute.arch.fmax(row_max, fmax_reduce(scores) * factor)
        return self._exp(scores, factor, row_max), row_max

    def _load(self, source: Int32) -> list[Float32]:
        scores: list[Float32] = []
        for first in range(0, self.tile.warp_keys, LOAD_COLUMNS):
            scores += load_columns(source + first, LOAD_COLUMNS)
        ptx.tcgen05_wait(ptx.Tcgen05Wait.LOAD)
        return scores

    def _exp(self, scores: list[Float32], factor: Float32, row_max: Float32) -> Probabilities:
        shift = self._shift(finite(row_max))
        words: list[Uint32] = []
        sums = []
        for first in range(0, self.tile.warp_keys, LOAD_COLUMNS):
            scaled = fma_packed(scores[first : first + LOAD_COLUMNS], factor, shift)
            powers = exp2_mixed(scaled, self.tile.emulated_exp2)
            sums.append(fadd_reduce(powers))
            words += self._converted(powers)
        return Probabilities(words, _sum(sums), row_max)

    def _mask(self, scores: list[Float32], begin: Int32, end: Int32) -> list[Float32]:
        """Set scores of keys that the row does not see, outside of [begin, end), to −∞."""
        masked = []
        for column, score in enumerate(scores):
            seen = end > column
            if self.variant.window:
                seen = seen & (begin <= column)
            masked.append(cutlass.select_(seen, score, Float32(NEGATIVE_INFINITY)))
        return masked

    def _converted(self, powers: list[Float32]) -> list[Uint32]:
        """Convert P to the element type of V, packed into words."""
        if self.tile.fp8:
            return to_e4m3(powers)
        values = Vector.from_elements(tuple(powers), Float32).to(TYPES[self.variant.dtype])
        return list(values.bitcast(Uint32).to_elements())

    def _store(self, target: Int32, words: list[Uint32], quarter: Int32) -> None:
        """Store P of this warp's keys; zeros for other warps' keys, whose lanes have those."""
        if not self.tile.warp_split_kv:
            self._store_words(target, words)
            return
        for other in range(1, WARPS):
            peer = (quarter + other) % WARPS
            self._store_words(target + peer * len(words), [Uint32(0)] * len(words))
        self._store_words(target + quarter * len(words), words)

    def _store_words(self, target: Int32, words: list[Uint32]) -> None:
        ptx.tcgen05_st(SHAPE, tensor_pointer(target), Vector.from_elements(tuple(words), Uint32))

    @cute.jit
    def _rescale(self, output: Int32, rescale: Float32) -> None:
        """Multiply O of this warp's rows by ``rescale`` of each."""
        for first in cutlass.range_constexpr(0, self.tile.head_dim, LOAD_COLUMNS):
            values = load_columns(output + first, LOAD_COLUMNS)
            ptx.tcgen05_wait(ptx.Tcgen05Wait.LOAD)
            scaled = Vector.from_elements(tuple(mul_packed(values, rescale)), Float32)
            ptx.tcgen05_st(SHAPE, tensor_pointer(output + first), scaled)


def _sum(values: list[Float32]) -> Float32:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
