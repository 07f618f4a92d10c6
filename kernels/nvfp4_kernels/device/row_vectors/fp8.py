"""Quantisation of rows from registers to E4M3, bit-identical to ``formats.fp8_rows``.

Every operation rounds to nearest even and keeps subnormal numbers, as torch does on CPU.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Uint8, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.narrow import to_e4m3
from nvfp4_kernels.device.nvfp4_block import amax
from nvfp4_kernels.device.row_vectors.place import Place
from nvfp4_kernels.device.row_vectors.reduction import largest, reduce_cta
from nvfp4_kernels.device.row_vectors.tile import VECTOR
from nvfp4_kernels.device.rowwise.output import again
from nvfp4_kernels.device.widen import widen
from nvfp4_kernels.formats.fp8_rows import FP8_MAX, GROUP, SMALLEST_TOKEN_SCALE

LANES = GROUP // VECTOR  # that share a group of 64 elements


class Fp8Rows(NamedTuple):
    """Output rows in global memory; part of a kernel's arguments.

    Attributes:
        data: bytes [m, ceil(k/64)·64].
        scale: float32: the scale [1], an input; or the rows' scales [m], an output.
        m, k: number of rows, of all matrices, and of elements per row.
    """

    data: cute.Pointer
    scale: cute.Pointer
    m: Int32
    k: Int32


# Element types and alignments of a bundle's pointers, except for the input rows.
OUTPUT_TYPES = {"data": Uint8, "scale": Float32}
OUTPUT_ALIGNMENT = {"scale": 4}


@dataclass(frozen=True)
class Fp8Quantizer:
    """Quantisation of a CTA's row, or of its part of one.

    Attributes:
        out: output rows.
        per_token: whether each row has its own scale.
    """

    out: Fp8Rows
    per_token: bool

    def write(self, place: Place, rows: list[Vector]) -> None:
        """Quantise and store ``rows``: this thread's input elements of each step."""
        if self.per_token:
            scale = self._row_scale(place, rows)
            rows = [again(elements) for elements in rows]
        else:
            scale = Float32(Array(self.out.scale, shape=(1,)).load(0))
        inverse = 1.0 / scale
        for step, elements in enumerate(rows):
            words = _packed(widen(elements) * inverse, place.has(step))
            _store(place, step, words, self.out.data)

    def _row_scale(self, place: Place, rows: list[Vector]) -> Float32:
        # Past the row's end are elements of the row: they do not change its largest magnitude.
        found = functools.reduce(largest, [amax(elements) for elements in rows])
        scale = row_scale(reduce_cta(place.tile.warps, found, largest))
        _store_row_scale(place, scale, self.out.scale)
        return scale


def row_scale(amax: Float32) -> Float32:
    """Scale of a row as in ``fp8_rows.token_scales``; 1 if ``amax`` is 0 or NaN."""
    scale = cute.arch.fmax(amax / Float32(FP8_MAX), SMALLEST_TOKEN_SCALE)
    return cutlass.select_(amax > 0.0, scale, Float32(1.0))


def _packed(scaled: Vector, inside: Boolean) -> Vector:
    """E4M3 of this thread's 8 elements; zeros if not ``inside``. Four elements to a word."""
    words = [to_e4m3([scaled[first + n] for n in range(4)]) for first in (0, 4)]
    kept = [Uint32(cutlass.select_(inside, word, Uint32(0))) for word in words]
    return Vector.from_elements(tuple(kept), Uint32)


@cute.jit
def _store(place: Place, step: cutlass.Constexpr, words: Vector, data: cute.Pointer) -> None:
    """Store 8 bytes of a group of 64, after the exchange of bytes with the group's other lanes.

    Lane ``2·c + h`` of a group has elements ``16·c + 8·h`` to ``16·c + 8·h + 7``. In the stored
    order, word ``c`` of quarter ``q`` has elements 2q and 2q + 1 of both halves h. So two lanes
    that differ in h exchange one word each, which leaves quarters 2h and 2h + 1 to a lane; then two
    lanes that differ in the low bit of c do, which leaves it two neighbouring words of one quarter.
    """
    lane = cute.arch.lane_idx() % LANES
    half, odd = lane % 2 == 1, lane // 2 % 2 == 1
    own = cutlass.select_(half, words[1], words[0])
    partner = _swapped(cutlass.select_(half, words[0], words[1]), 1)
    even_word = _permuted(own, partner, cutlass.select_(half, Int32(0x1504), Int32(0x5140)))
    odd_word = _permuted(own, partner, cutlass.select_(half, Int32(0x3726), Int32(0x7362)))
    own = cutlass.select_(odd, odd_word, even_word)
    partner = _swapped(cutlass.select_(odd, even_word, odd_word), 2)
    first = Uint32(cutlass.select_(odd, partner, own))
    second = Uint32(cutlass.select_(odd, own, partner))
    group = place.element(step) - lane * VECTOR
    if group < place.k:
        byte = group + lane % 2 * 32 + lane // 2 % 2 * 16 + lane // 4 * 8
        padded = cute.ceil_div(place.k, GROUP) * GROUP
        both = Vector.from_elements((first, second), Uint32).bitcast(Uint8)
        Array(data, shape=(1,)).store(both, place.row * padded + byte, alignment=VECTOR)


def _swapped(word: Uint32, distance: int) -> Uint32:
    """Word of the lane whose index differs by the bit ``distance``."""
    return Uint32(cute.arch.shuffle_sync_bfly(Uint32(word), distance))


def _permuted(low: Uint32, high: Uint32, selector: Int32) -> Uint32:
    """Four of the eight bytes of ``low`` and ``high``, as ``selector``'s nibbles name them."""
    return ptx.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Uint32],
        read_only_args=[Uint32(low), Uint32(high), Int32(selector)],
    )


@cute.jit
def _store_row_scale(place: Place, scale: Float32, target: cute.Pointer) -> None:
    if place.first == 0:
        Array(target, shape=(1,)).store(scale, place.row)
