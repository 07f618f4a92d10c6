"""The kernel of ``rotary_embedding`` on sm_90, and its launch."""

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Int64, Vector
from cutlass.experimental import primitives as ptx
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_layout, check_rows, strides_of
from nvfp4_kernels.device.arguments import example, without_unread
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.devices import device_facts, dtype_name
from nvfp4_kernels.rotary.choose import choose_config
from nvfp4_kernels.rotary.tile import MAX_HEAD_DIM, PIECE, RotaryTile
from nvfp4_kernels.runtime.compile import launch

ALIGNMENT = 16  # bytes
ELEMENT_BYTES = 2


class Heads(NamedTuple):
    """Input [token, head, D], strides in elements, and a contiguous output of the same shape."""

    data: cute.Pointer
    out: cute.Pointer
    token_stride: Int64
    head_stride: Int64
    num_heads: Int32

    def addresses(self, token: Int32, head: Int32, head_dim: int) -> tuple[Int64, Int64]:
        """Addresses of a token's head in ``data`` and ``out``."""
        start = Int64(token) * self.token_stride + Int64(head) * self.head_stride
        out_start = (Int64(token) * Int64(self.num_heads) + Int64(head)) * head_dim
        return (
            self.data.toint() + start * ELEMENT_BYTES,
            self.out.toint() + out_start * ELEMENT_BYTES,
        )


class RotaryArguments(NamedTuple):
    """Arguments of a launch.

    Attributes:
        positions: int64 [tokens].
        cos_sin_cache: [positions, R], R/2 cosines and R/2 sines.
        q, k: queries and keys, and their results.
        m: number of tokens.
    """

    positions: cute.Pointer
    cos_sin_cache: cute.Pointer
    q: Heads
    k: Heads
    m: Int32


@dataclass(frozen=True)
class HeadSlice:
    """Source and target of one head of a token; ``live`` is false past the last head."""

    source: Array
    target: Array
    live: Boolean


