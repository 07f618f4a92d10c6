"""Operand values: corners of every format, their cross products, and random bits."""

from functools import cache
from itertools import product

import numpy as np

from tests.test_emulator.silicon.case import Array, random_array

LANES = 512
FLOAT_LANES = 1024

_U16 = (0, 1, 2, 3, 15, 16, 0x7F, 0x80, 0xFF, 0x100, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE,
        0xFFFF)  # fmt: skip
_U32 = (0, 1, 2, 31, 32, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x55555555, 0x7FFFFFFF,
        0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF)  # fmt: skip
_U64 = (0, 1, 2, 63, 64, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 32, 0x5555555555555555,
        (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, (1 << 64) - 2,
        (1 << 64) - 1)  # fmt: skip
# Zeros, denormals, normals and their neighbours, overflow edges, infinities and NaN; 0x7ff7 is the
# fill value of tensor copies.
_F16 = (0, 0x8000, 1, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x8400, 0x3C00, 0xBC00, 0x3C01, 0x3BFF,
        0x3E00, 0x3800, 0x4200, 0x6800, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01,
        0x7FF7)  # fmt: skip
_BF16 = (0, 0x8000, 1, 0x8001, 0x007F, 0x807F, 0x0080, 0x8080, 0x3F80, 0xBF80, 0x3F81, 0x3F7F,
         0x3FC0, 0x3F00, 0x4040, 0x4B00, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81,
         0x7FF7)  # fmt: skip
_F32 = (0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x80800000,
        0x3F800000, 0xBF800000, 0x3F800001, 0x3F7FFFFF, 0x3FC00000, 0x33800000, 0x40400000,
        0x4B000001, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345,
        0x7F800001, 0xFFA00000)  # fmt: skip
_F64 = (0, 1 << 63, 1, 0x000FFFFFFFFFFFFF, 0x8010000000000000, 0x3FF0000000000000,
        0xBFF0000000000001, 0x3CA0000000000000, 0x4340000000000001, 0x47EFFFFFF0000000,
        0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000000,
        0xFFF8000012345678, 0x7FF0000000000001)  # fmt: skip
# f32 values where rounding to a narrower float or an integer begins, ends or overflows.
_EDGES = (0x477FE000, 0x477FEFFF, 0x477FF000, 0x47800000, 0x43E00000, 0x43E7FFFF, 0x43E80000,
          0x43E80001, 0x43F00000, 0x47600000, 0x476FFFFF, 0x47700000, 0x7F7F7FFF, 0x7F7F8000,
          0x7F7FEFFF, 0x7F7FF000, 0x33000000, 0x33000001, 0x32FFFFFF, 0x3A800000, 0x3A800001,
          0x3B000000, 0x37000000, 0x37000001, 0x4EFFFFFF, 0x4F000000, 0x4F7FFFFF, 0x4F800000,
          0x5EFFFFFF, 0x5F000000, 0x5F7FFFFF, 0x5F800000, 0x42FE0000, 0x42FF0000, 0x43000000,
          0x437F0000, 0x437F8000, 0x43800000, 0x46FFFE00, 0x46FFFF00, 0x47000000, 0x477FFF00,
          0x477FFF80, 0x47800000, 0x3F000000, 0x3EFFFFFF, 0x3F000001, 0x3FC00000, 0x40200000,
          0x4AFFFFFF, 0x4B000000, 0x4B7FFFFF)  # fmt: skip
_SPECIALS = {
    "u16": (_U16, "u2"),
    "u32": (_U32, "u4"),
    "u64": (_U64, "u8"),
    "f16": (_F16, "u2"),
    "bf16": (_BF16, "u2"),
    "f32": (_F32, "u4"),
    "f64": (_F64, "u8"),
}
_EXPONENT = {"f16": (10, 5), "bf16": (7, 8), "f32": (23, 8), "f64": (52, 11)}


def _random_integers(name: str, column: int, count: int, dtype: str) -> Array:
    """Random bits shifted right by random amounts, so that all magnitudes occur."""
    bits = np.dtype(dtype).itemsize * 8
    values = random_array(f"{name}{column}", (count,), dtype)
    shifts = random_array(f"{name}{column}shift", (count,), dtype) % np.array(2 * bits, dtype)
    return np.where(shifts < bits, values >> (shifts % np.array(bits, dtype)), values)


def _random_floats(name: str, column: int, count: int, dtype: str) -> Array:
    """Float values: half random bits, half with close exponents or near the ends of the range."""
    mantissa, exponent = _EXPONENT[name]
    values = random_array(f"{name}{column}", (count,), dtype)
    top = (1 << exponent) - 1
    drift = random_array(f"{name}{column}drift", (count,), "u4") % np.uint32(2 * mantissa // 3 + 4)
    centre = np.resize([top // 2, top // 4, top // 2, 3 * top // 4, 2, top - 3], count)
    near = np.clip(centre + drift.astype(np.int64) - mantissa // 3, 0, top).astype(dtype)
    keep = np.array((1 << mantissa) - 1 | 1 << (mantissa + exponent), dtype)
    shaped = (values & keep) | (near << np.array(mantissa, dtype))
    return np.where(np.arange(count) % 2 == 0, values, shaped)


def _plain(name: str, column: int, lanes: int) -> Array:
    """Every pair of special values in columns 0 and 1, then random values; column 2: a mixture."""
    specials, dtype = _SPECIALS[name]
    pairs = np.array(list(product(specials, specials)), dtype)
    count = max(lanes - len(pairs), 0)
    random = _random_floats if name in _EXPONENT else _random_integers
    if column < 2:
        return np.concatenate([pairs[:lanes, column], random(name, column, count, dtype)])
    values = random(name, column, lanes, dtype)
    picks = random_array(f"{name}{column}pick", (lanes,), "u4") % np.uint32(2 * len(specials))
    table = np.array(specials, dtype)
    return np.where(picks < len(specials), table[picks % len(specials)], values)


def _halfway(lanes: int) -> Array:
    """Float32 values at, just below and just above the rounding edges of every narrower format."""
    seeds = _random_floats("f32", 7, lanes, "u4")
    # Bits dropped by tf32, f16/bf16, e4m3 and e5m2; one more for values that are denormal there.
    dropped = np.resize(np.array([13, 13, 16, 16, 20, 20, 21, 21, 14, 22, 23, 17], "u4"), lanes)
    exponents = random_array("halfway", (lanes,), "u4") % np.uint32(44) + np.uint32(127 - 27)
    seeds = np.where(
        np.arange(lanes) % 4 < 3, (seeds & np.uint32(0x807FFFFF)) | (exponents << 23), seeds
    )
    half = np.uint32(1) << (dropped - 1)
    exact = (seeds & ~((half << 1) - 1)) | half
    nudge = np.resize(np.array([0, -1, 1, 0, 0], "i4"), lanes).astype("u4")
    values: Array = exact + nudge
    edges = np.array(_EDGES, "u4")
    edges = np.concatenate([edges, edges | np.uint32(0x80000000), np.array(_F32, "u4")])
    values[: len(edges)] = edges
    return values


@cache
def bank(name: str, column: int, lanes: int) -> Array:
    """Operand values of one column.

    Args:
        name: a format (``u16`` to ``f64``), a packed pair (``f16x2``, ``bf16x2``), or a purpose:
            ``narrow`` (f32 at the rounding edges of other formats), ``angle`` (f32 in ±2π),
            ``shift``, ``field``, ``field8`` (bit counts, some too large), ``lane``, ``segment`` and
            ``few`` (for warp-wide instructions), ``all`` (0 .. 65535) and ``all2`` (pairs of such).
        column: operand number; columns of one bank pair up.
        lanes: number of values.
    """
    if name in _SPECIALS:
        return _plain(name, column, lanes)
    if name in ("f16x2", "bf16x2"):
        low: Array = _plain(name[:-2], column, lanes).astype("u4")
        high = np.roll(_plain(name[:-2], column, lanes), 331).astype("u4")
        return low | high << 16
    if name == "u16x2":
        return random_array(f"u16x2{column}", (lanes,), "u4") & np.resize(
            np.array([0xFFFFFFFF, 0x80FF80FF, 0x7FFF8000, 0xFFFF0001], "u4"), lanes
        )
    if name == "narrow":
        return np.roll(_halfway(lanes), 97 * column)
    if name == "angle":
        specials = np.array(_F32, "u4").view("f4")
        specials = specials[~(np.abs(specials) > 100) | ~np.isfinite(specials)]
        values = (random_array("angle", (lanes,), "u4").astype("f8") / 2**32 - 0.5) * 4 * np.pi
        values[: len(specials)] = 0
        values = values.astype("f4").view("u4")
        values[: len(specials)] = specials.view("u4")
        return values
    if name == "shift":
        table = (0, 1, 7, 8, 15, 16, 17, 30, 31, 32, 33, 47, 48, 62, 63, 64, 65, 127, 128, 255,
                 256, 257, 0x10000, 0x80000000, 0xFFFFFFFF)  # fmt: skip
        picks = random_array(f"shift{column}", (lanes,), "u4") % np.uint32(len(table))
        return np.array(table, "u4")[picks]
    if name == "field8":
        return bank("field", column, lanes) & np.uint32(0xFF)
    if name == "field":
        values: Array = random_array(f"field{column}", (lanes,), "u4")
        return np.where(values % 5 == 0, values >> 8, (values >> 8) % np.uint32(70))
    if name == "lane":
        return random_array(f"lane{column}", (lanes,), "u4") % np.uint32(32)
    if name == "segment":  # shfl's third operand: clamp in bits 0-4, segment mask in bits 8-12
        return random_array(f"segment{column}", (lanes,), "u4") & np.resize(
            np.array([0x1F1F, 0xFFFFFFFF, 0x1C1F, 0x001F, 0x1F00], "u4"), lanes
        )
    if name in ("few", "few64"):  # four values; in some warps all lanes have the same value
        values = random_array(f"few{column}", (lanes,), "u4") % np.uint32(4)
        values = np.where(np.arange(lanes) // 32 % 4 == 3, values[0], values) + np.uint32(
            0xFFFFFFFE
        )
        wide = values.astype("u8")
        return values if name == "few" else wide | wide << 32
    if name == "all":
        return np.arange(lanes, dtype="u2")
    if name == "all2":
        low = np.arange(lanes, dtype="u4")
        return low | (low * np.uint32(40503) + np.uint32(77)) << 16
    raise KeyError(name)
