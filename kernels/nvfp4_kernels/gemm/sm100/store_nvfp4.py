"""Stores of NVFP4 results, quantised from the float32 values for the next product."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Int64, Uint8, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.nvfp4_block import Block, GlobalScale, amax, global_scale, quantize
from nvfp4_kernels.gemm.sm100.result import Chunk, OutputTensor
from nvfp4_kernels.gemm.sm100.tile import TRANSPOSE_PITCH, EpilogueConfig, Tile
from nvfp4_kernels.sm100.limits import ATOM_BYTES, ATOM_ROWS, BLOCK, MMA_K, WARP_ROWS


@dataclass(frozen=True)
class Nvfp4Store:
    """Store of chunks of 64 columns of a row; with swap_ab, of tokens of a weight row."""

    tile: Tile
    output: EpilogueConfig

    @cute.jit
    def put(
        self,
        result: OutputTensor,
        slots: Array,
        chunk: Chunk,
        values: list[Float32],
        leader: Boolean,
    ) -> None:
        """See ``Store.put``."""
        scale = global_scale(Array(result.scale, shape=(1,)).load(0))
        if cutlass.const_expr(self.tile.swap_ab):
            self._transposed(result, slots, chunk, values, scale)
        else:
            self._rows(result, chunk, values, scale)

    @cute.jit
    def _rows(
        self, result: OutputTensor, chunk: Chunk, values: list[Float32], scale: GlobalScale
    ) -> None:
        """Store four blocks of a thread's row, whose scales are one word."""
        data = Array(result.data, shape=(1,))
        inside = chunk.row < result.m
        left = result.n - chunk.column if inside else Int32(0)
        start = (Int64(chunk.batch) * result.m + chunk.row) * (result.n // 2) + chunk.column // 2
        packed = Uint32(0)
        words = []
        for index in cutlass.range_constexpr(len(values) // BLOCK):
            block = quantized(values[BLOCK * index : BLOCK * (index + 1)], scale)
            scale_bits = Uint32(block.scale) if BLOCK * index < left else Uint32(0)
            packed |= scale_bits << (8 * index)
            words += [block.codes[0], block.codes[1]]
        together = 2 if self.output.store == "vector" else 1  # blocks
        for index in cutlass.range_constexpr(0, len(values) // BLOCK, together):
            if BLOCK * index < left:
                part = Vector.from_elements(
                    tuple(words[2 * index : 2 * (index + together)]), Uint32
                )
                data.store(part.bitcast(Uint8), start + 8 * index, alignment=8 * together)
        down = cute.ceil_div(result.m, ATOM_ROWS)
        if chunk.row < down * ATOM_ROWS and chunk.column < result.n:
            # Rows of padding have scales too: zeros.
            bits = Vector.from_elements((packed,), Uint32).bitcast(Uint8)
            coord = scale_offset(result, chunk.batch, chunk.row, chunk.column // BLOCK)
            Array(result.scales, shape=(1,)).store(bits, coord, alignment=4)

    @cute.jit
    def _transposed(
        self,
        result: OutputTensor,
        transposed: Array,
        chunk: Chunk,
        values: list[Float32],
        scale: GlobalScale,
    ) -> None:
        """Transpose in shared memory: a block runs across lanes, and one thread needs all of it."""
        lane = cute.arch.lane_idx()
        ptx.bar_warp_sync(cute.arch.FULL_MASK)  # the chunk before has been read
        for token in cutlass.range_constexpr(len(values)):
            transposed.store(values[token], token * TRANSPOSE_PITCH + lane)
        ptx.bar_warp_sync(cute.arch.FULL_MASK)
        data, scales = Array(result.data, shape=(1,)), Array(result.scales, shape=(1,))
        across = cute.ceil_div(result.n, MMA_K) * (MMA_K // BLOCK)
        blocks = WARP_ROWS // BLOCK  # of a token
        for turn in cutlass.range_constexpr(cute.ceil_div(len(values) * blocks, WARP_ROWS)):
            index = turn * WARP_ROWS + lane
            coord = index // blocks
            token = chunk.column + coord
            n = chunk.row - lane + index % blocks * BLOCK
            if coord < len(values) and token < result.m:
                loaded = transposed.load(
                    coord * TRANSPOSE_PITCH + index % blocks * BLOCK, BLOCK, alignment=16
                )
                block = quantized(loaded.to_elements(), scale)
                bits = Uint8(0)
                if n < result.n:
                    start = ((Int64(chunk.batch) * result.m + token) * result.n + n) // 2
                    data.store(block.codes.bitcast(Uint8), start, alignment=8)
                    bits = block.scale
                if n // BLOCK < across:
                    scales.store(bits, scale_offset(result, chunk.batch, token, n // BLOCK))
        self._pad(result, chunk, across)

    @cute.jit
    def _pad(self, result: OutputTensor, chunk: Chunk, across: Int32) -> None:
        """Zero the scales of the tokens that the atoms have beyond the last one."""
        lane = cute.arch.lane_idx()
        down = cute.ceil_div(result.m, ATOM_ROWS) * ATOM_ROWS
        if chunk.column < result.m and chunk.column + self.tile.split_columns >= result.m:
            first = (chunk.row - lane) // BLOCK
            for turn in cutlass.range_constexpr(ATOM_ROWS // WARP_ROWS):
                token = result.m + turn * WARP_ROWS + lane
                if token < down:
                    for block in cutlass.range_constexpr(WARP_ROWS // BLOCK):
                        if first + block < across:
                            coord = scale_offset(result, chunk.batch, token, first + block)
                            Array(result.scales, shape=(1,)).store(Uint8(0), coord)


def quantized(values: list[Float32], scale: GlobalScale) -> Block:
    """Block of 16 values with the scale of their own maximum."""
    block = Vector.from_elements(tuple(values), Float32)
    return quantize(block, amax(block), scale)


def scale_offset(result: OutputTensor, batch: Int32, row: Int32, block: Int32) -> Int64:
    """Byte offset of a scale in the blocked layout, see ``nvfp4``."""
    across = cute.ceil_div(result.n, MMA_K)
    down = cute.ceil_div(result.m, ATOM_ROWS)
    atom = (Int64(batch) * down + row // ATOM_ROWS) * across + block // 4
    return atom * ATOM_BYTES + row % 32 * 16 + row % ATOM_ROWS // 32 * 4 + block % 4
