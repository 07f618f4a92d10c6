"""The kernel of ``rotary_store`` on sm_90 and sm_100."""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Int64, Uint8, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.device.divisor import Divisor
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.rotary.store.head import LOAD_BYTES, Heads, Part, part_of, to_e4m3
from nvfp4_kernels.rotary.store.pages import PagedCache, TokenHeads, store_pair
from nvfp4_kernels.rotary.store.tile import RotaryStoreTile, Variant

POSITION_TYPES = {"int64": Int64, "int32": Int32}


class RotaryStoreArguments(NamedTuple):
    """Arguments of a launch, in global memory.

    Attributes:
        q, k, v: queries, keys and values.
        out: rotated queries [tokens, Hq, D].
        cache: KV cache, written.
        positions: [tokens].
        slots: int64 [tokens], negative for a token that is not stored.
        table: [positions, R], R/2 cosines and R/2 sines.
        q_norm, k_norm: [D]; null without a norm.
        k_scale, v_scale: float32; null unless the cache is E4M3.
        eps: number added to mean squares.
        tokens: number of tokens.
    """

    q: TokenHeads
    k: TokenHeads
    v: TokenHeads
    out: cute.Pointer
    cache: PagedCache
    positions: cute.Pointer
    slots: cute.Pointer
    table: cute.Pointer
    q_norm: cute.Pointer
    k_norm: cute.Pointer
    k_scale: cute.Pointer
    v_scale: cute.Pointer
    eps: Float32
    tokens: Int32


