"""A warp's main loop: flash attention of one token's heads to every step's keys."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.decode_attention.sm90.loader import Cache, Loader, Ring
from nvfp4_kernels.decode_attention.sm90.scheduler import Work
from nvfp4_kernels.decode_attention.sm90.tile import KEYS, DecodeTile, Variant
from nvfp4_kernels.decode_attention.sm90.token import Token, place_of
from nvfp4_kernels.device.math import LOG2_E, NEGATIVE_INFINITY, exp2, finite, tanh
from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.sm90.warp_mma import multiply


@dataclass(frozen=True)
class Logits:
    """From products to logits in units of ln 2.

    Attributes:
        scale: of ``q · k``.
        soft_cap: unused without one.
    """

    scale: Float32
    soft_cap: Float32


@dataclass(frozen=True)
class Part:
    """Some keys' part of the result, not yet divided by its sum.

    Of each eight heads, lane L has peak and weight of head L // 4, the weight of its own keys only,
    and sums of heads 2 (L % 4) and the next.

    Attributes:
        peaks: the largest logits so far.
        weights: Σ 2^(logit − peak).
        sums: Σ 2^(logit − peak) · V, fragments of ``mma.sync`` [eight, 16 of D, 4].
    """

    peaks: list[Float32]
    weights: list[Float32]
    sums: list[list[Float32]]


@dataclass(frozen=True)
class Decoder:
    """Role of every warp.

    Heads are rows of Q·Kᵀ, and columns of Vᵀ·Pᵀ: that way round what ``mma.sync`` leaves is what it
    takes next, and eight heads cost no more than they need.
    """

    tile: DecodeTile
    variant: Variant

    @cute.jit
    def run(
        self,
        cache: Cache,
        ring: Ring,
        work: Work,
        queries: list[list[Uint32]],
        key: Vector,
        value: Vector,
        logits: Logits,
        leader: Boolean,
    ) -> Part:
        """All steps of a warp; ``key`` and ``value`` are the token's own, as ``Token.piece``."""
        tile, stages = self.tile, self.tile.stages
        loader, token = Loader(tile, self.variant), Token(tile, self.variant)
        peaks = [Float32(NEGATIVE_INFINITY)] * tile.eights
        weights = [Float32(0.0)] * tile.eights
        sums = [[Float32(0.0)] * (4 * tile.steps) for _ in range(tile.eights)]
        pages = loader.pages(cache, work, Int32(stages))
        for index in cutlass.range(work.steps, unroll=1):
            following = loader.pages(cache, work, index + (stages + 1))
            stage = ring.data.subview(index % stages * (tile.stage_bytes // 4))
            start = (work.first + index * tile.round) * KEYS
            wait(ring.full.subview(index % stages), index // stages)
            if work.stores and index == work.steps - 1:
                token.put(cache, stage, key, value, work, work.end - 1 - start)
            boxes = [stage.subview(box * (tile.box_bytes // 4)) for box in range(tile.boxes)]
            scores = self._scores(boxes, queries)
            words = []
            for eight in cutlass.range_constexpr(tile.eights):
                own = [each[2 * eight + c] for each in scores for c in range(2)]
                own = self._masked(self._scaled(own, logits), work, start)
                peak = cute.arch.fmax(peaks[eight], self._largest(own))
                powers = [exp2(logit - finite(peak)) for logit in own]
                fade = exp2(peaks[eight] - finite(peak))
                peaks[eight] = peak
                weights[eight] = weights[eight] * fade + _sum(powers)
                sums[eight] = self._faded(sums[eight], fade)
                words.append(self._rounded(powers))
            sums = self._add(boxes, words, sums)
            ptx.bar_warp_sync(cute.arch.FULL_MASK)
            loader.bring(cache, ring, work, index + stages, pages, leader)
            pages = following
        return Part(peaks, weights, sums)

    def _scores(self, boxes: list[Array], queries: list[list[Uint32]]) -> list[list[Float32]]:
        """Of each eight keys: two of head L // 4, then of the head eight on."""
        # Even and odd steps apart: a sum waits half as often for the one before.
        eights = 2 * len(boxes)
        chains = [[Float32(0.0)] * 4 for _ in range(2 * eights)]
        for step in range(self.tile.steps):
            words = [word for box in boxes for word in self._load(box, step, "")]
            for eight in range(eights):
                own, chain = words[2 * eight : 2 * eight + 2], step % 2 * eights + eight
                chains[chain] = multiply(chains[chain], queries[step], own, self.variant.dtype)
        pairs = (zip(chains[eight], chains[eights + eight], strict=True) for eight in range(eights))
        return [[even + odd for even, odd in pair] for pair in pairs]

    def _add(
        self, boxes: list[Array], words: list[list[Uint32]], sums: list[list[Float32]]
    ) -> list[list[Float32]]:
        added: list[list[Float32]] = [[] for _ in sums]
        for step in range(self.tile.steps):
            values = [self._load(box, self.tile.steps + step, ".trans") for box in boxes]
            for eight, before in enumerate(sums):
                own = before[4 * step : 4 * step + 4]
                for box, value in enumerate(values):
                    powers = words[eight][2 * box : 2 * box + 2]
                    own = multiply(own, value, powers, self.variant.dtype)
                added[eight] += own
        return added

    def _load(self, box: Array, step: int, turned: str) -> list[Uint32]:
        """16 of D of a box, halves of the first eight keys, then of the rest: B; or turned, A."""
        lane = cute.arch.lane_idx()
        row = lane % 8 + lane // 16 * 8
        address = box.subview(place_of(2 * step + lane // 8 % 2, row)).data_ptr().toint()
        return list(
            ptx.inline_ptx(
                f"ldmatrix.sync.aligned.m8n8.x4{turned}.shared.b16 "
                "{{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                write_only_types=[Uint32] * 4,
                read_only_args=[Int32(address)],
            )
        )

    def _scaled(self, scores: list[Float32], logits: Logits) -> list[Float32]:
        if not self.variant.soft_cap:
            return [score * (logits.scale * LOG2_E) for score in scores]
        inner, outer = logits.scale / logits.soft_cap, logits.soft_cap * LOG2_E
        return [tanh(score * inner) * outer for score in scores]

    def _masked(self, logits: list[Float32], work: Work, start: Int32) -> list[Float32]:
        """−∞ for keys that the token does not see."""
        first = start + cute.arch.lane_idx() % 4 * 2
        masked = []
        for index, logit in enumerate(logits):
            key = first + (index // 2 * 8 + index % 2)
            seen = key < work.end
            if self.variant.window:
                seen = seen & (key >= work.begin)
            masked.append(cutlass.select_(seen, logit, Float32(NEGATIVE_INFINITY)))
        return masked

    def _largest(self, logits: list[Float32]) -> Float32:
        """Of a head, in all four of its lanes."""
        top = logits[0]
        for logit in logits[1:]:
            top = cute.arch.fmax(top, logit)
        for distance in (1, 2):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, distance))
        return top

    def _faded(self, sums: list[Float32], fade: Float32) -> list[Float32]:
        """Times the factors of their heads, which other lanes have."""
        lane = cute.arch.lane_idx() % 4 * 8
        fades = [cute.arch.shuffle_sync(fade, lane + 4 * c) for c in range(2)]
        return [each * fades[index % 2] for index, each in enumerate(sums)]

    def _rounded(self, powers: list[Float32]) -> list[Uint32]:
        """B of the values' product."""
        dtype = TYPES[self.variant.dtype]
        values = Vector.from_elements(tuple(powers), Float32).to(dtype)
        return [Uint32(word) for word in values.bitcast(Uint32).to_elements()]


def _sum(values: list[Float32]) -> Float32:
    added = values[0]
    for each in values[1:]:
        added = added + each
    return added
