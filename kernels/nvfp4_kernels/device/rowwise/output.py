"""Quantisation of rows from registers to NVFP4 in global memory."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Uint8, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.nvfp4_block import (
    Block,
    GlobalScale,
    amax,
    global_scale,
    quantize_terms,
    row_scale,
)
from nvfp4_kernels.device.rowwise.place import Place, store_block, store_lines
from nvfp4_kernels.device.rowwise.reduction import largest, reduce_row
from nvfp4_kernels.device.widen import widen


class QuantizedRows(NamedTuple):
    """Output rows in global memory; part of a kernel's arguments.

    Attributes:
        data: bytes of codes [batch, m, k/2], or [batch, terms, m, k/2].
        scales: bytes of block scales, blocked layout.
        scale: float32: the global scale [1], an input; or per-row global scales [batch, m], an
            output.
        m, k, batch: number of rows per matrix, of elements per row, and of matrices.
    """

    data: cute.Pointer
    scales: cute.Pointer
    scale: cute.Pointer
    m: Int32
    k: Int32
    batch: Int32


# Element types and alignments of a bundle's pointers, except for the input rows.
OUTPUT_TYPES = {"data": Uint8, "scales": Uint8, "scale": Float32}
OUTPUT_ALIGNMENT = {"scale": 4}


@dataclass(frozen=True)
class RowQuantizer:
    """Quantisation of one CTA's rows.

    Attributes:
        data: bytes of codes.
        scales: bytes of block scales, blocked layout.
        scale: the global scale, an input; or the rows' global scales, an output.
        per_token: whether each row has its own global scale.
    """

    data: cute.Pointer
    scales: cute.Pointer
    scale: cute.Pointer
    per_token: bool

    def write(self, place: Place, rows: list[Vector]) -> None:
        """Quantise and store ``rows``: this thread's 16 input elements of each step."""
        given = None if self.per_token else Array(self.scale, shape=(1,)).load(0)
        largest_of = [amax(elements) for elements in rows]  # waits for the rows: loads come first
        scale = self._scale(place, largest_of, given)
        written = []
        for step, elements in enumerate(rows):
            values = widen(again(elements) if self.per_token else elements)
            blocks = quantize_terms(values, largest_of[step], scale, place.terms.count)
            for term, block in enumerate(blocks):
                store_block(place, step, term, block, self.data, self.scales)
            written.append(blocks)
        if place.line_rows:
            store_lines(place, written, self.scales)

    def write_zeros(self, place: Place) -> None:
        """Write padding rows: zero codes and scales."""
        none = Vector.from_elements((0, 0), Uint32)
        block = Block(none, Uint8(0), Float32(0.0))
        written = [[block] * place.terms.count for _ in place.steps]
        for step, blocks in enumerate(written):
            for term, zeros in enumerate(blocks):
                store_block(place, step, term, zeros, self.data, self.scales)
        if place.line_rows:
            store_lines(place, written, self.scales)

    def _scale(self, place: Place, found: list[Float32], given: Float32 | None) -> GlobalScale:
        if given is not None:
            return global_scale(given)
        scale = row_scale(reduce_row(place, functools.reduce(largest, found), largest))
        _store_row_scale(place, scale, self.scale)
        return global_scale(scale)


def again(elements: Vector) -> Vector:
    """Opaque copy of ``elements``, so that float32 values are recomputed, not kept in registers."""
    words = elements.bitcast(Uint32)
    names = range(words.numel())
    kept = ptx.inline_ptx(
        " ".join(f"mov.b32 {{$w{n}}}, {{$r{n}}};" for n in names),
        write_only_types=[Uint32 for _ in names],
        read_only_args=[words[n] for n in names],
    )
    return Vector.from_elements(kept, Uint32).bitcast(elements.dtype)


@cute.jit
def _store_row_scale(place: Place, scale: Float32, target: cute.Pointer) -> None:
    if place.inside and place.first == 0:
        Array(target, shape=(1,)).store(scale, place.row)
