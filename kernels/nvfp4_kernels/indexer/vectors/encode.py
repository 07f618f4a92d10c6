"""Quantisation of 16 elements of a vector, in registers, to the bytes of a format."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint8, Uint32, Vector

from nvfp4_kernels.device.narrow import to_e4m3
from nvfp4_kernels.device.nvfp4_block import GlobalScale, amax, block_scale, to_e2m1
from nvfp4_kernels.indexer.vectors.layout import VectorLayout

MANTISSA_BITS = 23  # of float32
EXPONENT_BIAS = 127
FP8_LEAST = 1e-4
MXFP4_LEAST = 6.0 * 2.0**-126
# Largest number of a format, 1.f · 2^n, as (complement of f, n): adding the complement to a
# mantissa carries exactly if the mantissa exceeds f, so that the exponent of the sum less n is that
# of the least power-of-two scale.
E4M3_CARRY, E4M3_EXPONENT = 0x7FFFFF - 0x600000, 8
E2M1_CARRY, E2M1_EXPONENT = 0x7FFFFF - 0x400000, 2
INFINITY = 0x7F800000
ONE_BITS = 2 * EXPONENT_BIAS  # bits of 1.0 with one bit of the mantissa


@dataclass(frozen=True)
class Encoded:
    """Encoded elements: bytes of the data, and bytes of the elements' scale, None in bf16."""

    data: Vector
    scale: Any


@dataclass(frozen=True)
class Encoder:
    """Encoder of 16 elements per lane, bit-identical to ``nvfp4_kernels.indexer.formats``.

    Attributes:
        layout: layout of the vectors.
        native_e2m1: whether to use Blackwell's conversion instructions for E2M1.
    """

    layout: VectorLayout
    native_e2m1: bool

    def run(self, elements: Vector, scale: GlobalScale | None) -> Encoded:
        """Encode bfloat16 ``(16,)``; all ``layout.quantize_lanes`` lanes of the vector take part.

        Idle lanes must pass elements of the same vector, as in FP8 the maximum is over all lanes.
        ``scale`` is NVFP4's global scale; None in other formats.
        """
        if self.layout.fmt == "bf16":
            return Encoded(elements.bitcast(Uint8), None)
        values, largest = elements.to(Float32), amax(elements)
        if self.layout.fmt == "nvfp4":
            assert scale is not None
            shared = block_scale(largest, scale)
            data = self._to_e2m1(values * shared.multiplier)
            return Encoded(data, Vector.from_elements((shared.bits,), Uint8))
        if self.layout.fmt == "mxfp4":
            return self._mxfp4(values, _lanes_amax(largest, 2))
        return self._fp8(values, _lanes_amax(largest, self.layout.quantize_lanes))

    def _mxfp4(self, values: Vector, largest: Float32) -> Encoded:
        """Encode as E2M1 with a UE8M0 scale, ``2^ceil(log2(largest / 6))``."""
        bits = cute.arch.fmax(largest, Float32(MXFP4_LEAST), nan=True).bitcast(Uint32)
        code = ((bits + E2M1_CARRY) >> MANTISSA_BITS) - E2M1_EXPONENT
        code = Uint32(cutlass.select_(bits == INFINITY, Uint32(2 * EXPONENT_BIAS), code))
        # The reciprocal of 2^127 is subnormal.
        inverse = Uint32(
            cutlass.select_(
                code == 2 * EXPONENT_BIAS,
                Uint32(1 << MANTISSA_BITS - 1),
                (2 * EXPONENT_BIAS - code) << MANTISSA_BITS,
            )
        )
        code = Uint32(cutlass.select_(bits > INFINITY, Uint32(255), code))
        data = self._to_e2m1(values * inverse.bitcast(Float32))
        return Encoded(data, Vector.from_elements((code.to(Uint8),), Uint8))

    def _fp8(self, values: Vector, largest: Float32) -> Encoded:
        """Encode as E4M3 with a float32 scale, ``2^ceil(log2(largest / 448))``."""
        bits = cute.arch.fmax(largest, Float32(FP8_LEAST), nan=True).bitcast(Uint32)
        finite = bits < INFINITY
        power = ((bits + E4M3_CARRY) >> MANTISSA_BITS) - E4M3_EXPONENT
        stored = Uint32(cutlass.select_(finite, power << MANTISSA_BITS, bits))
        inverse = ((2 * EXPONENT_BIAS - power) << MANTISSA_BITS).bitcast(Float32)
        inverse = Float32(cutlass.select_(finite, inverse, 1.0 / largest))
        scaled = values * inverse
        words = [to_e4m3([scaled[first + n] for n in range(4)]) for first in range(0, 16, 4)]
        data = Vector.from_elements(tuple(words), Uint32).bitcast(Uint8)
        return Encoded(data, Vector.from_elements((stored,), Uint32).bitcast(Uint8))

    def _to_e2m1(self, scaled: Vector) -> Vector:
        """Convert 16 elements to E2M1, two per byte, the first in the low nibble."""
        if self.native_e2m1:
            return to_e2m1(scaled).bitcast(Uint8)
        codes = [_e2m1_code(scaled[n]) for n in range(16)]
        words = []
        for first in (0, 8):
            word = codes[first]
            for n in range(1, 8):
                word = word | codes[first + n] << 4 * n
            words.append(word)
        return Vector.from_elements(tuple(words), Uint32).bitcast(Uint8)


def _lanes_amax(value: Float32, lanes: int) -> Float32:
    """Maximum of ``value`` over ``lanes`` (a power of two) adjacent lanes; NaN if any is NaN."""
    distance = 1
    while distance < lanes:
        other = cute.arch.shuffle_sync_bfly(value, distance)
        value = cute.arch.fmax(value, other, nan=True)
        distance *= 2
    return value


def _e2m1_code(value: Float32) -> Uint32:
    """E2M1 code of a value, as by ``cvt.rn.satfinite.e2m1x2.f32``: nearest even, saturating.

    For magnitudes of at least 1, the code is the rounded float's exponent and first mantissa bit;
    below 1, twice the magnitude, rounded.
    """
    bits = value.bitcast(Uint32)
    magnitude = bits & 0x7FFFFFFF
    rounded = magnitude + 0x1FFFFF + (magnitude >> 22 & 1)
    above = cutlass.min(rounded >> 22, Uint32(ONE_BITS + 5)) - (ONE_BITS - 2)  # codes 2 to 7
    # Adding 2^23 rounds to an integer: no mantissa bit is left for fractions.
    twice = magnitude.bitcast(Float32) * 2.0 + Float32(2.0**23)
    below = twice.bitcast(Uint32) & 3
    code = Uint32(cutlass.select_(magnitude < 0x3F800000, below, above))
    return code | bits >> 31 << 3
