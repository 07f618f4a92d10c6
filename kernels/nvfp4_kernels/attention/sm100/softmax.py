"""The softmax warps: from S to P, with a running maximum and sum of each row."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.sm100.barriers import Barriers, wait_for_output
from nvfp4_kernels.attention.sm100.math import (
    largest,
    multiply,
    multiply_add,
    powers_of_two,
    to_e4m3,
    total,
)
from nvfp4_kernels.attention.sm100.scheduler import Row, Work
from nvfp4_kernels.attention.sm100.tile import KEYS, WARPS, AttentionTile, Variant
from nvfp4_kernels.device.math import LOG2_E, NEGATIVE_INFINITY, exp2, finite, tanh
from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.sm100.barriers import hand_over
from nvfp4_kernels.sm100.tensor_memory import SHAPE, load_columns, tensor_pointer

LOADED = 16  # columns of one tcgen05.ld; their exponentials run under the next one


@dataclass(frozen=True)
class Logits:
    """From S to logits in units of ln 2.

    Attributes:
        scale: of S.
        soft_cap: unused without one.
    """

    scale: Float32
    soft_cap: Float32


@dataclass(frozen=True)
class Sum:
    """Of a row: Σ 2^(logit − peak), logits in units of ln 2.

    Attributes:
        peak: the largest logit, or one that is less by no more than the slack.
        weight: the sum, times 2^shift of P.
    """

    peak: Float32
    weight: Float32


@dataclass(frozen=True)
class Weights:
    """One key tile's part of a row.

    Attributes:
        words: P as the tensor core reads it.
        weight: its sum before it was rounded.
        reached: the largest logit.
    """

    words: list[Uint32]
    weight: Float32
    reached: Float32


@dataclass(frozen=True)
class Softmax:
    """Role of four warps per query tile. A thread has a row to itself: nothing is exchanged.

    P is first computed for the peak as it was: exponentials then need not wait for the tile's
    maximum. Only if that turns out to be larger by more than the slack, and where keys are masked,
    is P computed for a peak that has seen the tile.
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
        work: Work,
        row: Row,
        warp: Int32,
        logits: Logits,
    ) -> Sum:
        """All key tiles; ``lanes``: tensor memory of the warp."""
        tile, buffers, keys = self.tile, self.tile.score_buffers, self.tile.warp_keys
        quarter = warp if tile.spread else Int32(0)
        leader = ptx.elect_sync()
        peak, weight = Float32(NEGATIVE_INFINITY), Float32(0.0)
        for index in cutlass.range(tiles, unroll=1):
            buffer = index % buffers
            scored = barriers.scored.subview(query_tile * buffers + buffer)
            weighed = barriers.weighed.subview(query_tile * buffers + buffer)
            wait(scored, index // buffers)
            ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
            source = lanes + tile.score_column(query_tile, buffer) + quarter * keys
            start = (work.first_tile + index) * KEYS + quarter * keys
            found = self._nothing()
            done = Boolean(False)
            if index > 0 and start >= row.all_begin and start + keys <= row.all_end:
                found = self._at_once(source, peak, logits)
                grown = found.reached - peak > Float32(tile.slack)
                done = not ptx.vote_sync(cute.arch.FULL_MASK, grown, ptx.VoteSync.ANY)
            fade = Float32(1.0)
            if not done:
                before = peak
                found, peak = self._carefully(source, peak, logits, row, start)
                fade = exp2(before - finite(peak))
                if index > 0:
                    wait_for_output(tile, barriers, query_tile, index - 1)
                    self._rescale(lanes + tile.output_column(query_tile), fade)
            if cutlass.const_expr(tile.own_probabilities):
                hand_over(barriers.taken.subview(query_tile), leader)
                if index > 0:
                    wait_for_output(tile, barriers, query_tile, index - 1)
            self._store(lanes + tile.probability_column(query_tile, buffer), found.words, quarter)
            ptx.tcgen05_wait(ptx.Tcgen05Wait.STORE)
            hand_over(weighed, leader)
            weight = weight * fade + found.weight
        return Sum(peak, weight)

    @property
    def _words(self) -> int:
        return self.tile.probability_columns * self.tile.warp_keys // KEYS

    def _nothing(self) -> Weights:
        return Weights([Uint32(0)] * self._words, Float32(0.0), Float32(0.0))

    def _factor(self, logits: Logits) -> Float32:
        """Of what ``_capped`` leaves."""
        return (logits.soft_cap if self.variant.soft_cap else logits.scale) * LOG2_E

    def _capped(self, scores: list[Float32], logits: Logits) -> list[Float32]:
        if not self.variant.soft_cap:
            return scores
        return [tanh(score * (logits.scale / logits.soft_cap)) for score in scores]

    def _shift(self, peak: Float32) -> Float32:
        return Float32(self.tile.probability_shift) - peak

    def _at_once(self, source: Int32, peak: Float32, logits: Logits) -> Weights:
        """Some columns at a time: the next are on their way, the last ones' sums fill the gaps."""
        factor, shift = self._factor(logits), self._shift(finite(peak))
        words: list[Uint32] = []
        weights, tops = [], []
        powers: list[Float32] = []
        following = load_columns(source, LOADED)
        for first in range(0, self.tile.warp_keys, LOADED):
            ptx.tcgen05_wait(ptx.Tcgen05Wait.LOAD)
            scores = self._capped(following, logits)
            if first + LOADED < self.tile.warp_keys:
                following = load_columns(source + first + LOADED, LOADED)
            if powers:
                words += self._rounded(powers)
                weights.append(total(powers))
            powers = powers_of_two(multiply_add(scores, factor, shift), self.tile.polynomial)
            tops.append(largest(scores))
        words += self._rounded(powers)
        weights.append(total(powers))
        return Weights(words, _sum(weights), largest(tops) * factor)

    @cute.jit
    def _carefully(
        self, source: Int32, peak: Float32, logits: Logits, row: Row, start: Int32
    ) -> tuple[Weights, Float32]:
        """All columns, masked; the peak rises first, if that is due."""
        factor = self._factor(logits)
        scores = self._capped(self._load(source), logits)
        if start < row.all_begin or start + self.tile.warp_keys > row.all_end:
            scores = self._mask(scores, row.begin - start, row.end - start)
        peak = cute.arch.fmax(peak, largest(scores) * factor)
        return self._weigh(scores, factor, peak), peak

    def _load(self, source: Int32) -> list[Float32]:
        scores: list[Float32] = []
        for first in range(0, self.tile.warp_keys, LOADED):
            scores += load_columns(source + first, LOADED)
        ptx.tcgen05_wait(ptx.Tcgen05Wait.LOAD)
        return scores

    def _weigh(self, scores: list[Float32], factor: Float32, peak: Float32) -> Weights:
        shift = self._shift(finite(peak))
        words: list[Uint32] = []
        weights = []
        for first in range(0, self.tile.warp_keys, LOADED):
            scaled = multiply_add(scores[first : first + LOADED], factor, shift)
            powers = powers_of_two(scaled, self.tile.polynomial)
            weights.append(total(powers))
            words += self._rounded(powers)
        return Weights(words, _sum(weights), peak)

    def _mask(self, scores: list[Float32], begin: Int32, end: Int32) -> list[Float32]:
        """−∞ for what this row does not see: columns before ``begin``, and from ``end`` on."""
        masked = []
        for column, score in enumerate(scores):
            seen = end > column
            if self.variant.window:
                seen = seen & (begin <= column)
            masked.append(cutlass.select_(seen, score, Float32(NEGATIVE_INFINITY)))
        return masked

    def _rounded(self, powers: list[Float32]) -> list[Uint32]:
        """In the format of V."""
        if self.tile.fp8:
            return to_e4m3(powers)
        values = Vector.from_elements(tuple(powers), Float32).to(TYPES[self.variant.dtype])
        return list(values.bitcast(Uint32).to_elements())

    def _store(self, target: Int32, words: list[Uint32], quarter: Int32) -> None:
        """To the columns of this warp's keys; 0 to those of others', whose weight others have."""
        if not self.tile.spread:
            self._store_words(target, words)
            return
        for other in range(1, WARPS):
            place = (quarter + other) % WARPS
            self._store_words(target + place * len(words), [Uint32(0)] * len(words))
        self._store_words(target + quarter * len(words), words)

    def _store_words(self, target: Int32, words: list[Uint32]) -> None:
        ptx.tcgen05_st(SHAPE, tensor_pointer(target), Vector.from_elements(tuple(words), Uint32))

    @cute.jit
    def _rescale(self, output: Int32, fade: Float32) -> None:
        """O of this warp's rows, times a factor each."""
        for first in cutlass.range_constexpr(0, self.tile.head_dim, LOADED):
            values = load_columns(output + first, LOADED)
            ptx.tcgen05_wait(ptx.Tcgen05Wait.LOAD)
            faded = Vector.from_elements(tuple(multiply(values, fade)), Float32)
            ptx.tcgen05_st(SHAPE, tensor_pointer(output + first), faded)


def _sum(values: list[Float32]) -> Float32:
    added = values[0]
    for value in values[1:]:
        added = added + value
    return added
