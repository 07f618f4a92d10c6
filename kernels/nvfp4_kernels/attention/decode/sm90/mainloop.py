"""Main loop of a warp: flash attention of one token's heads to the keys of the warp's steps."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.decode.sm90.loader import Cache, Ring, TmaLoader
from nvfp4_kernels.attention.decode.sm90.scheduler import WorkTile
from nvfp4_kernels.attention.decode.sm90.tile import KEYS, DecodeTile, Variant
from nvfp4_kernels.attention.decode.sm90.token import NewToken, Queries, swizzled_word
from nvfp4_kernels.device.math import LOG2_E, NEGATIVE_INFINITY, exp2, finite, tanh
from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.device.widen import e4m3_to_float16
from nvfp4_kernels.sm90.limits import ActDtype
from nvfp4_kernels.sm90.warp_mma import multiply

# Exponent of the largest P, by its dtype: float16 would lose the smallest P of long sequences.
P_EXPONENT = {"bfloat16": 0, "float16": 15}
# Selector of prmt: bytes 0, 2, 1, 3.
EVEN_THEN_ODD = 0x3120


class LogitScaling(NamedTuple):
    """Factors that turn Q·Kᵀ into base-2 logits, i.e. logits times log2(e).

    Attributes:
        scale: factor of ``q · k``, with keys as stored.
        soft_cap: soft cap of logits; unused unless ``Variant.soft_cap``.
    """

    scale: Float32
    soft_cap: Float32


@dataclass(frozen=True)
class PartialResult:
    """Partial result over a warp's keys, not yet divided by row_sum.

    For each tile of 8 heads, lane L has row_max of head L // 4, row_sum of that head over the
    lane's own keys only, and O of heads 2 (L % 4) and 2 (L % 4) + 1.

    Attributes:
        row_max: largest base-2 logit so far, per head tile, less ``P_EXPONENT``.
        row_sum: Σ 2^(logit − row_max), per head tile.
        o: Σ 2^(logit − row_max) · V, accumulators of ``mma.sync`` [head tile, D/16 · 4].
    """

    row_max: list[Float32]
    row_sum: list[Float32]
    o: list[list[Float32]]


@dataclass(frozen=True)
class Mainloop:
    """Main loop of every warp.

    Heads are the M side of Q·Kᵀ and the N side of Vᵀ·Pᵀ: accumulators of the first ``mma.sync`` are
    then operands of the second, in which 8 heads need no padding to 16. E4M3 keys and values are
    converted to float16, as are the other operands, exactly but for P.
    """

    tile: DecodeTile
    variant: Variant

    @property
    def mma_dtype(self) -> ActDtype:
        """Dtype of all operands of ``mma.sync``."""
        return "float16" if self.tile.fp8 else self.variant.dtype

    @cute.jit
    def run(
        self,
        cache: Cache,
        ring: Ring,
        work: WorkTile,
        queries: Queries,
        key: Vector,
        value: Vector,
        logits: LogitScaling,
        leader: Boolean,
    ) -> PartialResult:
        """Process the warp's steps; ``queries``, ``key``, ``value``: loaded by ``NewToken``."""
        tile, stages = self.tile, self.tile.stages
        loader, token = TmaLoader(tile, self.variant), NewToken(tile, self.variant)
        row_max = [Float32(NEGATIVE_INFINITY)] * tile.head_tiles
        row_sum = [Float32(0.0)] * tile.head_tiles
        o = [[Float32(0.0)] * (4 * tile.steps) for _ in range(tile.head_tiles)]
        pages = loader.pages(cache, work, Int32(stages))
        for index in cutlass.range(work.steps, unroll=1):
            following = loader.pages(cache, work, index + (stages + 1))
            stage = ring.data.subview(index % stages * (tile.stage_bytes // 4))
            start = (work.first + index * tile.step_stride) * KEYS
            wait(ring.full.subview(index % stages), index // stages)
            if work.stores and index == work.steps - 1:
                token.store(cache, stage, key, value, work, work.end - 1 - start)
            boxes = [stage.subview(box * (tile.box_bytes // 4)) for box in range(tile.boxes)]
            scores = self._scores(boxes, queries.fragments)
            p = []
            for head_tile in cutlass.range_constexpr(tile.head_tiles):
                own = [each[2 * head_tile + c] for each in scores for c in range(2)]
                own = self._scaled(own, self._scaling(logits, queries, head_tile))
                own = self._masked(own, work, start)
                new_max = cute.arch.fmax(row_max[head_tile], self._peak(own))
                powers = [exp2(logit - finite(new_max)) for logit in own]
                rescale = exp2(row_max[head_tile] - finite(new_max))
                row_max[head_tile] = new_max
                row_sum[head_tile] = row_sum[head_tile] * rescale + _sum(powers)
                o[head_tile] = self._rescaled(o[head_tile], rescale)
                p.append(self._converted(powers))
            o = self._accumulate(boxes, p, o)
            ptx.bar_warp_sync(cute.arch.FULL_MASK)
            loader.load_step(cache, ring, work, index + stages, pages, leader)
            pages = following
        return PartialResult(row_max, row_sum, o)

    def _scores(self, boxes: list[Array], queries: list[list[Uint32]]) -> list[list[Float32]]:
        """Compute Q·Kᵀ, per 8 keys: in lane L two scores of head L // 4, two of head L // 4 + 8."""
        # Even and odd steps have accumulators of their own: shorter chains of dependent MMAs.
        key_tiles = 2 * len(boxes)
        chains = [[Float32(0.0)] * 4 for _ in range(2 * key_tiles)]
        for step, words in enumerate(self._keys(boxes)):
            for key_tile in range(key_tiles):
                own = words[2 * key_tile : 2 * key_tile + 2]
                chain = step % 2 * key_tiles + key_tile
                chains[chain] = multiply(chains[chain], queries[step], own, self.mma_dtype)
        pairs = (zip(chains[n], chains[key_tiles + n], strict=True) for n in range(key_tiles))
        return [[even + odd for even, odd in pair] for pair in pairs]

    def _accumulate(
        self, boxes: list[Array], p: list[list[Uint32]], o: list[list[Float32]]
    ) -> list[list[Float32]]:
        """Add a step's Vᵀ·Pᵀ to O."""
        results: list[list[Float32]] = [[] for _ in o]
        for step, values in enumerate(self._values(boxes)):
            for head_tile, before in enumerate(o):
                own = before[4 * step : 4 * step + 4]
                for box, value in enumerate(values):
                    words = p[head_tile][2 * box : 2 * box + 2]
                    own = multiply(own, value, words, self.mma_dtype)
                results[head_tile] += own
        return results

    def _keys(self, boxes: list[Array]) -> Iterator[list[Uint32]]:
        """B fragments of K, two words per 8 keys, for each 16 elements of D."""
        if not self.tile.fp8:
            for step in range(self.tile.steps):
                yield [word for box in boxes for word in self._load(box, step, "")]
            return
        for pair in range(self.tile.steps // 2):
            loaded = [self._load(box, pair, "") for box in boxes]
            for half in range(2):
                words = [each[2 * key_tile + half] for each in loaded for key_tile in range(2)]
                yield [wide for word in words for wide in e4m3_to_float16(word)]

    def _values(self, boxes: list[Array]) -> Iterator[list[list[Uint32]]]:
        """A fragments of Vᵀ, one per box, for each 16 elements of D.

        Rows r and r + 8 are elements r and r + 8 of D or, of E4M3 values, 2 r and 2 r + 1: a loaded
        word has these two elements of two keys.
        """
        steps = self.tile.steps
        if not self.tile.fp8:
            for step in range(steps):
                yield [self._load(box, steps + step, ".trans") for box in boxes]
            return
        for pair in range(steps // 2):
            loaded = [self._load(box, steps // 2 + pair, ".trans") for box in boxes]
            for half in range(2):
                yield [
                    [
                        wide
                        for word in each[half::2]
                        for wide in e4m3_to_float16(_even_then_odd(word))
                    ]
                    for each in loaded
                ]

    def _load(self, box: Array, vectors: int, transposed: str) -> list[Uint32]:
        """Load the ``vectors``-th two 16-byte vectors of a box's rows.

        Of each lane, a word of keys 0–7 and either vector, then of keys 8–15; ``transposed``: of
        neighbouring keys, which are then the words' halves.
        """
        lane = cute.arch.lane_idx()
        row = lane % 8 + lane // 16 * 8
        address = (
            box.subview(swizzled_word(self.tile, 2 * vectors + lane // 8 % 2, row))
            .data_ptr()
            .toint()
        )
        return list(
            ptx.inline_ptx(
                f"ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 "
                "{{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                write_only_types=[Uint32] * 4,
                read_only_args=[Int32(address)],
            )
        )

    def _scaling(self, logits: LogitScaling, queries: Queries, head_tile: int) -> LogitScaling:
        """``logits`` with the factor of a head tile's queries."""
        if not queries.factors:
            return logits
        return LogitScaling(logits.scale * queries.factors[head_tile], logits.soft_cap)

    def _scaled(self, scores: list[Float32], logits: LogitScaling) -> list[Float32]:
        """Convert scores to base-2 logits, soft-capped if the variant has a soft cap."""
        if not self.variant.soft_cap:
            return [score * (logits.scale * LOG2_E) for score in scores]
        inner, outer = logits.scale / logits.soft_cap, logits.soft_cap * LOG2_E
        return [tanh(score * inner) * outer for score in scores]

    def _masked(self, logits: list[Float32], work: WorkTile, start: Int32) -> list[Float32]:
        """Logits of keys from ``start`` on, with −∞ for keys that the token does not see."""
        first = start + cute.arch.lane_idx() % 4 * 2
        masked = []
        for index, logit in enumerate(logits):
            key = first + (index // 2 * 8 + index % 2)
            seen = key < work.end
            if self.variant.window:
                seen = seen & (key >= work.begin)
            masked.append(cutlass.select_(seen, logit, Float32(NEGATIVE_INFINITY)))
        return masked

    def _peak(self, logits: list[Float32]) -> Float32:
        """Largest logit of a head less ``P_EXPONENT``, in all four lanes with the head's logits."""
        largest = logits[0]
        for logit in logits[1:]:
            largest = cute.arch.fmax(largest, logit)
        for distance in (1, 2):
            peer = cute.arch.shuffle_sync_bfly(largest, distance)
            largest = cute.arch.fmax(largest, peer)
        exponent = P_EXPONENT[self.mma_dtype]
        return largest - Float32(exponent) if exponent else largest

    def _rescaled(self, o: list[Float32], rescale: Float32) -> list[Float32]:
        """Multiply O by each head's ``rescale``, fetched from other lanes."""
        lane = cute.arch.lane_idx() % 4 * 8
        factors = [cute.arch.shuffle_sync(rescale, lane + 4 * c) for c in range(2)]
        return [each * factors[index % 2] for index, each in enumerate(o)]

    def _converted(self, powers: list[Float32]) -> list[Uint32]:
        """Convert P to B fragments of Vᵀ·Pᵀ."""
        dtype = TYPES[self.mma_dtype]
        values = Vector.from_elements(tuple(powers), Float32).to(dtype)
        return [Uint32(word) for word in values.bitcast(Uint32).to_elements()]


def _even_then_odd(word: Uint32) -> Uint32:
    """Bytes 0 and 2, then 1 and 3."""
    return Uint32(cute.arch.prmt(word, word, EVEN_THEN_ODD))


def _sum(values: list[Float32]) -> Float32:
    total = values[0]
    for each in values[1:]:
        total = total + each
    return total
