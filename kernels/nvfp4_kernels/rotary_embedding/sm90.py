"""``rotary_embedding`` on sm_90: a CTA turns heads of one token.

A thread has 16 bytes of a head and their partners R/2 elements on, or 16 bytes that are copied.
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Int64, Vector
from cutlass.cute.runtime import make_ptr
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_layout, check_rows
from nvfp4_kernels.compile import launch
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import dtype_name
from nvfp4_kernels.rotary_embedding.choose import choose_config
from nvfp4_kernels.rotary_embedding.tile import MAX_HEAD_DIM, PIECE, RotaryTile

ALIGNMENT = 16  # bytes
BYTES = 2  # of an element


@dataclass(frozen=True)
class Heads:
    """[token, head, D] that is read, and the same without gaps that is written.

    Strides count elements.
    """

    data: cute.Pointer
    out: cute.Pointer
    token_stride: Int64
    head_stride: Int64
    count: Int32

    def addresses(self, token: Int32, head: Int32, head_dim: int) -> tuple[Int64, Int64]:
        """Where a head starts in ``data`` and in ``out``."""
        start = Int64(token) * self.token_stride + Int64(head) * self.head_stride
        out_start = (Int64(token) * Int64(self.count) + Int64(head)) * head_dim
        return self.data.toint() + start * BYTES, self.out.toint() + out_start * BYTES


@dataclass(frozen=True)
class Row:
    """A head of a token; ``live`` unless it stands for one that there is not."""

    source: Array
    target: Array
    live: Boolean


@dataclass(frozen=True)
class RotaryEmbeddingSm90:
    """One configuration.

    Attributes:
        dtype: of all but the positions, ``"bfloat16"`` or ``"float16"``.
        tile: what a CTA takes.
    """

    dtype: str
    tile: RotaryTile

    def signature(self) -> tuple[Any, ...]:
        """Arguments of ``__call__``, see there."""
        types = [(Int64, 8), *[(TYPES[self.dtype], ALIGNMENT)] * 5]
        pointers = [make_ptr(t, 16, cute.AddressSpace.gmem, assumed_align=a) for t, a in types]
        return (*pointers, *[Int64(0)] * 4, *[Int32(0)] * 3)

    @cute.jit
    def __call__(
        self,
        positions: cute.Pointer,
        cos_sin_cache: cute.Pointer,
        q: cute.Pointer,
        k: cute.Pointer,
        q_out: cute.Pointer,
        k_out: cute.Pointer,
        q_token: Int64,
        q_head: Int64,
        k_token: Int64,
        k_head: Int64,
        m: Int32,
        q_heads: Int32,
        k_heads: Int32,
        stream: cuda_driver.CUstream,
    ) -> None:
        """Strides count elements, of a token and of a head."""
        self.kernel(
            positions,
            cos_sin_cache,
            Heads(q, q_out, q_token, q_head, q_heads),
            Heads(k, k_out, k_token, k_head, k_heads),
        ).launch(
            grid=(m, cute.ceil_div(q_heads + k_heads, self.tile.heads), 1),
            block=(self.tile.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        positions: cute.Pointer,
        cos_sin_cache: cute.Pointer,
        queries: Heads,
        keys: Heads,
    ) -> None:
        tile = self.tile
        # At once: attention, which comes next, fetches keys while the projection before this ends.
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        thread, (token, group, _) = cute.arch.thread_idx()[0], cute.arch.block_idx()
        slot, piece = thread // tile.pieces, thread % tile.pieces
        # Positions, cosines and sines are older than the kernel before this one.
        position = Int64(Array(positions, shape=(1,)).load(Int64(token)))
        table = Array(cos_sin_cache, shape=(1,))
        place = position * tile.rotary_dim + piece % tile.pairs * PIECE
        cos = table.load(place, PIECE, alignment=ALIGNMENT)
        sin = table.load(place + tile.rotary_dim // 2, PIECE, alignment=ALIGNMENT)
        first = group * tile.heads + slot
        rows = [
            self._row(queries, keys, token, first + step * tile.slots) for step in range(tile.steps)
        ]
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        if cutlass.const_expr(tile.pieces == tile.pairs):
            self._turn(rows, piece * PIECE, cos, sin)
        else:
            if piece < tile.pairs:
                self._turn(rows, piece * PIECE, cos, sin)
            else:
                self._copy(rows, tile.rotary_dim + (piece - tile.pairs) * PIECE)

    def _row(self, queries: Heads, keys: Heads, token: Int32, head: Int32) -> Row:
        """Heads of queries come first; for one after the last of all, the last is read again."""
        heads = queries.count + keys.count
        inside = cutlass.min(head, heads - 1)
        of_q = inside < queries.count
        query = queries.addresses(token, inside, self.tile.head_dim)
        key = keys.addresses(token, inside - queries.count, self.tile.head_dim)
        # Whole addresses, not what they are made of: parameters chosen at run time load slowly.
        source, target = (cutlass.select_(of_q, q, k) for q, k in zip(query, key, strict=True))
        return Row(self._memory(source), self._memory(target), head < heads)

    def _memory(self, address: Int64) -> Array:
        pointer = cute.make_ptr(
            TYPES[self.dtype], address, cute.AddressSpace.gmem, assumed_align=ALIGNMENT
        )
        return Array(pointer, shape=(1,))

    @cute.jit
    def _turn(self, rows: list[Row], at: Int32, cos: Vector, sin: Vector) -> None:
        """Everything is loaded before anything is used."""
        half = self.tile.rotary_dim // 2
        lows = [row.source.load(at, PIECE, alignment=ALIGNMENT) for row in rows]
        highs = [row.source.load(at + half, PIECE, alignment=ALIGNMENT) for row in rows]
        cos, sin = cos.to(Float32), sin.to(Float32)
        for step in cutlass.range_constexpr(self.tile.steps):
            # Products of 16-bit numbers are exact in float32: only the sum and its result round.
            low, high = lows[step].to(Float32), highs[step].to(Float32)
            turned_low = (low * cos - high * sin).to(TYPES[self.dtype])
            turned_high = (high * cos + low * sin).to(TYPES[self.dtype])
            if rows[step].live:
                rows[step].target.store(turned_low, at, alignment=ALIGNMENT)
                rows[step].target.store(turned_high, at + half, alignment=ALIGNMENT)

    @cute.jit
    def _copy(self, rows: list[Row], at: Int32) -> None:
        pieces = [row.source.load(at, PIECE, alignment=ALIGNMENT) for row in rows]
        for step in cutlass.range_constexpr(self.tile.steps):
            if rows[step].live:
                rows[step].target.store(pieces[step], at, alignment=ALIGNMENT)


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.rotary_embedding.op.rotary_embedding``.

    Raises:
        InvalidArgument: a D or an R that the kernel lacks, or rows that start on no multiples of
            16 bytes.
    """
    m, q_heads, head_dim = q.shape
    k_heads, rotary_dim = k.shape[1], cos_sin_cache.shape[1]
    if head_dim % PIECE or head_dim > MAX_HEAD_DIM:
        raise InvalidArgument(
            f"q: D is {head_dim}, must be a multiple of {PIECE} up to {MAX_HEAD_DIM} on sm_90; pad "
            "heads of q and k with zeros"
        )
    if rotary_dim % (2 * PIECE):
        raise InvalidArgument(
            f"cos_sin_cache: R is {rotary_dim}, must be a multiple of {2 * PIECE} on sm_90; use "
            "vLLM's own rotary embedding"
        )
    check_rows("sm_90", q=q, k=k)
    check_layout("cos_sin_cache", cos_sin_cache)
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    heads = q_heads + k_heads
    if m and heads:
        tile = choose_config(m, heads, head_dim, rotary_dim)
        launch(
            RotaryEmbeddingSm90(dtype_name(q.dtype), tile), positions,
            cos_sin_cache, q, k, q_out, k_out, *q.stride()[:2], *k.stride()[:2], m, q_heads,
            k_heads,
        )  # fmt: skip
    return q_out, k_out
