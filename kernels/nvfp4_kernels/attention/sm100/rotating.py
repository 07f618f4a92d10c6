"""Rotary embedding of queries on load, and of new keys before the store to the cache."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Int64, Uint8, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.sm100.math import fmax_reduce, to_e4m3
from nvfp4_kernels.attention.sm100.queries import VECTOR, Queries, QueryLoader, row_scale
from nvfp4_kernels.attention.sm100.rows import swizzled_offset
from nvfp4_kernels.attention.sm100.scheduler import QueryRow, WorkTile
from nvfp4_kernels.attention.sm100.tile import KEYS, AttentionTile, Rotation, Variant
from nvfp4_kernels.device.divisor import Divisor
from nvfp4_kernels.device.widen import widen
from nvfp4_kernels.rotary.store import head as store
from nvfp4_kernels.rotary.store.head import Heads, Part, part_of
from nvfp4_kernels.rotary.store.pages import PagedCache, TokenHeads, store_pair
from nvfp4_kernels.rotary.store.tile import PIECE
from nvfp4_kernels.sm100.limits import WARP_ROWS


class RotationArguments(NamedTuple):
    """Arguments of the fused rotary embedding and KV-cache store.

    Attributes:
        new_k, new_v: keys and values of the queries' tokens.
        cache: KV cache, written.
        slots: int64 [tokens], negative for a token that is not stored.
        table: [positions, R], R/2 cosines and R/2 sines.
        q_norm, k_norm: [D]; null without a norm.
        eps: added to the mean square of a head before the norm's root.
        settled: 1 if lengths, pages and the keys of earlier tokens may be read before the preceding
            kernel ends, else 0.
    """

    new_k: TokenHeads
    new_v: TokenHeads
    cache: PagedCache
    slots: cute.Pointer
    table: cute.Pointer
    q_norm: cute.Pointer
    k_norm: cute.Pointer
    eps: Float32
    settled: Int32


@dataclass(frozen=True)
class RotatingQueryLoader:
    """Prologue of the softmax warps: ``QueryLoader`` with norm and rotary embedding of queries.

    A token's position is the index of its key in the sequence.
    """

    tile: AttentionTile
    variant: Variant
    rotation: Rotation

    @cute.jit
    def run(
        self,
        queries: Queries,
        arguments: RotationArguments,
        shared: Array,
        work: WorkTile,
        row: QueryRow,
        warp: Int32,
    ) -> Float32:
        """Load and rotate the warp's rows of a query tile, zeros past the last row.

        Returns the E4M3 scale of this thread's row; 1 for 16-bit queries.
        """
        head, lane = self.rotation.heads, cute.arch.lane_idx()
        heads, part = Heads(head, self.rotation.store), part_of(head, lane % head.lanes)
        start = QueryLoader(self.tile, self.variant).row_units(queries, work, row)
        at_once, scale = WARP_ROWS // head.lanes, Float32(1.0)
        factors: list[Vector] = []
        if cutlass.const_expr(self.rotation.store.q_norm):
            factors = heads.factors(arguments.q_norm, part)
        # Existing rows of a warp come first.
        there = cute.arch.popc(cute.arch.vote_ballot_sync(start >= 0))
        steps = cute.ceil_div(Int32(there), at_once)
        for step in cutlass.range(steps, head.lanes, unroll=1):
            self._zero(shared, warp * WARP_ROWS + step * at_once + lane // head.lanes, part)
        for step in cutlass.range(steps, unroll=1):
            source = step * at_once + lane // head.lanes
            units = cute.arch.shuffle_sync(start, source)
            token = cute.arch.shuffle_sync(row.token, source)
            target = warp * WARP_ROWS + source
            position = cutlass.select_(units >= 0, cutlass.max(work.position + token, 0), Int32(0))
            begin = Int64(cutlass.max(units, 0)) * VECTOR
            pieces = heads.pieces(queries.q, begin, part)
            angles = heads.angles(arguments.table, Int64(position), part)
            if cutlass.const_expr(self.rotation.store.q_norm):
                pieces = heads.normalised(pieces, factors, part, arguments.eps)
            pieces = heads.rotated(pieces, angles, part)
            if cutlass.const_expr(not self.tile.fp8):
                self._copy(shared, target, part, pieces)
            else:
                found = self._quantize(shared, target, part, pieces)
                # Back to the thread that has this row in the softmax.
                of_row = cute.arch.shuffle_sync(found, lane % at_once * head.lanes)
                scale = cutlass.select_(lane // at_once == step, of_row, scale)
        ptx.fence_proxy(ptx.Proxy.ASYNC_SHARED, space=ptx.SharedSpace.shared_cta)
        return scale

    @cute.jit
    def _copy(self, shared: Array, row: Int32, part: Part, pieces: list[Vector]) -> None:
        if part.live:
            for piece, first in zip(pieces, (part.first, part.second), strict=True):
                offset = swizzled_offset(self.tile.row_bytes, row, first * 2)
                shared.store(piece.bitcast(Uint8), offset, alignment=16)

    @cute.jit
    def _quantize(self, shared: Array, row: Int32, part: Part, pieces: list[Vector]) -> Float32:
        """Quantise a row to E4M3 and store the codes to shared memory; return the row's scale."""
        values = [list(widen(piece).to_elements()) for piece in pieces]
        amax = fmax_reduce([cute.math.abs(value) for piece in values for value in piece])
        distance = 1
        while distance < self.rotation.heads.lanes:
            amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, distance))
            distance *= 2
        scale = row_scale(amax)
        inverse = 1.0 / scale
        if part.live:
            for piece, first in zip(values, (part.first, part.second), strict=True):
                words = to_e4m3([value * inverse for value in piece])
                packed = Vector.from_elements(tuple(words), Uint32).bitcast(Uint8)
                offset = swizzled_offset(self.tile.row_bytes, row, first)
                shared.store(packed, offset, alignment=PIECE)
        return scale

    @cute.jit
    def _zero(self, shared: Array, row: Int32, part: Part) -> None:
        width = self.tile.element_bytes
        zeros = Vector.from_elements((0,) * (PIECE * width // 4), Uint32).bitcast(Uint8)
        if part.live:
            for first in (part.first, part.second):
                offset = swizzled_offset(self.tile.row_bytes, row, first * width)
                shared.store(zeros, offset, alignment=PIECE * width)


@dataclass(frozen=True)
class NewKeys:
    """Store of the query tokens' own keys and values into the cache, by the load warp.

    Each CTA stores the new keys within the CTA's key tiles, then loads these tiles with TMA.
    """

    variant: Variant

    @property
    def rotation(self) -> Rotation:
        """Rotation of the variant."""
        assert self.variant.rotation is not None
        return self.variant.rotation

    def first_tile(self, work: WorkTile) -> Int32:
        """Index of the first key tile with a new key among the CTA's key tiles."""
        return cutlass.max(work.position // KEYS - work.first_tile, 0)

    @cute.jit
    def run(
        self,
        arguments: RotationArguments,
        k_scale: cute.Pointer,
        v_scale: cute.Pointer,
        work: WorkTile,
    ) -> None:
        """Normalise and rotate the new keys of the CTA's key tiles; store keys and values."""
        head, how, lane = self.rotation.heads, self.rotation.store, cute.arch.lane_idx()
        heads, part = Heads(head, how), part_of(head, lane % head.lanes)
        divisors: list[Divisor] = []
        if cutlass.const_expr(how.fp8):
            divisors = [
                Divisor.of(Float32(Array(each, shape=(1,)).load(0))) for each in (k_scale, v_scale)
            ]
        factors: list[Vector] = []
        if cutlass.const_expr(how.k_norm):
            factors = heads.factors(arguments.k_norm, part)
        queries, begin = work.rows // work.group, work.first_tile * KEYS
        end = begin + work.tiles[0] * KEYS
        for first in cutlass.range(0, queries, WARP_ROWS // head.lanes, unroll=1):
            token = first + lane // head.lanes
            inside = cutlass.min(token, queries - 1)
            position, index = work.position + inside, work.first_query + inside
            slot = Array(arguments.slots, shape=(1,)).load(Int64(index))
            own: Boolean = (token == inside) & (position >= begin) & (position < end) & (slot >= 0)
            angles = heads.angles(arguments.table, Int64(cutlass.max(position, 0)), part)
            key, value = (
                heads.pieces(new.data, new.start(index, work.kv_head), part)
                for new in (arguments.new_k, arguments.new_v)
            )
            if cutlass.const_expr(how.k_norm):
                key = heads.normalised(key, factors, part, arguments.eps)
            key = heads.rotated(key, angles, part)
            if cutlass.const_expr(how.fp8):
                key, value = (
                    [store.to_e4m3(piece, divisor) for piece in pieces]
                    for pieces, divisor in zip((key, value), divisors, strict=True)
                )
            if own & part.live:
                store_pair(
                    how, arguments.cache, slot, work.kv_head, part, key, value, head.head_dim
                )
        # TMA reads the stored keys next, issued by the lane with their page.
        ptx.fence_proxy(ptx.Proxy.ASYNC_GLOBAL)
        ptx.bar_warp_sync(cute.arch.FULL_MASK)
