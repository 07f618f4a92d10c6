"""Main loop of a warp: flash attention of one token's heads to the keys of the warp's steps."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.decode.sm90.loader import Cache, Ring, TmaLoader
from nvfp4_kernels.attention.decode.sm90.scheduler import WorkTile
from nvfp4_kernels.attention.decode.sm90.tile import KEYS, DecodeTile, Variant
from nvfp4_kernels.attention.decode.sm90.token import NewToken, swizzled_word
from nvfp4_kernels.device.math import LOG2_E, NEGATIVE_INFINITY, exp2, finite, tanh
from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.sm90.warp_mma import multiply


class LogitScaling(NamedTuple):
    """Factors that turn Q·Kᵀ into base-2 logits, i.e. logits times log2(e).

    Attributes:
        scale: factor of ``q · k``.
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
        row_max: largest base-2 logit so far, per head tile.
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
    then operands of the second, in which 8 heads need no padding to 16.
    """

    tile: DecodeTile
    variant: Variant

    @cute.jit
    def run(
        self,
        cache: Cache,
        ring: Ring,
        work: WorkTile,
        queries: list[list[Uint32]],
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
            scores = self._scores(boxes, queries)
            p = []
            for head_tile in cutlass.range_constexpr(tile.head_tiles):
                own = [each[2 * head_tile + c] for each in scores for c in range(2)]
                own = self._masked(self._scaled(own, logits), work, start)
                new_max = cute.arch.fmax(row_max[head_tile], self._row_max(own))
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
        for step in range(self.tile.steps):
            words = [word for box in boxes for word in self._load(box, step, "")]
            for key_tile in range(key_tiles):
                own = words[2 * key_tile : 2 * key_tile + 2]
                chain = step % 2 * key_tiles + key_tile
                chains[chain] = multiply(chains[chain], queries[step], own, self.variant.dtype)
        pairs = (zip(chains[n], chains[key_tiles + n], strict=True) for n in range(key_tiles))
        return [[even + odd for even, odd in pair] for pair in pairs]

    def _accumulate(
        self, boxes: list[Array], p: list[list[Uint32]], o: list[list[Float32]]
    ) -> list[list[Float32]]:
        """Add a step's Vᵀ·Pᵀ to O."""
        results: list[list[Float32]] = [[] for _ in o]
        for step in range(self.tile.steps):
            values = [self._load(box, self.tile.steps + step, ".trans") for box in boxes]
            for head_tile, before in enumerate(o):
                own = before[4 * step : 4 * step + 4]
                for box, value in enumerate(values):
                    words = p[head_tile][2 * box : 2 * box + 2]
                    own = multiply(own, value, words, self.variant.dtype)
                results[head_tile] += own
        return results

    def _load(self, box: Array, step: int, transposed: str) -> list[Uint32]:
        """Load 16 columns of a box: B fragments of K (keys 0–7 first) or, transposed, A of V."""
        lane = cute.arch.lane_idx()
        row = lane % 8 + lane // 16 * 8
        address = box.subview(swizzled_word(2 * step + lane // 8 % 2, row)).data_ptr().toint()
        return list(
            ptx.inline_ptx(
                f"ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 "
                "{{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                write_only_types=[Uint32] * 4,
                read_only_args=[Int32(address)],
            )
        )

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

    def _row_max(self, logits: list[Float32]) -> Float32:
        """Largest logit of a head, in all four lanes that hold the head's logits."""
        largest = logits[0]
        for logit in logits[1:]:
            largest = cute.arch.fmax(largest, logit)
        for distance in (1, 2):
            peer = cute.arch.shuffle_sync_bfly(largest, distance)
            largest = cute.arch.fmax(largest, peer)
        return largest

    def _rescaled(self, o: list[Float32], rescale: Float32) -> list[Float32]:
        """Multiply O by each head's ``rescale``, fetched from other lanes."""
        lane = cute.arch.lane_idx() % 4 * 8
        factors = [cute.arch.shuffle_sync(rescale, lane + 4 * c) for c in range(2)]
        return [each * factors[index % 2] for index, each in enumerate(o)]

    def _converted(self, powers: list[Float32]) -> list[Uint32]:
        """Convert P to B fragments of Vᵀ·Pᵀ."""
        dtype = TYPES[self.variant.dtype]
        values = Vector.from_elements(tuple(powers), Float32).to(dtype)
        return [Uint32(word) for word in values.bitcast(Uint32).to_elements()]


def _sum(values: list[Float32]) -> Float32:
    total = values[0]
    for each in values[1:]:
        total = total + each
    return total
