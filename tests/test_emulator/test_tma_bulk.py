"""Argument checks of bulk copies, and reductions against exact arithmetic."""

import itertools
import math
import struct
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tests.emulator.findings import IllegalInstruction, Misaligned
from tests.emulator.tma.bulk import byte_mask, check_copy, check_reduction
from tests.emulator.tma.reduction import ACCEPTED, combine

DTYPES = {
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
    "b32": np.uint32,
    "b64": np.uint64,
}


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("operation", ACCEPTED)
def test_integer_reductions(operation, kind):
    if kind not in ACCEPTED[operation]:
        with pytest.raises(IllegalInstruction, match=rf"\.{operation} of \.{kind}, accepted"):
            combine(operation, kind, np.zeros(16, np.uint8), np.zeros(16, np.uint8))
        return
    dtype = DTYPES[kind]
    limits = np.iinfo(dtype)
    edges = [limits.min, limits.max, 0, 1, 5, limits.max - 1, limits.max // 3]
    pairs = np.array(list(itertools.product(edges, edges)), dtype)
    old, new = pairs[:, 0].copy(), pairs[:, 1].copy()
    result = combine(operation, kind, old.view(np.uint8), new.view(np.uint8)).view(dtype)
    formula = {
        "add": lambda o, n: o + n,
        "min": min,
        "max": max,
        "inc": lambda o, n: 0 if o >= n else o + 1,
        "dec": lambda o, n: n if o == 0 or o > n else o - 1,
        "and": lambda o, n: o & n,
        "or": lambda o, n: o | n,
        "xor": lambda o, n: o ^ n,
    }[operation]
    modulus = 1 << limits.bits
    for o, n, r in zip(old.tolist(), new.tolist(), result.tolist(), strict=True):
        assert (formula(o, n) - r) % modulus == 0


FLOAT_BITS = np.random.default_rng(1).integers(0, 1 << 16, 4096, dtype=np.uint16)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize(("kind", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_half_additions_round_once(kind, dtype):
    old, new = FLOAT_BITS[:2048].view(dtype), FLOAT_BITS[2048:].view(dtype)
    got = combine("add", kind, old.view(np.uint8), new.view(np.uint8)).view(dtype)
    exact = old.astype(np.float64) + new.astype(np.float64)
    finite = np.isfinite(old.astype(np.float64)) & np.isfinite(new.astype(np.float64))
    # A float64 sum of two half floats is exact, so that one rounding gives the right result.
    for o, n in zip(old[finite][:50].tolist(), new[finite][:50].tolist(), strict=True):
        if kind == "f16":
            assert Fraction(o) + Fraction(n) == Fraction(o + n)
    np.testing.assert_array_equal(
        got[finite].view(np.uint16), exact[finite].astype(dtype).view(np.uint16)
    )
    assert (got.view(np.uint16)[np.isnan(exact)] == 0x7FFF).all()


@pytest.mark.parametrize("operation", ["min", "max"])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize(("kind", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_half_extremes(operation, kind, dtype):
    specials = np.array([0, 0x8000, 0x3C00, 0xBC00, 0x7FFF, 0xFFFF], np.uint16)
    pairs = np.array(list(itertools.product(specials, specials)), np.uint16)
    old = np.concatenate([pairs[:, 0], FLOAT_BITS[:2048]])
    new = np.concatenate([pairs[:, 1], FLOAT_BITS[2048:]])
    got = combine(operation, kind, old.view(np.uint8), new.view(np.uint8)).view(np.uint16)
    pick = min if operation == "min" else max
    for o, n, g in zip(old, new, got, strict=True):
        values = [np.uint16(x).view(dtype) for x in (o, n)]
        numbers = [
            (float(v), math.copysign(1, v), int(x))
            for v, x in zip(values, (o, n), strict=True)
            if not np.isnan(v)
        ]
        assert g == (pick(numbers)[2] if numbers else 0x7FFF)


def test_single_precision_flushes_only_when_told():
    subnormal, tiny = 0x0000_0003, 0x0080_0001
    old = np.array([subnormal, 0x8000_0003, tiny, 0x3F80_0000], np.uint32)
    new = np.array([subnormal, 0x8000_0001, 0x8080_0000, 0x7FC0_0000], np.uint32)
    keep = combine("add", "f32", old.view(np.uint8), new.view(np.uint8)).view(np.uint32)
    assert keep.tolist() == [6, 0x8000_0004, 1, 0x7FFF_FFFF]
    flush = combine("add", "f32", old.view(np.uint8), new.view(np.uint8), True).view(np.uint32)
    assert flush.tolist() == [0, 0x8000_0000, 0, 0x7FFF_FFFF]


def test_double_additions():
    old, new = np.array([1e300, 1.0, 2.0**53]), np.array([1e300, 2.0**-53, 1.0])
    got = combine("add", "f64", old.view(np.uint8), new.view(np.uint8)).view(np.float64)
    assert [struct.pack("<d", x) for x in got] == [
        struct.pack("<d", x) for x in (2e300, 1.0, 2.0**53)
    ]


def test_reductions_do_not_touch_their_operands():
    old, new = np.full(4, np.nan, np.float32), np.ones(4, np.float32)
    combine("add", "f32", old.view(np.uint8), new.view(np.uint8))
    assert (new == 1).all()
    assert (old.view(np.uint32) == 0x7FC0_0000).all()


@pytest.mark.parametrize(
    ("operation", "kind", "destination", "noftz"),
    [
        ("add", "u64", "global", False),
        ("add", "f64", "global", False),
        ("add", "bf16", "global", True),
        ("max", "f16", "global", False),
        ("xor", "b64", "global", False),
        ("min", "s32", "shared::cluster", False),
        ("and", "b32", "shared::cluster", False),
    ],
)
def test_legal_bulk_reductions(operation, kind, destination, noftz):
    check_reduction(operation, kind, destination, noftz)


@pytest.mark.parametrize(
    ("operation", "kind", "destination", "noftz", "message"),
    [
        ("add", "s64", "global", False, r"\.add of \.s64, accepted"),
        ("xor", "s32", "global", False, r"accepted \['b32', 'b64'\]"),
        ("min", "f32", "global", False, r"\.min of \.f32"),
        ("add", "f32", "shared::cluster", False, r"accepted \['s32', 'u32', 'u64'\]"),
        ("and", "b64", "shared::cluster", False, r"accepted \['b32'\]"),
        ("mul", "u32", "global", False, r"\.mul of \.u32, accepted \[\]"),
        ("add", "f16", "global", False, r"\.add\.f16 without \.noftz"),
        ("min", "f16", "global", True, r"\.min\.f16 with \.noftz"),
    ],
)
def test_illegal_bulk_reductions(operation, kind, destination, noftz, message):
    with pytest.raises(IllegalInstruction, match=message):
        check_reduction(operation, kind, destination, noftz)


def test_bulk_copy_arguments():
    check_copy(32, 16, 0x1000)
    check_copy(0, 16)
    with pytest.raises(IllegalInstruction, match="bulk copy of 24 bytes, accepted multiples of 16"):
        check_copy(24, 16)
    with pytest.raises(Misaligned, match="bulk copy at 0x1008, accepted multiples of 16"):
        check_copy(32, 16, 0x1008)


def test_byte_mask():
    mask = byte_mask(0b1000_0000_0000_0101, 48)
    assert np.flatnonzero(mask).tolist() == [0, 2, 15, 16, 18, 31, 32, 34, 47]
    assert not mask.flags.writeable
