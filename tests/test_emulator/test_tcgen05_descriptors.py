import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.emulator.findings import IllegalInstruction, UnknownInstruction
from tests.emulator.tcgen05.descriptors import Swizzle, decode_shared_descriptor
from tests.emulator.tcgen05.formats import Element, ScaleFormat
from tests.emulator.tcgen05.instruction import decode_instruction

GOOD = 0x40 | 1 << 16 | 64 << 32 | 1 << 46 | 2 << 61


@given(
    start=st.integers(0, 2**14 - 1),
    leading=st.integers(0, 2**14 - 1),
    stride=st.integers(0, 2**14 - 1),
    mode=st.sampled_from([0, 1, 2, 4, 6]),
)
def test_shared_descriptor_fields(start: int, leading: int, stride: int, mode: int) -> None:
    word = start + leading * 2**16 + stride * 2**32 + 2**46 + mode * 2**61
    got = decode_shared_descriptor(word)
    assert (got.start, got.leading, got.stride) == (16 * start, 16 * leading, 16 * stride)
    assert got.swizzle == mode


@pytest.mark.parametrize(
    ("word", "error", "match"),
    [
        (0, IllegalInstruction, "0b000 in bits 46-48, 0b001 is required"),
        (GOOD ^ 3 << 46, IllegalInstruction, "0b010 in bits 46-48"),
        (GOOD | 1 << 48, IllegalInstruction, "0b101 in bits 46-48"),
        (GOOD | 1 << 14, IllegalInstruction, "reserved bits 14-15 or 30-31"),
        (GOOD | 1 << 31, IllegalInstruction, "reserved bits 14-15 or 30-31"),
        (GOOD | 1 << 52, IllegalInstruction, "absolute leading-dimension .* sm_103a"),
        (GOOD | 1 << 53, IllegalInstruction, "bits 53-60 set"),
        (GOOD | 1 << 60, IllegalInstruction, "bits 53-60 set"),
        (GOOD | 1 << 61, IllegalInstruction, "layout type 3, accepted are 0"),
        (GOOD ^ 7 << 61, IllegalInstruction, "layout type 5"),
        (GOOD | 5 << 61, IllegalInstruction, "layout type 7"),
        (GOOD | 1 << 49, UnknownInstruction, "base offset 1; only 0"),
    ],
)
def test_bad_shared_descriptors(word: int, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        decode_shared_descriptor(word)


def test_swizzle_rows() -> None:
    rows = {mode.value: mode.row_bytes for mode in Swizzle}
    assert rows == {0: 16, 1: 128, 2: 128, 4: 64, 6: 32}


# Legal M, legal N and a valid type field per kind (PTX ISA Table 39), for cta_group 1, 2 and .ws.
EVERY_8, EVERY_16, EVERY_32 = (
    set(range(8, 257, 8)),
    set(range(16, 257, 16)),
    set(range(32, 257, 32)),
)
WS = ({32, 64, 128}, {64, 128, 256})
PLAIN = {1: ({64, 128}, EVERY_8), 2: ({128, 256}, EVERY_16), "ws": WS}
SCALED = {1: ({128}, EVERY_8), 2: ({128, 256}, EVERY_16), "ws": (set(), set())}
TABLE: dict[str, tuple[dict[Any, tuple[set[int], set[int]]], int, str | None]] = {
    "f16": (PLAIN, 1 << 4, None),
    "tf32": (PLAIN, 1 << 4 | 2 << 7 | 2 << 10, None),
    "f8f6f4": (PLAIN, 1 << 4, None),
    "i8": (
        {1: ({64, 128}, {8, 24} | EVERY_16), 2: ({128, 256}, EVERY_32), "ws": WS},
        2 << 4,
        None,
    ),
    "mxf8f6f4": (SCALED, 1 << 23, None),
    "mxf4": (SCALED, 1 << 23 | 1 << 7 | 1 << 10, "scale_vec::2X"),
    "mxf4nvf4": (SCALED, 1 << 7 | 1 << 10, "scale_vec::4X"),
}
DEPTH = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}


def shape(m: int, n: int) -> int:
    return n // 8 << 17 | m // 16 << 24


