import math

import numpy as np
import pytest

from tests.emulator.tcgen05.formats import (
    Element,
    ScaleFormat,
    decode,
    decode_containers,
    decode_scales,
)
from tests.test_emulator import tcgen05_oracle as oracle


def same(got: np.ndarray, expected: list[float]) -> None:
    want = np.array(expected)
    with np.errstate(invalid="ignore"):
        wide = got.astype(np.float64)
    np.testing.assert_array_equal(wide, want)
    np.testing.assert_array_equal(
        np.signbit(got[~np.isnan(want)]), np.signbit(want[~np.isnan(want)])
    )


@pytest.mark.parametrize("element", [Element.E4M3, Element.E5M2, Element.U8, Element.S8])
def test_every_eight_bit_code(element: Element) -> None:
    raw = np.arange(256, dtype=np.uint8)[None]
    same(decode(raw, element)[0], [oracle.value(code, element.ptx_name) for code in range(256)])


@pytest.mark.parametrize("element", [Element.F16, Element.BF16])
def test_every_sixteen_bit_code(element: Element) -> None:
    raw = np.arange(65536, dtype=np.uint16)[None].view(np.uint8)
    same(decode(raw, element)[0], [oracle.value(code, element.ptx_name) for code in range(65536)])


def test_tf32_drops_low_bits() -> None:
    codes = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    raw = codes[None].view(np.uint8)
    same(decode(raw, Element.TF32)[0], [oracle.value(int(code), "tf32") for code in codes])


def test_e2m1_low_nibble_first() -> None:
    raw = np.arange(256, dtype=np.uint8)[None]
    expected = [oracle.value(code >> 4 * i & 15, "e2m1") for code in range(256) for i in range(2)]
    same(decode(raw, Element.E2M1)[0], expected)


@pytest.mark.parametrize("element", [Element.E2M3, Element.E3M2])
def test_six_bit_codes_are_packed_from_bit_0(element: Element) -> None:
    codes = np.concatenate([np.arange(64), np.random.default_rng(1).integers(0, 64, 192)])
    number = sum(int(code) << 6 * i for i, code in enumerate(codes))
    raw = np.frombuffer(number.to_bytes(192, "little"), dtype=np.uint8).reshape(2, 96)
    expected = [oracle.value(int(code), element.ptx_name) for code in codes]
    same(decode(raw, element).reshape(-1), expected)


@pytest.mark.parametrize(
    ("element", "shift"),
    [(Element.E2M1, 2), (Element.E2M3, 1), (Element.E3M2, 1), (Element.E4M3, 0)],
)
def test_containers_hold_codes_in_the_middle(element: Element, shift: int) -> None:
    codes = np.arange(1 << element.bits)
    raw = (codes << shift).astype(np.uint8)[None]
    same(
        decode_containers(raw, element)[0], [oracle.value(int(c), element.ptx_name) for c in codes]
    )


def test_scales() -> None:
    codes = np.arange(256, dtype=np.uint8)
    same(decode_scales(codes, ScaleFormat.UE8M0), [oracle.scale_value(c, True) for c in range(256)])
    same(
        decode_scales(codes[:128], ScaleFormat.UE4M3),
        [oracle.scale_value(c, False) for c in range(128)],
    )
    assert math.isnan(decode_scales(codes, ScaleFormat.UE8M0)[255])


def test_accumulator_formats_are_no_operands() -> None:
    with pytest.raises(ValueError, match="f32 is no operand format"):
        decode(np.zeros((1, 16), np.uint8), Element.F32)
