"""Quantisation of output rows to NVFP4 in the epilogue, and stores of codes and block scales."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Int64, Uint8, Uint16, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.sm100.scheduler import QueryRow, WorkTile
from nvfp4_kernels.attention.sm100.tile import AttentionTile, Variant
from nvfp4_kernels.device import nvfp4_block
from nvfp4_kernels.device.nvfp4_block import Block, GlobalScale, global_scale, scale_offset
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.sm100.limits import ATOM_BYTES, BLOCK, MMA_K

PAIR = 2 * BLOCK  # columns whose codes take 16 bytes, and whose scales lie side by side
ATOM_PAIRS = ATOM_BYTES // 2


@dataclass(frozen=True)
class RowQuantizer:
    """Quantisation of blocks of 16 columns, bit-identical to ``quantize`` of the 16-bit result."""

    tile: AttentionTile
    variant: Variant

    def scale(self, pointer: cute.Pointer) -> GlobalScale:
        """Load the next GEMM's input scale and compute its reciprocals."""
        return global_scale(Array(pointer, shape=(1,)).load(0))

    def block(self, values: list[Float32], scale: GlobalScale) -> Block:
        """Round 16 values to the 16-bit result's dtype, then quantise."""
        exact = Vector.from_elements(tuple(values), Float32)
        rounded = exact.to(TYPES[self.variant.dtype]).to(Float32)
        return nvfp4_block.quantize(rounded, nvfp4_block.amax(rounded), scale)

    @property
    def whole_atoms(self) -> bool:
        """Whether D is a multiple of a scale atom's 64 elements; four scales then form a word."""
        return self.tile.head_dim % MMA_K == 0

    def first_pair(
        self, first_row: Int32, num_heads: Int32, work: WorkTile, row: QueryRow, head: Int32
    ) -> Int32:
        """Index of the row's first pair of scales among all pairs of the blocked layout.

        Args:
            first_row: the launch's first row among the rows of the operand.
            num_heads: query heads of the operand.
            work: work tile of the CTA.
            row: row of the thread.
            head: query head of the row.
        """
        index, blocks = first_row + work.first_query + row.token, self.tile.head_dim // BLOCK
        across = num_heads * self.tile.head_dim // MMA_K
        return (scale_offset(index, head * blocks, across) // 2).to(Int32)

    def _pair(self, first: Int32, pair: Int32 | int) -> Int32 | int:
        """Index in the blocked layout of pair ``pair`` of a row; a head may begin mid-atom."""
        if self.whole_atoms:
            return first + pair // 2 * ATOM_PAIRS + pair % 2
        odd = first & 1
        return first - odd + (pair + odd) // 2 * ATOM_PAIRS + (pair + odd) % 2

    def store_scales(
        self, scales: cute.Pointer, first: Int32, pair: int, bits: Uint32, live: Boolean
    ) -> None:
        """Store a pair of scales or, if ``whole_atoms``, two pairs as one word, from ``pair`` on.

        Args:
            scales: block scales of the operand.
            first: the row's ``first_pair``.
            pair: index of the first pair in the row.
            bits: four scales if ``whole_atoms``, else two in the lower half.
            live: whether to store at all.
        """
        width = "b32" if self.whole_atoms else "b16"
        address = Int64(scales.toint()) + Int64(self._pair(first, pair)) * 2
        value = bits if self.whole_atoms else Uint16(bits)
        ptx.inline_ptx(
            f"@{{$r1}} st.global.{width} [{{$r0}}], {{$r2}};",
            read_only_args=[address, live, value],
        )

    def store_scale(
        self, scales: cute.Pointer, first: Int32, block: Int32, scale: Uint8, live: Boolean
    ) -> None:
        """Store the scale of the row's block ``block``; other arguments as in ``store_scales``."""
        pair = self._pair(first, block // 2)
        address = Int64(scales.toint()) + Int64(pair) * 2 + block % 2
        ptx.inline_ptx(
            "@{$r1} st.global.b8 [{$r0}], {$r2};",
            read_only_args=[address, live, Uint16(scale)],
        )


def store_codes(
    data: cute.Pointer, units: Int32, block: Int32, codes: Vector, live: Boolean
) -> None:
    """Store the codes of block ``block`` of a row if ``live``; ``units``: see ``store_vector``."""
    address = Int64(data.toint()) + Int64(units) * 16 + block * (BLOCK // 2)
    ptx.inline_ptx(
        "@{$r1} st.global.v2.b32 [{$r0}], {{$r2}, {$r3}};",
        read_only_args=[address, live, codes[0], codes[1]],
    )
