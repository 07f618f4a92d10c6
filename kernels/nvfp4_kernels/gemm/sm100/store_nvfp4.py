"""Stores of NVFP4 results, quantised from the float32 values for the next GEMM."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Int64, Uint8, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.nvfp4_block import (
    Block,
    GlobalScale,
    amax,
    global_scale,
    quantize_terms,
)
from nvfp4_kernels.formats.terms import PACKED_ROWS
from nvfp4_kernels.gemm.sm100.result import Chunk, OutputTensor
from nvfp4_kernels.gemm.sm100.tile import TRANSPOSE_PITCH, EpilogueConfig, Tile
from nvfp4_kernels.sm100.limits import ATOM_BYTES, ATOM_ROWS, BLOCK, MMA_K, WARP_ROWS


@dataclass(frozen=True)
class Nvfp4Store:
    """Store of chunks: per thread, 64 columns of a token; with swap_ab, tokens of a weight row."""

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
        """Quantise and store one chunk, see ``Store.put``."""
        expert = chunk.weight if self.tile.grouped else 0
        scale = global_scale(Array(result.scale, shape=(1,)).load(expert))
        if cutlass.const_expr(self.tile.swap_ab):
            self._transposed(result, slots, chunk, values, scale)
        else:
            self._rows(result, chunk, values, scale)

    @cute.jit
    def _rows(
        self, result: OutputTensor, chunk: Chunk, values: list[Float32], scale: GlobalScale
    ) -> None:
        """Store four blocks of a thread's row for each term; a term's four scales form one word."""
        data, terms = Array(result.data, shape=(1,)), self.output.terms.count
        inside = chunk.row < result.m
        left = result.n - chunk.column if inside else Int32(0)
        packed = [Uint32(0)] * terms
        words: list[list[Uint32]] = [[] for _ in range(terms)]
        for index in cutlass.range_constexpr(len(values) // BLOCK):
            blocks = self._quantized(values[BLOCK * index : BLOCK * (index + 1)], scale)
            for term, block in enumerate(blocks):
                scale_bits = Uint32(block.scale) if BLOCK * index < left else Uint32(0)
                packed[term] |= scale_bits << (8 * index)
                words[term] += [block.codes[0], block.codes[1]]
        together = 2 if self.output.store == "vector" else 1  # blocks
        for term in cutlass.range_constexpr(terms):
            start = self._data_row(result, chunk.batch, term, chunk.row) * (result.n // 2)
            for index in cutlass.range_constexpr(0, len(values) // BLOCK, together):
                if BLOCK * index < left:
                    part = words[term][2 * index : 2 * (index + together)]
                    codes = Vector.from_elements(tuple(part), Uint32).bitcast(Uint8)
                    offset = start + (chunk.column // 2 + 8 * index)
                    data.store(codes, offset, alignment=8 * together)
            bits = Vector.from_elements((packed[term],), Uint32).bitcast(Uint8)
            if self._has_scales(result, chunk.row, term) & (chunk.column < result.n):
                coord = self._scale_offset(
                    result, chunk.batch, term, chunk.row, chunk.column // BLOCK
                )
                Array(result.scales, shape=(1,)).store(bits, coord, alignment=4)

    def _has_scales(self, result: OutputTensor, row: Int32, term: int) -> Boolean:
        """Whether ``row`` stores scales of ``term``; rows of padding store zeros."""
        if self.output.terms.packed:
            inside = row < result.m
            return inside | self._pads(result, row) if term == 0 else inside
        return row < cute.ceil_div(result.m, ATOM_ROWS) * ATOM_ROWS

    def _pads(self, result: OutputTensor, row: Int32) -> Boolean:
        """Whether a row is padding of the one scale atom that holds the scales of all terms."""
        unused = (row % PACKED_ROWS >= result.m) | (row // PACKED_ROWS >= self.output.terms.count)
        return (row < ATOM_ROWS) & unused

    @cute.jit
    def _transposed(
        self,
        result: OutputTensor,
        transposed: Array,
        chunk: Chunk,
        values: list[Float32],
        scale: GlobalScale,
    ) -> None:
        """Transpose in shared memory, as a block is spread over 16 lanes; quantise and store."""
        lane = cute.arch.lane_idx()
        ptx.bar_warp_sync(cute.arch.FULL_MASK)  # the chunk before has been read
        for token in cutlass.range_constexpr(len(values)):
            transposed.store(values[token], token * TRANSPOSE_PITCH + lane)
        ptx.bar_warp_sync(cute.arch.FULL_MASK)
        data, scales = Array(result.data, shape=(1,)), Array(result.scales, shape=(1,))
        across = cute.ceil_div(result.n, MMA_K) * (MMA_K // BLOCK)
        blocks = WARP_ROWS // BLOCK  # of a token
        for step in cutlass.range_constexpr(cute.ceil_div(len(values) * blocks, WARP_ROWS)):
            index = step * WARP_ROWS + lane
            coord = index // blocks
            token = chunk.column + coord
            n = chunk.row - lane + index % blocks * BLOCK
            if coord < len(values) and token < result.m:
                loaded = transposed.load(
                    coord * TRANSPOSE_PITCH + index % blocks * BLOCK, BLOCK, alignment=16
                )
                quantized = self._quantized(loaded.to_elements(), scale)
                for term in cutlass.range_constexpr(len(quantized)):
                    block = quantized[term]
                    bits = Uint8(0)
                    if n < result.n:
                        row = self._data_row(result, chunk.batch, term, token)
                        start = (row * result.n + n) // 2
                        data.store(block.codes.bitcast(Uint8), start, alignment=8)
                        bits = block.scale
                    if n // BLOCK < across:
                        place = self._scale_offset(result, chunk.batch, term, token, n // BLOCK)
                        scales.store(bits, place)
        self._pad(result, chunk, across)

    @cute.jit
    def _pad(self, result: OutputTensor, chunk: Chunk, across: Int32) -> None:
        """Zero the scales of padding rows, if ``chunk`` holds the last token.

        ``across``: number of scales per row in the blocked layout.
        """
        lane, terms = cute.arch.lane_idx(), self.output.terms
        down = cute.ceil_div(result.m, ATOM_ROWS) * ATOM_ROWS
        last = chunk.column + self.output.chunk(self.tile) >= result.m
        if chunk.column < result.m and last:
            first = (chunk.row - lane) // BLOCK
            for step in cutlass.range_constexpr(ATOM_ROWS // WARP_ROWS):
                row = step * WARP_ROWS + lane
                pads = Boolean(True)
                if cutlass.const_expr(terms.packed):
                    pads = self._pads(result, row)
                else:
                    row += result.m
                    pads = row < down
                if pads:
                    for block in cutlass.range_constexpr(WARP_ROWS // BLOCK):
                        if first + block < across:
                            for term in cutlass.range_constexpr(1 if terms.packed else terms.count):
                                coord = self._scale_offset(
                                    result, chunk.batch, term, row, first + block
                                )
                                Array(result.scales, shape=(1,)).store(Uint8(0), coord)

    def _quantized(self, values: list[Float32], scale: GlobalScale) -> list[Block]:
        """Quantised terms of a block of 16 values, each term scaled by its own maximum."""
        block = Vector.from_elements(tuple(values), Float32)
        return quantize_terms(block, amax(block), scale, self.output.terms.count)

    def _data_row(self, result: OutputTensor, batch: Int32, term: int, row: Int32) -> Int64:
        """Index of a token's row among the rows of all terms and matrices."""
        return (Int64(batch) * self.output.terms.count + term) * result.m + row

    def _scale_offset(
        self, result: OutputTensor, batch: Int32, term: int, row: Int32, block: Int32
    ) -> Int64:
        """Byte offset of the scale of a row's ``block``-th block, see ``formats.terms``."""
        across = cute.ceil_div(result.n, MMA_K)
        down = cute.ceil_div(result.m, ATOM_ROWS)
        matrix = Int64(batch)
        if self.output.terms.packed:
            row = row + term * PACKED_ROWS
        else:
            matrix = matrix * self.output.terms.count + term
        atom = (matrix * down + row // ATOM_ROWS) * across + block // 4
        return atom * ATOM_BYTES + row % 32 * 16 + row % ATOM_ROWS // 32 * 4 + block % 4