@dataclass(frozen=True)
class RotaryStore:
    """One compiled variant: the first CTAs process query heads, the others keys and values.

    All threads of a CTA have the same role, and warps stay converged, as a norm's sum is a shuffle
    reduction over a head's threads. A thread without elements re-reads elements of another thread
    of the warp, and writes nothing. A warp reads all of its heads before writing the first, and no
    other warp reads these heads: the result may alias the queries.

    Attributes:
        tile: thread layout.
        variant: dtypes, page size, pairing of elements, and enabled norms.
    """

    tile: RotaryStoreTile
    variant: Variant

    def signature(self) -> tuple[RotaryStoreArguments]:
        """Example arguments of ``__call__``, for ``cute.compile``."""
        variant = self.variant
        norm_type = TYPES[variant.norm_dtype]
        types = dict.fromkeys(("data", "out"), TYPES[variant.dtype])
        types |= {"pages": Uint8 if variant.fp8 else TYPES[variant.dtype]}
        types |= {"positions": POSITION_TYPES[variant.position_dtype], "slots": Int64}
        types |= {"table": TYPES[variant.table_dtype], "q_norm": norm_type, "k_norm": norm_type}
        types |= {"k_scale": Float32, "v_scale": Float32}
        alignment = {"positions": types["positions"].width // 8, "slots": 8}
        alignment |= {"k_scale": 4, "v_scale": 4}
        return (example(RotaryStoreArguments, types, alignment),)

    @cute.jit
    def __call__(self, arguments: RotaryStoreArguments, stream: cuda_driver.CUstream) -> None:
        """Launch CTAs for groups of query heads, followed by CTAs for KV heads."""
        self.kernel(arguments).launch(
            grid=(
                self._ctas(arguments.tokens, self.tile.query_units)
                + self._ctas(arguments.tokens, self.tile.kv_heads),
                1,
                1,
            ),
            block=(self.tile.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    def _ctas(self, tokens: Int32, units: int) -> Int32:
        """Number of CTAs that process all tokens, ``units`` units per token."""
        return cute.ceil_div(tokens * units, self.tile.units)

    @cute.kernel
    def kernel(self, arguments: RotaryStoreArguments) -> None:
        """Load the norm's weight before the wait for preceding kernels, then process heads."""
        tile, variant = self.tile, self.variant
        # At once: the next kernel may run up to its own wait.
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        unit, part = thread // tile.lanes, part_of(tile, thread % tile.lanes)
        query_ctas = self._ctas(arguments.tokens, tile.query_units)
        is_query = block < query_ctas
        factors: list[Vector] = []
        if cutlass.const_expr(variant.norms):
            factors = Heads(tile, variant).factors(self._weight(arguments, is_query), part)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        # In the last CTA whole warps may have no work.
        first = unit - cute.arch.lane_idx() // tile.lanes
        if is_query:
            if block * tile.units + first < arguments.tokens * tile.query_units:
                self._queries(arguments, block * tile.units + unit, part, factors)
        else:
            block -= query_ctas
            if block * tile.units + first < arguments.tokens * tile.kv_heads:
                self._pairs(arguments, block * tile.units + unit, part, factors)

    def _weight(self, arguments: RotaryStoreArguments, is_query: Boolean) -> cute.Pointer:
        """Weight of this CTA's norm; if that norm is absent, the other norm's weight."""
        if not self.variant.k_norm:
            return arguments.q_norm
        if not self.variant.q_norm:
            return arguments.k_norm
        address = cutlass.select_(is_query, arguments.q_norm.toint(), arguments.k_norm.toint())
        kind, space = arguments.q_norm.dtype, cute.AddressSpace.gmem
        return cute.make_ptr(kind, address, space, assumed_align=LOAD_BYTES)

    @cute.jit
    def _queries(
        self,
        arguments: RotaryStoreArguments,
        unit: Int32,
        part: Part,
        factors: list[Vector],
    ) -> None:
        """Normalise, rotate and store one unit: a group of a token's query heads."""
        tile, heads = self.tile, Heads(self.tile, self.variant)
        units = tile.query_units
        inside = cutlass.min(unit, arguments.tokens * units - 1)
        token, first = inside // units, inside % units
        numbers = [first + step * units for step in range(tile.steps)]
        clamped = [
            Int32(cutlass.select_(number < tile.query_heads, number, first)) for number in numbers
        ]
        position = self._position(arguments, token)
        loaded = [
            heads.pieces(arguments.q.data, arguments.q.start(token, head), part) for head in clamped
        ]
        _issued()
        angles = heads.angles(arguments.table, position, part)
        out = Array(arguments.out, shape=(1,))
        for step in cutlass.range_constexpr(tile.steps):
            pieces = loaded[step]
            if cutlass.const_expr(self.variant.q_norm):
                pieces = heads.normalised(pieces, factors, part, arguments.eps)
            pieces = heads.rotated(pieces, angles, part)
            start = (Int64(token) * tile.query_heads + Int64(clamped[step])) * tile.head_dim
            if (unit == inside) & part.live & (numbers[step] < tile.query_heads):
                out.store(pieces[0], start + part.first, alignment=LOAD_BYTES)
                out.store(pieces[1], start + part.second, alignment=LOAD_BYTES)

    @cute.jit
    def _pairs(
        self,
        arguments: RotaryStoreArguments,
        unit: Int32,
        part: Part,
        factors: list[Vector],
    ) -> None:
        """Normalise and rotate the key of one unit; store the key and its value in the cache."""
        tile, variant, heads = self.tile, self.variant, Heads(self.tile, self.variant)
        inside = cutlass.min(unit, arguments.tokens * tile.kv_heads - 1)
        token, head = inside // tile.kv_heads, inside % tile.kv_heads
        slot = Array(arguments.slots, shape=(1,)).load(Int64(token))
        position = self._position(arguments, token)
        key = heads.pieces(arguments.k.data, arguments.k.start(token, head), part)
        value = heads.pieces(arguments.v.data, arguments.v.start(token, head), part)
        scales = [Float32(1.0)] * 2
        if cutlass.const_expr(variant.fp8):
            scales = [
                Float32(Array(scale, shape=(1,)).load(0))
                for scale in (arguments.k_scale, arguments.v_scale)
            ]
        _issued()
        angles = heads.angles(arguments.table, position, part)
        if cutlass.const_expr(variant.k_norm):
            key = heads.normalised(key, factors, part, arguments.eps)
        key = heads.rotated(key, angles, part)
        if cutlass.const_expr(variant.fp8):
            key, value = (
                [to_e4m3(piece, divisor) for piece in pieces]
                for pieces, divisor in zip((key, value), map(Divisor.of, scales), strict=True)
            )
        if (unit == inside) & part.live & (slot >= 0):
            store_pair(variant, arguments.cache, slot, head, part, key, value, tile.head_dim)

    def _position(self, arguments: RotaryStoreArguments, token: Int32) -> Int64:
        return Int64(Array(arguments.positions, shape=(1,)).load(Int64(token)))


def _issued() -> None:
    """Compiler barrier: keeps later, dependent loads behind all loads issued so far."""
    ptx.bar_warp_sync(cute.arch.FULL_MASK)