@pytest.mark.parametrize("kind", TABLE)
@pytest.mark.parametrize("form", [1, 2, "ws"])
def test_every_shape_against_the_table(kind: str, form: int | str) -> None:
    forms, word, scale_vector = TABLE[kind]
    ms, ns = forms[form]
    for m, n in itertools.product((16, 32, 48, 64, 96, 128, 192, 256), range(8, 505, 8)):
        if (kind, form) in itertools.product(("mxf8f6f4", "mxf4", "mxf4nvf4"), (1, 2)) and m % 128:
            continue
        arguments = {
            "cta_group": 2 if form == 2 else 1,
            "weight_stationary": form == "ws",
            "scale_vector": scale_vector,
        }
        if m in ms and n in ns:
            got = decode_instruction(word | shape(m, n), kind, **arguments)
            assert (got.m, got.n, got.k) == (m, n, DEPTH[kind])
            assert (got.a_rows, got.b_rows) == ((m // 2, n // 2) if form == 2 else (m, n))
        else:
            with pytest.raises(IllegalInstruction, match=r"accepted|takes cta_group::1"):
                decode_instruction(word | shape(m, n), kind, **arguments)


@pytest.mark.parametrize(
    ("kind", "accepted"),
    [
        ("f16", {0: "f16", 1: "bf16"}),
        ("tf32", {2: "tf32"}),
        ("f8f6f4", {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}),
        ("mxf8f6f4", {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}),
        ("i8", {0: "u8", 1: "s8"}),
        ("mxf4", {1: "e2m1"}),
        ("mxf4nvf4", {1: "e2m1"}),
    ],
)
def test_every_type_field(kind: str, accepted: dict[int, str]) -> None:
    _, word, scale_vector = TABLE[kind]
    word &= ~(0b111111 << 7)
    # B has two type bits in the four-bit kinds; the next bit belongs to sparse A and is ignored
    # here.
    codes_b = range(4) if kind.startswith("mxf4") else range(8)
    for a, b, beyond in itertools.product(range(8), codes_b, range(8 // len(codes_b))):
        full = word | shape(128, 64) | a << 7 | b << 10 | beyond << 12
        if a in accepted and b in accepted:
            got = decode_instruction(full, kind, cta_group=1, scale_vector=scale_vector)
            assert (got.a.ptx_name, got.b.ptx_name) == (accepted[a], accepted[b])
        else:
            with pytest.raises(IllegalInstruction, match=r"[AB] type \d, accepted are"):
                decode_instruction(full, kind, cta_group=1, scale_vector=scale_vector)


@pytest.mark.parametrize(
    ("kind", "accepted"),
    [
        ("f16", {0: "f16", 1: "f32"}),
        ("tf32", {1: "f32"}),
        ("f8f6f4", {0: "f16", 1: "f32"}),
        ("i8", {2: "s32"}),
    ],
)
def test_every_accumulator_type(kind: str, accepted: dict[int, str]) -> None:
    word = TABLE[kind][1] & ~(0b11 << 4) | shape(128, 64)
    for code in range(4):
        if code in accepted:
            got = decode_instruction(word | code << 4, kind, cta_group=1)
            assert got.d.ptx_name == accepted[code]
        else:
            with pytest.raises(IllegalInstruction, match=f"D type {code}, accepted are"):
                decode_instruction(word | code << 4, kind, cta_group=1)


def test_flags_land_in_their_fields() -> None:
    word = TABLE["f8f6f4"][1] | shape(128, 64) | 3 << 7 | 5 << 10
    for bit, name in {13: "negate_a", 14: "negate_b", 15: "transpose_a", 16: "transpose_b"}.items():
        got = decode_instruction(word | 1 << bit, "f8f6f4", cta_group=1)
        flags = ("negate_a", "negate_b", "transpose_a", "transpose_b")
        assert [getattr(got, flag) for flag in flags] == [flag == name for flag in flags]
    assert got.a is Element.E2M3
    assert got.b is Element.E2M1
    assert decode_instruction(2 << 4 | shape(64, 8) | 8, "i8", cta_group=1).saturate
    ws = {"cta_group": 1, "weight_stationary": True}
    shifts = [
        decode_instruction(1 << 4 | shape(64, 64) | s << 30, "f16", **ws).max_shift
        for s in range(4)
    ]
    assert shifts == [0, 8, 16, 32]


@pytest.mark.parametrize(
    ("kind", "scale_vector", "scales", "ids", "formats"),
    [
        ("mxf8f6f4", None, 1, {0, 1, 2, 3}, {1}),
        ("mxf8f6f4", "scale_vec::1X", 1, {0, 1, 2, 3}, {1}),
        ("mxf8f6f4", "block32", 1, {0, 1, 2, 3}, {1}),
        ("mxf4", None, 2, {0, 2}, {1}),
        ("mxf4", "scale_vec::2X", 2, {0, 2}, {1}),
        ("mxf4", "block32", 2, {0, 2}, {1}),
        ("mxf4nvf4", "scale_vec::2X", 2, {0, 2}, {1}),
        ("mxf4nvf4", "block32", 2, {0, 2}, {1}),
        ("mxf4nvf4", "scale_vec::4X", 4, {0}, {0, 1}),
        ("mxf4nvf4", "block16", 4, {0}, {0, 1}),
    ],
)
def test_scales(
    kind: str, scale_vector: str | None, scales: int, ids: set[int], formats: set[int]
) -> None:
    types = 0 if kind == "mxf8f6f4" else 1 << 7 | 1 << 10
    for a, b, code in itertools.product(range(4), range(4), range(2)):
        word = types | shape(128, 64) | a << 29 | b << 4 | code << 23
        if a in ids and b in ids and code in formats:
            got = decode_instruction(word, kind, cta_group=1, scale_vector=scale_vector)
            assert (got.scale_id_a, got.scale_id_b, got.scales) == (a, b, scales)
            assert got.scale_format is ScaleFormat(code)
            assert got.d is Element.F32
        else:
            with pytest.raises(IllegalInstruction, match=r"scale factor|UE4M3"):
                decode_instruction(word, kind, cta_group=1, scale_vector=scale_vector)


F16 = 1 << 4 | shape(128, 64)
MXF4 = 1 << 23 | 1 << 7 | 1 << 10 | shape(128, 64)


@pytest.mark.parametrize(
    ("word", "kind", "arguments", "error", "match"),
    [
        (F16, "f64", {}, UnknownInstruction, "kind::f64: known are f16"),
        (F16 | 4, "f16", {}, UnknownInstruction, "sparse A"),
        (F16 | 1, "f16", {}, IllegalInstruction, "sparsity selector"),
        (F16 | 8, "f16", {}, IllegalInstruction, "saturate .* except for kind::i8"),
        (F16 | 1 << 6, "f16", {}, IllegalInstruction, "reserved bits 6, 23 and 29"),
        (F16 | 1 << 23, "f16", {}, IllegalInstruction, "reserved bits 6, 23 and 29"),
        (F16 | 1 << 29, "f16", {}, IllegalInstruction, "reserved bits 6, 23 and 29"),
        (F16 | 1 << 30, "f16", {}, IllegalInstruction, r"maximum shift .* except for \.ws"),
        (shape(128, 64) | 1 << 7, "f16", {}, IllegalInstruction, "D of type f16 needs"),
        (F16, "f16", {"scale_vector": "block16"}, IllegalInstruction, r"takes no \.block16"),
        (
            F16,
            "f16",
            {"weight_stationary": True, "cta_group": 2},
            IllegalInstruction,
            r"\.ws takes",
        ),
        (MXF4, "mxf4", {"weight_stationary": True}, IllegalInstruction, r"\.ws takes"),
        (MXF4, "mxf4", {"scale_vector": "scale_vec::4X"}, IllegalInstruction, "accepted are .*2X"),
        (MXF4, "mxf4nvf4", {}, IllegalInstruction, "no scale vector size: accepted are"),
        (MXF4 | 1 << 31, "mxf4", {}, IllegalInstruction, "K = 96 .* sm_103a"),
        (MXF4 | 1 << 15, "mxf4", {}, IllegalInstruction, "K-major A and B only"),
        (MXF4 | 1 << 16, "mxf4", {}, IllegalInstruction, "K-major A and B only"),
        (MXF4 | 1 << 24, "mxf4", {}, IllegalInstruction, "reserved bits 3, 6 and 24-26"),
        (1 << 23 | shape(128, 64) | 1 << 31, "mxf8f6f4", {}, IllegalInstruction, "reserved bit 31"),
        (2 << 4 | shape(128, 64) | 1 << 13, "i8", {}, IllegalInstruction, "cannot negate"),
        (2 << 4 | shape(128, 40), "i8", {}, IllegalInstruction, "above 32 are multiples of 16"),
        (1 << 4 | 1 << 16 | shape(128, 24), "f8f6f4", {}, IllegalInstruction, "multiples of 16"),
        (
            1 << 4 | 1 << 16 | shape(128, 48),
            "f8f6f4",
            {"cta_group": 2},
            IllegalInstruction,
            "N-major B of 8-bit type: accepted are multiples of 32",
        ),
        (
            1 << 4 | shape(64, 192),
            "f16",
            {"weight_stationary": True},
            IllegalInstruction,
            "64, 128, 256",
        ),
    ],
)
def test_bad_instruction_descriptors(
    word: int, kind: str, arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        decode_instruction(word, kind, **({"cta_group": 1} | arguments))
