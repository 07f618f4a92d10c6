"""Oracles for tests of the tensor core: layouts as CuTe writes them, formats as formulas.

This module shares no code with tests.emulator.tcgen05. Layouts are evaluated from the shape:stride
expressions of the PTX ISA (9.7.16.3.3) and of CUTLASS, element by element.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Shape = tuple[int, ...]


def layout(coordinate: Ints, shape: Shape, stride: Shape) -> Ints:
    """Value of a CuTe layout; the coordinate runs through the shape's first mode first."""
    total = np.zeros_like(coordinate)
    for extent, step in zip(shape[:-1], stride[:-1], strict=True):
        total += coordinate % extent * step
        coordinate = coordinate // extent
    return total + coordinate * stride[-1]


def swizzle(address: Ints, bits: int, base: int, shift: int) -> Ints:
    """Result of CuTe's Swizzle<bits, base, shift> on byte addresses."""
    mask = ((1 << bits) - 1) << (base + shift)
    return address ^ (address & mask) >> shift


# Layout type of the descriptor: 16-byte units in a swizzled row, and CuTe's swizzle of bytes.
SWIZZLES = {
    0: (1, (0, 4, 3)),
    6: (2, (1, 4, 3)),
    4: (4, (2, 4, 3)),
    2: (8, (3, 4, 3)),
    1: (8, (2, 5, 2)),
}

# name: (bits, exponent bits, mantissa bits, has infinity, has NaN)
FORMATS = {
    "f16": (16, 5, 10, True, True),
    "bf16": (16, 8, 7, True, True),
    "e5m2": (8, 5, 2, True, True),
    "e4m3": (8, 4, 3, False, True),
    "e3m2": (6, 3, 2, False, False),
    "e2m3": (6, 2, 3, False, False),
    "e2m1": (4, 2, 1, False, False),
}
BITS = {name: spec[0] for name, spec in FORMATS.items()} | {"tf32": 32, "u8": 8, "s8": 8}


def value(code: int, name: str) -> float:
    """Number that a code represents."""
    if name == "u8":
        return float(code)
    if name == "s8":
        return float(code - 256 if code > 127 else code)
    if name == "tf32":
        exponent_bits, mantissa_bits, infinity, nan = 8, 10, True, True
        code >>= 13
        bits = 19
    else:
        bits, exponent_bits, mantissa_bits, infinity, nan = FORMATS[name]
    sign = -1.0 if code >> (bits - 1) & 1 else 1.0
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    top = (1 << exponent_bits) - 1
    if infinity and exponent == top:
        return math.nan if mantissa else sign * math.inf
    if nan and not infinity and exponent == top and mantissa == (1 << mantissa_bits) - 1:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


def values(codes: Ints, name: str) -> npt.NDArray[np.float64]:
    """Numbers that the codes represent."""
    if BITS[name] <= 8:
        table = np.array([value(code, name) for code in range(1 << BITS[name])])
        return table[codes]
    return np.array([value(int(code), name) for code in codes.flat]).reshape(codes.shape)


def scale_value(code: int, ue8m0: bool) -> float:
    """Number that a block scale's code represents."""
    if ue8m0:
        return math.nan if code == 255 else 2.0 ** (code - 127)
    return value(code, "e4m3")


@dataclass(frozen=True)
class Placement:
    """A matrix in shared memory: fields of the descriptor and of the elements.

    Attributes:
        start, leading, stride: bytes.
        mode: layout type.
        name: element format.
        mn_major: whether M or N is the leading dimension.
        padded: whether 4- and 6-bit elements are in groups of 16, padded to 16 bytes.
    """

    start: int
    leading: int
    stride: int
    mode: int
    name: str
    mn_major: bool = False
    padded: bool = False

    @property
    def word(self) -> int:
        """The descriptor as a 64-bit word."""
        fields = ((self.start, 0), (self.leading, 16), (self.stride, 32))
        return sum(x // 16 << shift for x, shift in fields) | 1 << 46 | self.mode << 61

    def bit_address(self, row: Ints, k: Ints) -> Ints:
        """Bit address of every element (row, k) (PTX ISA 9.7.16.3.3, canonical layouts)."""
        slot = 8 if self.padded else BITS[self.name]
        unit, (bits, base, shift) = SWIZZLES[self.mode]
        t = 128 // slot
        lbo, sbo = self.leading * 8 // slot, self.stride * 8 // slot
        # Elements of a padded group of 16 share the group's first slot.
        along = row if self.mn_major else k
        group = along - along % 16 if self.padded else along
        if self.mn_major:
            if self.mode == 0:
                offset = layout(group, (t, 1, 0), (1, t, sbo)) + layout(k, (8, 0), (t, lbo))
            elif self.mode == 1:
                offset = layout(group, (t, 8, 0), (1, t, lbo)) + layout(k, (4, 0), (8 * t, sbo))
            else:
                offset = layout(group, (t, unit, 0), (1, t, lbo))
                offset = offset + layout(k, (8, 0), (unit * t, sbo))
        else:
            step = lbo if self.mode == 0 else t
            offset = layout(row, (8, 0), (unit * t, sbo)) + layout(group, (t, 0), (1, step))
        byte, rest = np.divmod(offset * slot, 8)
        address = swizzle(self.start + byte, bits, base, shift) * 8 + rest
        if self.padded:
            address = address + along % 16 * BITS[self.name]
        return address

    def put(self, shared: npt.NDArray[np.uint8], codes: Ints, first_row: int = 0) -> None:
        """Write codes [rows, k] into shared memory."""
        rows, k = codes.shape
        row, column = np.meshgrid(
            np.arange(first_row, first_row + rows), np.arange(k), indexing="ij"
        )
        address = self.bit_address(row, column)
        for bit in range(BITS[self.name]):
            byte, place = np.divmod(address + bit, 8)
            on = (codes >> bit & 1).astype(np.uint8)
            np.bitwise_and.at(shared, byte, ~(np.uint8(1) << place.astype(np.uint8)))
            np.bitwise_or.at(shared, byte, on << place.astype(np.uint8))


def random_codes(
    rng: np.random.Generator, rows: int, k: int, name: str, *, special: bool = False
) -> Ints:
    """Codes of numbers from about 2^-6 to 2^6; if ``special``, some are zero, infinite or NaN.

    Special codes are any codes of the format, except for bf16 and tf32, whose largest numbers have
    products beyond FP32.
    """
    bits = BITS[name]
    if special and name in ("bf16", "tf32"):
        codes = random_codes(rng, rows, k, name)
        high = np.array([0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x0001]) << (bits - 16)
        odd = rng.random((rows, k)) < 1 / (4 * k)
        return np.where(odd, rng.choice(high, (rows, k)), codes)
    if special or bits <= 6 or name in ("u8", "s8"):
        return rng.integers(0, 1 << bits, (rows, k))
    numbers = rng.standard_normal((rows, k)) * np.exp2(rng.integers(-3, 4, (rows, 1)))
    if name == "tf32":
        return numbers.astype(np.float32).view(np.uint32).astype(np.int64)
    if name == "bf16":
        return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.int64)
    if name == "f16":
        return numbers.astype(np.float16).view(np.uint16).astype(np.int64)
    finite = [c for c in range(256) if math.isfinite(value(c, name)) and abs(value(c, name)) < 64]
    return rng.choice(np.array(finite), (rows, k))