@dataclass(frozen=True)
class RotaryEmbeddingSm90:
    """Rotary embedding: a CTA rotates heads of one token.

    A thread rotates 16 bytes of a head with the 16 bytes R/2 elements further on, or copies 16
    bytes past R.

    Attributes:
        dtype: dtype of all tensors but the positions, ``"bfloat16"`` or ``"float16"``.
        tile: heads per CTA, and thread layout.
    """

    dtype: str
    tile: RotaryTile

    def signature(self) -> tuple[RotaryArguments]:
        """Example arguments of ``__call__``, for ``cute.compile``."""
        types = dict.fromkeys(("cos_sin_cache", "data", "out"), TYPES[self.dtype])
        return (example(RotaryArguments, types | {"positions": Int64}, {"positions": 8}),)

    @cute.jit
    def __call__(self, arguments: RotaryArguments, stream: cuda_driver.CUstream) -> None:
        """Launch CTAs over tokens and groups of heads."""
        heads = arguments.q.num_heads + arguments.k.num_heads
        self.kernel(without_unread(arguments, ["m"])).launch(
            grid=(arguments.m, cute.ceil_div(heads, self.tile.heads), 1),
            block=(self.tile.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: RotaryArguments) -> None:
        """Load cosines and sines, then rotate this thread's vectors or copy vectors past R."""
        tile, queries, keys = self.tile, arguments.q, arguments.k
        # At once: the next kernel, attention, loads keys while the preceding projection ends.
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        thread, (token, group, _) = cute.arch.thread_idx()[0], cute.arch.block_idx()
        slot, vector = thread // tile.head_threads, thread % tile.head_threads
        # Preceding kernels must not write positions, cosines and sines.
        position = Int64(Array(arguments.positions, shape=(1,)).load(Int64(token)))
        table = Array(arguments.cos_sin_cache, shape=(1,))
        start = position * tile.rotary_dim + vector % tile.rotary_threads * PIECE
        cos = table.load(start, PIECE, alignment=ALIGNMENT)
        sin = table.load(start + tile.rotary_dim // 2, PIECE, alignment=ALIGNMENT)
        first = group * tile.heads + slot
        heads = [
            self._head(queries, keys, token, first + step * tile.slots)
            for step in range(tile.steps)
        ]
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        if cutlass.const_expr(tile.head_threads == tile.rotary_threads):
            self._rotate(heads, vector * PIECE, cos, sin)
        else:
            if vector < tile.rotary_threads:
                self._rotate(heads, vector * PIECE, cos, sin)
            else:
                self._copy(heads, tile.rotary_dim + (vector - tile.rotary_threads) * PIECE)

    def _head(self, queries: Heads, keys: Heads, token: Int32, head: Int32) -> HeadSlice:
        """Slice of head ``head``, queries before keys; past the end, slice of the last head."""
        heads = queries.num_heads + keys.num_heads
        inside = cutlass.min(head, heads - 1)
        is_query = inside < queries.num_heads
        query = queries.addresses(token, inside, self.tile.head_dim)
        key = keys.addresses(token, inside - queries.num_heads, self.tile.head_dim)
        # Select addresses, not parameters: a parameter indexed at run time loads slowly.
        source, target = (cutlass.select_(is_query, q, k) for q, k in zip(query, key, strict=True))
        return HeadSlice(self._array(source), self._array(target), head < heads)

    def _array(self, address: Int64) -> Array:
        pointer = cute.make_ptr(
            TYPES[self.dtype], address, cute.AddressSpace.gmem, assumed_align=ALIGNMENT
        )
        return Array(pointer, shape=(1,))

    @cute.jit
    def _rotate(self, heads: list[HeadSlice], at: Int32, cos: Vector, sin: Vector) -> None:
        """Rotate each head's vectors at elements ``at`` and ``at`` + R/2; all loads come first."""
        half = self.tile.rotary_dim // 2
        lows = [head.source.load(at, PIECE, alignment=ALIGNMENT) for head in heads]
        highs = [head.source.load(at + half, PIECE, alignment=ALIGNMENT) for head in heads]
        cos, sin = cos.to(Float32), sin.to(Float32)
        for step in cutlass.range_constexpr(self.tile.steps):
            # Products of 16-bit numbers are exact in float32: only the sum and its result round.
            low, high = lows[step].to(Float32), highs[step].to(Float32)
            rotated_low = (low * cos - high * sin).to(TYPES[self.dtype])
            rotated_high = (high * cos + low * sin).to(TYPES[self.dtype])
            if heads[step].live:
                heads[step].target.store(rotated_low, at, alignment=ALIGNMENT)
                heads[step].target.store(rotated_high, at + half, alignment=ALIGNMENT)

    @cute.jit
    def _copy(self, heads: list[HeadSlice], at: Int32) -> None:
        """Copy each head's 16-byte vector at element ``at``; all loads come first."""
        vectors = [head.source.load(at, PIECE, alignment=ALIGNMENT) for head in heads]
        for step in cutlass.range_constexpr(self.tile.steps):
            if heads[step].live:
                heads[step].target.store(vectors[step], at, alignment=ALIGNMENT)


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.rotary.op.rotary_embedding``.

    Raises:
        InvalidArgument: D or R is unsupported, or a tensor is misaligned.
    """
    m, q_heads, head_dim = q.shape
    k_heads, rotary_dim = k.shape[1], cos_sin_cache.shape[1]
    arch = device_facts(q.device).arch
    if head_dim % PIECE or head_dim > MAX_HEAD_DIM:
        raise InvalidArgument(
            f"q: D is {head_dim}, must be a multiple of {PIECE} up to {MAX_HEAD_DIM} on {arch}; "
            "pad heads of q and k with zeros"
        )
    if rotary_dim % (2 * PIECE):
        raise InvalidArgument(
            f"cos_sin_cache: R is {rotary_dim}, must be a multiple of {2 * PIECE} on {arch}; use "
            "vLLM's own rotary embedding"
        )
    check_rows(arch, q=q, k=k)
    check_layout("cos_sin_cache", cos_sin_cache)
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    heads = q_heads + k_heads
    if m and heads:
        tile = choose_config(m, heads, head_dim, rotary_dim)
        arguments = RotaryArguments(
            positions=positions,
            cos_sin_cache=cos_sin_cache,
            q=_heads(q, q_out),
            k=_heads(k, k_out),
            m=m,
        )
        launch(RotaryEmbeddingSm90(dtype_name(q.dtype), tile), arguments)
    return q_out, k_out


def _heads(x: Tensor, out: Tensor) -> Heads:
    token, head, _ = strides_of(x)
    return Heads(x, out, token_stride=token, head_stride=head, num_heads=x.shape[1])
