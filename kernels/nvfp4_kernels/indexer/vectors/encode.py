"""16 elements of a vector, from registers to the bytes that a format stores."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint8, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.nvfp4_block import GlobalScale, amax, block_scale, to_e2m1
from nvfp4_kernels.indexer.vectors.layout import VectorLayout

EXPONENT = 23  # bits below it
BIAS = 127
FP8_LEAST = 1e-4
MXFP4_LEAST = 6.0 * 2.0**-126
# The largest element as 1.f · 2^n: adding what f lacks to 2 carries exactly when a mantissa is
# greater, so that the exponent of the sum is that of the least power of two, above by n.
E4M3_LACKS, E4M3_EXPONENT = 0x7FFFFF - 0x600000, 8
E2M1_LACKS, E2M1_EXPONENT = 0x7FFFFF - 0x400000, 2
INFINITY = 0x7F800000
ONE = 2 * BIAS  # bits of 1.0 with one bit of the mantissa


@dataclass(frozen=True)
class Encoded:
    """``data``: the 16 elements' bytes; ``scale``: those of the scale they share, or None."""

    data: Vector
    scale: Any


@dataclass(frozen=True)
class Encoder:
    """Bit for bit the formats' definitions in ``nvfp4_kernels.indexer.formats``.

    Attributes:
        layout: of the vectors.
        native: whether the device converts to E2M1 itself: Blackwell does.
    """

    layout: VectorLayout
    native: bool

    def run(self, elements: Vector, scale: GlobalScale | None) -> Encoded:
        """``elements`` bfloat16 (16,); all of the vector's lanes take part, idle ones with any 16.

        ``scale`` is NVFP4's alone.
        """
        if self.layout.name == "bf16":
            return Encoded(elements.bitcast(Uint8), None)
        values, largest = elements.to(Float32), amax(elements)
        if self.layout.name == "nvfp4":
            assert scale is not None
            shared = block_scale(largest, scale)
            data = self._to_e2m1(values * shared.multiplier)
            return Encoded(data, Vector.from_elements((shared.bits,), Uint8))
        if self.layout.name == "mxfp4":
            return self._mxfp4(values, _largest_of(largest, 2))
        return self._fp8(values, _largest_of(largest, self.layout.quantisers))

    def _mxfp4(self, values: Vector, largest: Float32) -> Encoded:
        bits = cute.arch.fmax(largest, Float32(MXFP4_LEAST), nan=True).bitcast(Uint32)
        code = ((bits + E2M1_LACKS) >> EXPONENT) - E2M1_EXPONENT
        code = Uint32(cutlass.select_(bits == INFINITY, Uint32(2 * BIAS), code))
        # 1 / 2^127 is subnormal.
        inverse = Uint32(
            cutlass.select_(
                code == 2 * BIAS, Uint32(1 << EXPONENT - 1), (2 * BIAS - code) << EXPONENT
            )
        )
        code = Uint32(cutlass.select_(bits > INFINITY, Uint32(255), code))
        data = self._to_e2m1(values * inverse.bitcast(Float32))
        return Encoded(data, Vector.from_elements((code.to(Uint8),), Uint8))

    def _fp8(self, values: Vector, largest: Float32) -> Encoded:
        bits = cute.arch.fmax(largest, Float32(FP8_LEAST), nan=True).bitcast(Uint32)
        finite = bits < INFINITY
        power = ((bits + E4M3_LACKS) >> EXPONENT) - E4M3_EXPONENT
        stored = Uint32(cutlass.select_(finite, power << EXPONENT, bits))
        inverse = ((2 * BIAS - power) << EXPONENT).bitcast(Float32)
        inverse = Float32(cutlass.select_(finite, inverse, 1.0 / largest))
        scaled = values * inverse
        words = [_to_e4m3([scaled[first + n] for n in range(4)]) for first in range(0, 16, 4)]
        data = Vector.from_elements(tuple(words), Uint32).bitcast(Uint8)
        return Encoded(data, Vector.from_elements((stored,), Uint32).bitcast(Uint8))

    def _to_e2m1(self, scaled: Vector) -> Vector:
        if self.native:
            return to_e2m1(scaled).bitcast(Uint8)
        codes = [_e2m1_code(scaled[n]) for n in range(16)]
        words = []
        for first in (0, 8):
            word = codes[first]
            for n in range(1, 8):
                word = word | codes[first + n] << 4 * n
            words.append(word)
        return Vector.from_elements(tuple(words), Uint32).bitcast(Uint8)


def _largest_of(value: Float32, lanes: int) -> Float32:
    """The largest of neighbouring lanes, a power of two; NaN if one is."""
    distance = 1
    while distance < lanes:
        other = cute.arch.shuffle_sync_bfly(value, distance)
        value = cute.arch.fmax(value, other, nan=True)
        distance *= 2
    return value


def _to_e4m3(values: list[Float32]) -> Uint32:
    """Four elements in a word, the first lowest: nearest, ties to even."""
    return ptx.inline_ptx(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }",
        write_only_types=[Uint32],
        read_only_args=values,
    )


def _e2m1_code(value: Float32) -> Uint32:
    """What ``cvt.rn.satfinite.e2m1x2.f32`` makes of one value: nearest, ties to even, saturating.

    From 1 on a code is a float's exponent and first bit of the mantissa; below, twice the value.
    """
    bits = value.bitcast(Uint32)
    magnitude = bits & 0x7FFFFFFF
    rounded = magnitude + 0x1FFFFF + (magnitude >> 22 & 1)
    above = cutlass.min(rounded >> 22, Uint32(ONE + 5)) - (ONE - 2)  # codes 2 to 7
    # Adding 2^23 leaves no bit for fractions.
    twice = magnitude.bitcast(Float32) * 2.0 + Float32(2.0**23)
    below = twice.bitcast(Uint32) & 3
    code = Uint32(cutlass.select_(magnitude < 0x3F800000, below, above))
    return code | bits >> 31 << 3
