"""Softmax warps: compute P from S, with a running row_max and row_sum."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.sm100.barriers import (
    Barriers,
    part_barrier,
    s_full_barrier,
    wait_o_full,
)
from nvfp4_kernels.attention.sm100.math import (
    SUMS,
    add_folded,
    emulated_among,
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

LOAD_COLUMNS = 16  # columns of one tcgen05.ld, which overlaps with the previous load's exponentials


@dataclass(frozen=True)
class LogitScaling:
    """Factors that turn S into base-2 logits, i.e. logits times log2(e).

    Attributes:
        scale: factor of S.
        soft_cap: soft cap of logits; unused unless ``Variant.soft_cap``.
    """

    scale: Float32
    soft_cap: Float32


@dataclass(frozen=True)
class SoftmaxState:
    """Running maximum and sum of a row, for base-2 logits.

    Attributes:
        row_max: largest logit so far, or an older, smaller maximum that still keeps P in range.
        row_sum: Σ 2^(logit − row_max + p_shift).
    """

    row_max: Float32
    row_sum: Float32


@dataclass(frozen=True)
class Columns:
    """First columns of S, P and O of a query tile, in the warp's lanes of tensor memory.

    Attributes:
        s: S of the warp's keys.
        p: P of all keys.
        o: O.
    """

    s: Int32
    p: Int32
    o: Int32


@dataclass(frozen=True)
class Probabilities:
    """P of one row and a part of a key tile.

    Attributes:
        words: P in the MMA's element type, packed into 32-bit words.
        sums: ``SUMS`` partial sums of P before rounding.
        overflow: whether P is too large in any row of the warp.
    """

    words: list[Uint32]
    sums: list[Float32]
    overflow: Boolean


@dataclass(frozen=True)
class Softmax:
    """Role of four warps per query tile; a thread has a whole row, so that no shuffles are needed.

    P is first computed speculatively with the row_max of earlier keys, so that exponentials need
    not wait for the new keys' maximum. If sums of P then exceed ``p_limit``, P is computed again,
    after the maximum, and row_max grows if it is too small. Masked keys, and the first keys of a
    row, are not speculated on. Each part of a key tile is processed separately; PV of earlier parts
    may already have begun.

    With ``tile.batch_invariant`` there is no speculation, and the row_max of a row grows only if
    logits of the row exceed it by the threshold. Otherwise, masking and the P of other rows would
    make a row depend on the other rows of the warp.
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
        """Process all key tiles; ``lanes``: address of the warp's lanes in tensor memory."""
        tile, stages = self.tile, self.tile.s_stages
        quarter = warp if tile.warp_split_kv else Int32(0)
        leader = ptx.elect_sync()
        row_max, row_sum = Float32(NEGATIVE_INFINITY), Float32(0.0)
        for index in cutlass.range(tiles, unroll=1):
            kv_tile = work.kv_tile(query_tile, index)
            stage = kv_tile % stages
            columns = Columns(
                s=lanes + tile.s_column(query_tile, stage) + quarter * tile.warp_keys,
                p=lanes + tile.p_column(query_tile, stage),
                o=lanes + tile.o_column(query_tile),
            )
            start = (work.first_tile + index) * KEYS + quarter * tile.warp_keys
            for part in cutlass.range_constexpr(tile.parts):
                if cutlass.const_expr(tile.split_s or part == 0):
                    wait(
                        s_full_barrier(tile, barriers, query_tile, kv_tile, part), kv_tile // stages
                    )
                    ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
                words, sums, row_max, row_sum = self._part(
                    part, barriers, query_tile, kv_tile, index > 0, columns, row, start, row_max,
                    row_sum, logits,
                )  # fmt: skip
                if cutlass.const_expr(tile.separate_p):
                    if cutlass.const_expr(part == tile.parts - 1):
                        fence_and_arrive(barriers.s_empty.subview(query_tile), leader)
                    if cutlass.const_expr(part == 0):
                        if index > 0:
                            wait_o_full(tile, barriers, query_tile, kv_tile - 1)
                self._store(columns.p, part, words, quarter)
                row_sum = row_sum + fadd_reduce(sums)  # while the store is on its way
                ptx.tcgen05_wait(ptx.Tcgen05Wait.STORE)
                p_full = part_barrier(tile, barriers.p_full, query_tile, kv_tile, part)
                fence_and_arrive(p_full, leader)
        return SoftmaxState(row_max, row_sum)

    @cute.jit
    def _part(
        self,
        part: cutlass.Constexpr,
        barriers: Barriers,
        query_tile: Int32,
        kv_tile: Int32,
        follows: Boolean,
        columns: Columns,
        row: QueryRow,
        start: Int32,
        row_max: Float32,
        row_sum: Float32,
        logits: LogitScaling,
    ) -> tuple[list[Uint32], list[Float32], Float32, Float32]:
        """Compute P of a part of a key tile; return P, sums of P, new row_max and rescaled row_sum.

        If row_max grows, O is rescaled, too. The caller adds the sums to row_sum.

        Args:
            part: index of the part in the key tile.
            barriers: mbarriers of the CTA.
            query_tile: query tile of the warp.
            kv_tile: number of the key tile among all key tiles of the CTA's query tile.
            follows: whether this is not the first key tile of the rows.
            columns: tensor memory columns of the query tile.
            row: row of the thread.
            start: first key of the warp in this key tile.
            row_max: row_max before this part.
            row_sum: row_sum before this part.
            logits: scaling of S.
        """
        tile = self.tile
        start = start + self._first(part)
        words, sums = [Uint32(0)] * self._words(part), [Float32(0.0)] * SUMS
        done, slack = Boolean(False), Float32(tile.rescale_threshold)
        speculate = self._all_seen(part, row, start)
        if cutlass.const_expr(part == 0):
            speculate = speculate & follows
        if cutlass.const_expr(tile.batch_invariant):
            speculate = Boolean(False)
        if speculate:
            p = self._exp_speculative(columns.s, part, row_max, logits)
            words, sums = p.words, p.sums
            done = not p.overflow
            slack = Float32(0.0)
        if not done:
            scores = self._scores(columns.s, part, row, start, logits)
            found = fmax_reduce(scores) * self._log2_scale(logits)
            own = found - row_max > slack
            grows, rescale = self._any(own), Float32(1.0)
            if grows:
                before = row_max
                row_max = cute.arch.fmax(row_max, found)
                if cutlass.const_expr(tile.batch_invariant):
                    row_max = cutlass.select_(own, row_max, before)
                rescale = exp2(before - finite(row_max))
                row_sum = row_sum * rescale
            words, sums = self._exp(scores, row_max, logits)
            # Only now: while all of S is in registers, a thread has none left for O.
            if grows:
                if cutlass.const_expr(part > 0):
                    wait_o_full(tile, barriers, query_tile, kv_tile, part - 1)
                    self._rescale(columns.o, rescale)
                elif follows:
                    wait_o_full(tile, barriers, query_tile, kv_tile - 1)
                    self._rescale(columns.o, rescale)
        return words, sums, row_max, row_sum

    def _first(self, part: int) -> int:
        """Index of a part's first key among the warp's keys of a key tile."""
        return self.tile.first_key(part)

    def _keys(self, part: int) -> int:
        """Number of keys of a part that one warp processes."""
        return min(self.tile.part_keys[part], self.tile.warp_keys)

    def _words(self, part: int) -> int:
        """Number of 32-bit words of P per row, for a part."""
        return self._keys(part) * self.tile.element_bytes // 4

    def _all_seen(self, part: int, row: QueryRow, start: Int32) -> Boolean:
        """Whether every row of the warp sees all keys of a part."""
        return (start >= row.all_begin) & (start + self._keys(part) <= row.all_end)

    def _any(self, condition: Boolean) -> Boolean:
        """Whether ``condition`` holds for any row of the warp."""
        return ptx.vote_sync(cute.arch.FULL_MASK, condition, ptx.VoteSync.ANY)

    def _overflow(
        self, maxima: list[Float32], sums: list[Float32], row_max: Float32, logits: LogitScaling
    ) -> Boolean:
        """Whether P for ``row_max`` is too large in any row of the warp.

        No P exceeds the sum that includes it: a few sums bound all P. Emulated exponentials of
        logits above 128 are undefined: ``maxima`` bounds the logits of emulated exponentials. P for
        a ``row_max`` of −∞ is always too large.
        """
        overflow = fmax_reduce(sums) > Float32(self.tile.p_limit(self.variant.dtype))
        if maxima:
            largest = fmax_reduce(maxima) * self._log2_scale(logits)
            overflow = overflow | (largest - row_max > Float32(self.tile.rescale_threshold))
        else:
            overflow = overflow | (row_max == NEGATIVE_INFINITY)
        return self._any(overflow)

    def _log2_scale(self, logits: LogitScaling) -> Float32:
        """Factor that turns results of ``_soft_capped`` into base-2 logits."""
        return (logits.soft_cap if self.variant.soft_cap else logits.scale) * LOG2_E

    def _soft_capped(self, scores: list[Float32], logits: LogitScaling) -> list[Float32]:
        if not self.variant.soft_cap:
            return scores
        return [tanh(score * (logits.scale / logits.soft_cap)) for score in scores]

    def _shift(self, row_max: Float32) -> Float32:
        return Float32(self.tile.p_shift(self.variant.dtype)) - row_max

    def _exp_speculative(
        self, source: Int32, part: int, row_max: Float32, logits: LogitScaling
    ) -> Probabilities:
        """Compute P with the row_max of earlier keys, with loads, exp2 and sums pipelined."""
        tile = self.tile
        factor, shift = self._log2_scale(logits), self._shift(finite(row_max))
        begin, keys = self._first(part), self._keys(part)
        words: list[Uint32] = []
        sums: list[Float32] = []
        maxima = []
        powers: list[Float32] = []
        following = load_columns(source + begin, LOAD_COLUMNS)
        for first in range(0, keys, LOAD_COLUMNS):
            ptx.tcgen05_wait(ptx.Tcgen05Wait.LOAD)
            scores = self._soft_capped(following, logits)
            if first + LOAD_COLUMNS < keys:
                following = load_columns(source + begin + first + LOAD_COLUMNS, LOAD_COLUMNS)
            if powers:
                words += self._converted(powers)
                sums = add_folded(sums, powers)
            scaled = fma_packed(scores, factor, shift)
            powers = exp2_mixed(scaled, tile.emulated_exp2, tile.exp2_degree)
            emulated = emulated_among(scores, tile.emulated_exp2)
            maxima += [fmax_reduce(emulated)] if emulated else []
        words += self._converted(powers)
        sums = add_folded(sums, powers)
        return Probabilities(words, sums, self._overflow(maxima, sums, row_max, logits))

    @cute.jit
    def _scores(
        self,
        source: Int32,
        part: cutlass.Constexpr,
        row: QueryRow,
        start: Int32,
        logits: LogitScaling,
    ) -> list[Float32]:
        """Load and soft-cap S of a part of a key tile; −∞ for keys that the row does not see."""
        scores = self._soft_capped(self._load(source, part), logits)
        if not self._all_seen(part, row, start):
            scores = self._mask(scores, row.begin - start, row.end - start)
        return scores

    def _load(self, source: Int32, part: int) -> list[Float32]:
        scores: list[Float32] = []
        for first in range(0, self._keys(part), LOAD_COLUMNS):
            scores += load_columns(source + self._first(part) + first, LOAD_COLUMNS)
        ptx.tcgen05_wait(ptx.Tcgen05Wait.LOAD)
        return scores

    def _exp(
        self, scores: list[Float32], row_max: Float32, logits: LogitScaling
    ) -> tuple[list[Uint32], list[Float32]]:
        """Compute P from scores; also return sums of P before rounding."""
        factor, shift = self._log2_scale(logits), self._shift(finite(row_max))
        words: list[Uint32] = []
        sums: list[Float32] = []
        for first in range(0, len(scores), LOAD_COLUMNS):
            scaled = fma_packed(scores[first : first + LOAD_COLUMNS], factor, shift)
            powers = exp2_mixed(scaled, self.tile.emulated_exp2, self.tile.exp2_degree)
            sums = add_folded(sums, powers)
            words += self._converted(powers)
        return words, sums

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

    def _store(self, target: Int32, part: int, words: list[Uint32], quarter: Int32) -> None:
        """Store P of this warp's keys; if warps split the keys, zeros for other warps' keys."""
        if not self.tile.warp_split_kv:
            self._store_words(target + self.tile.p_offset(part), words)
            return
        for other in range(1, WARPS):
            peer = (quarter + other) % WARPS
            self._store_words(target + peer * len(words), [Uint32(0)] * len(words))
        self._store_words(target + quarter * len(words), words)

    def _store_words(self, target: Int32, words: list[Uint32]) -> None:
        """Store words to consecutive columns, by stores whose widths are powers of two."""
        first = 0
        while first < len(words):
            width = 1 << (len(words) - first).bit_length() - 1
            vector = Vector.from_elements(tuple(words[first : first + width]), Uint32)
            ptx.tcgen05_st(SHAPE, tensor_pointer(target + first), vector)
            first += width

    @cute.jit
    def _rescale(self, output: Int32, rescale: Float32) -> None:
        """Multiply O of this warp's rows by each row's ``rescale``."""
        for first in cutlass.range_constexpr(0, self.tile.head_dim, LOAD_COLUMNS):
            values = load_columns(output + first, LOAD_COLUMNS)
            ptx.tcgen05_wait(ptx.Tcgen05Wait.LOAD)
            scaled = Vector.from_elements(tuple(mul_packed(values, rescale)), Float32)
            ptx.tcgen05_st(SHAPE, tensor_pointer(output + first), scaled)
