"""Layout of weights in fragments: every bit is where the description says, every value is kept.

Offsets are written here from that description, in NumPy; values come from ml_dtypes.
"""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nvfp4_kernels import InvalidArgument
from nvfp4_kernels.formats import fragments as fragments_module
from nvfp4_kernels.formats.fragments import (
    Fragments,
    blocked_weight,
    decode_fragments,
    fragment_shapes,
    from_fragments,
    to_fragments,
)
from nvfp4_kernels.formats.nvfp4 import quantize_weight, to_blocked
from tests.test_kernels import oracle
from tests.test_kernels.strategies import PROPERTY, generators

E4M3 = torch.float8_e4m3fn
LEAST_SCALE = 2.0**-9

# (N, K), whole tiles and ragged in either direction.
SHAPES = {
    "one tile": (64, 64),
    "one block": (1, 16),
    "ragged rows": (65, 64),
    "ragged K": (64, 80),
    "half a warp": (8, 32),
    "between warps": (41, 48),
    "several tiles": (192, 256),
    "ragged both": (130, 208),
    "Qwen3 0.6B k_proj, N/4": (256, 1024),
}
LAYOUT = pytest.mark.parametrize(("n", "k"), SHAPES.values(), ids=SHAPES)


def codes_and_scales(rng: np.random.Generator, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Any codes ``(n, k)``, and any positive scales ``(n, k/16)``, as bytes."""
    codes = rng.integers(0, 16, (n, k), dtype=np.uint8)
    return codes, rng.integers(1, 0x7F, (n, k // 16), dtype=np.uint8)


def packed(codes: np.ndarray) -> Tensor:
    return torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4)


def e4m3(raw: np.ndarray) -> Tensor:
    return torch.from_numpy(raw).view(E4M3)


def described(codes: np.ndarray) -> np.ndarray:
    """Data of the layout, element by element from the description."""
    n, k = codes.shape
    tiles = (-(-n // 64), -(-k // 64))
    words = np.zeros((*tiles, 4, 32, 4), np.uint32)
    # Bits of the even element, for the four pairs of a word, that rotations bring to 15, 8, 7, 6:
    # sign, then magnitude from the high bit down. Negative bit numbers wrap around.
    places = [(13, 6, 5, 4), (9, 2, 1, 0), (7, 8, -1, -2), (3, -4, -5, -6)]
    for row in range(n):
        warp, lower, g = row % 64 // 16, row % 16 // 8, row % 8
        for column in range(k):
            step, inside = column % 64 // 16, column % 16
            lane, odd = 4 * g + inside % 8 // 2, inside % 2
            code, value = int(codes[row, column]), 0
            for bit, place in zip((3, 2, 1, 0), places[2 * (inside // 8) + lower], strict=True):
                value |= (code >> bit & 1) << (place + 16 * odd) % 32
            words[row // 64, column // 64, warp, lane, step] |= np.uint32(value)
    return words.astype("<u4").view(np.uint8).reshape(*tiles, 4, 32, 16)


def held(scales: Tensor) -> np.ndarray:
    """Stored bytes of scales, by rows and blocks of K, padding included."""
    rows, columns = scales.shape[:2]
    words = np.ascontiguousarray(scales.numpy()).view("<u4").astype(np.uint64)
    found = np.empty((rows, 4, 2, 8, columns, 2, 2), np.uint8)
    for odd in range(2):
        turned = words << 8 * odd | words >> (32 - 8 * odd)
        for lower in range(2):
            byte = turned >> (4 + 16 * lower) & 0xFF
            # (row tile, K tile, warp, g, word) -> (row tile, warp, g, K tile, word)
            found[:, :, lower, :, :, :, odd] = byte.transpose(0, 2, 3, 1, 4)
    return found.reshape(rows * 64, columns * 4)


def stored_value(stored: np.ndarray) -> np.ndarray:
    """Value of a stored scale: 5 bits of exponent, 3 bits of mantissa."""
    value = (8 + stored % 8) / 8 * 2.0 ** (stored.astype(np.float64) // 8 - 22)
    return np.where(stored // 8 == 31, np.nan, value)


# --- positions of bits ------------------------------------------------------------------------


@LAYOUT
def test_every_bit(n: int, k: int) -> None:
    codes, scales = codes_and_scales(np.random.default_rng(0), n, k)
    fragments = to_fragments(packed(codes), e4m3(scales))
    assert fragments.data.shape == fragment_shapes(n, k)[0]
    assert fragments.scales.shape == fragment_shapes(n, k)[1]
    assert fragments.data.is_contiguous()
    assert fragments.scales.is_contiguous()
    assert np.array_equal(fragments.data.numpy(), described(codes))
    # Each stored scale has the value of its E4M3 number.
    values = stored_value(held(fragments.scales)[:n, : k // 16])
    np.testing.assert_array_equal(values, scales.view(ml_dtypes.float8_e4m3fn).astype(np.float64))


@pytest.mark.parametrize(
    ("place", "turns"),
    [(0, [(2, 0x81C0)]), (1, [(6, 0x81C0)]), (2, [(8, 0x80C0), (0, 0x0100)]), (3, [(12, 0x81C0)])],
)
def test_rotations_and_masks_make_bfloat16(place: int, turns: list[tuple[int, int]]) -> None:
    """Rotating and masking a stored word gives bfloat16 value · 2^-126, for codes at 4 places."""
    codes = np.zeros((16, 64), np.uint8)
    row, column = place % 2 * 8, place // 2 * 8
    for code in range(16):
        codes[row, column] = code
        fragments = to_fragments(packed(codes), e4m3(np.full((16, 4), 0x38, np.uint8)))
        word = int(fragments.data.view(torch.int32)[0, 0, 0, 0, 0]) & 0xFFFFFFFF
        turned = sum((word << by | word >> 32 - by) & mask for by, mask in turns)
        bits = np.array([turned], np.uint16)
        value = float(oracle.unpack(packed(codes))[row, column])
        assert bits.view(ml_dtypes.bfloat16).astype(np.float64) == value * 2.0**-126
        assert np.signbit(bits.view(ml_dtypes.bfloat16))[0] == (code >= 8)


@LAYOUT
def test_padding_is_zero(n: int, k: int) -> None:
    """Padding has zero elements and finite non-zero scales, which kernels expect everywhere."""
    codes = np.full((n, k), 15, np.uint8)
    fragments = to_fragments(packed(codes), e4m3(np.full((n, k // 16), 0x38, np.uint8)))
    rows, columns = -(-n // 64) * 64, -(-k // 64) * 64
    whole = decode_fragments(*fragments, rows, columns)
    assert whole.count_nonzero() == n * k
    exponents = held(fragments.scales) >> 3
    assert exponents.min() >= 1
    assert exponents.max() <= 30


# --- values -----------------------------------------------------------------------------------


@given(st.integers(1, 150), st.integers(1, 13), generators)
@PROPERTY
def test_round_trip(n: int, blocks: int, rng: np.random.Generator) -> None:
    codes, scales = codes_and_scales(rng, n, 16 * blocks)
    data, linear = packed(codes), e4m3(scales)
    fragments = to_fragments(data, linear)
    back, back_scales = from_fragments(*fragments, n, 16 * blocks)
    assert torch.equal(back, data)
    assert torch.equal(back_scales.view(torch.uint8), linear.view(torch.uint8))
    again = to_fragments(back, back_scales)
    assert torch.equal(again.data, fragments.data)
    assert torch.equal(again.scales, fragments.scales)
    values = decode_fragments(*fragments, n, 16 * blocks)
    np.testing.assert_array_equal(oracle.float64(values), oracle.dequantize(data, linear, 1.0))


@given(st.integers(1, 70), st.integers(1, 5), generators)
@PROPERTY
def test_any_bytes_keep_their_values(n: int, blocks: int, rng: np.random.Generator) -> None:
    """Values are kept for any bytes, including negative, zero and NaN scales."""
    codes = rng.integers(0, 16, (n, 16 * blocks), dtype=np.uint8)
    raw = rng.choice(
        np.array([0, 0x80, 1, 0x81, 0x38, 0xB8, 0x7E, 0xFE, 0x7F, 0xFF], np.uint8), (n, blocks)
    )
    data, linear = packed(codes), e4m3(raw)
    values = decode_fragments(*to_fragments(data, linear), n, 16 * blocks)
    np.testing.assert_array_equal(oracle.float64(values), oracle.dequantize(data, linear, 1.0))


def test_every_scale() -> None:
    """All 256 E4M3 scales, including subnormals, with every code."""
    raw = np.arange(256, dtype=np.uint8).reshape(256, 1)
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, 1))
    fragments = to_fragments(packed(codes), e4m3(raw))
    values = decode_fragments(*fragments, 256, 16)
    np.testing.assert_array_equal(
        oracle.float64(values), oracle.dequantize(packed(codes), e4m3(raw), 1.0)
    )
    assert (held(fragments.scales) >> 3).min() >= 1


def test_zero_blocks_have_zero_elements() -> None:
    """Blocks of scale zero get zero elements and a non-zero scale, which kernels multiply by."""
    codes = np.full((4, 32), 7, np.uint8)
    raw = np.array([[0, 0x38]] * 4, np.uint8)
    fragments = to_fragments(packed(codes), e4m3(raw))
    data, scales = from_fragments(*fragments, 4, 32)
    assert not data[:, :8].any()
    assert scales.float().tolist() == [[LEAST_SCALE, 1.0]] * 4


def test_a_blocked_weight_comes_back_blocked() -> None:
    weight = quantize_weight(torch.randn(130, 80))
    blocked = weight.to_blocked()
    as_it_is = blocked_weight(blocked.data, blocked.scales, 130, 80)
    assert as_it_is == (blocked.data, blocked.scales)  # the same tensors, not copies
    data, scales = blocked_weight(*to_fragments(weight.data, weight.scales), 130, 80)
    assert torch.equal(data, blocked.data)
    assert torch.equal(scales.view(torch.uint8), blocked.scales.view(torch.uint8))


def test_strided_input() -> None:
    weight = quantize_weight(torch.randn(256, 80))
    every_other = to_fragments(weight.data[::2], weight.scales.view(torch.uint8)[::2].view(E4M3))
    whole = to_fragments(
        weight.data[::2].contiguous(),
        weight.scales.view(torch.uint8)[::2].contiguous().view(E4M3),
    )
    assert torch.equal(every_other.data, whole.data)
    assert torch.equal(every_other.scales, whole.scales)


# --- stacks of weights ------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(3,), (2, 2), (0,), (1, 2, 1)], ids=str)
@pytest.mark.parametrize("at_once", [1, 2 * 70 * 80, 1 << 26], ids=["one", "two", "all"])
def test_a_stack_is_each_of_its_weights(
    batch: tuple[int, ...], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of a stack are permuted one by one, or several together, with equal results."""
    monkeypatch.setattr(fragments_module, "_AT_ONCE", at_once)
    data = torch.randint(0, 256, (*batch, 70, 40), dtype=torch.uint8)
    scales = torch.randint(1, 0x7F, (*batch, 70, 5), dtype=torch.uint8).view(E4M3)
    stack = to_fragments(data, scales)
    for whole, shape in zip(stack, fragment_shapes(70, 80), strict=True):
        assert whole.shape == (*batch, *shape)
        assert whole.is_contiguous()
    for index in np.ndindex(batch):
        one = to_fragments(data[index], scales[index])
        assert torch.equal(stack.data[index], one.data)
        assert torch.equal(stack.scales[index], one.scales)
    back, back_scales = from_fragments(*stack, 70, 80)
    assert torch.equal(back, data)
    assert torch.equal(back_scales.view(torch.uint8), scales.view(torch.uint8))
    assert decode_fragments(*stack, 70, 80).shape == (*batch, 70, 80)


def test_a_stack_takes_no_memory_of_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """No temporary is larger than the weights that are permuted together."""
    monkeypatch.setattr(fragments_module, "_AT_ONCE", 64 * 128)
    data = torch.zeros(40, 64, 64, dtype=torch.uint8)
    scales = torch.ones(40, 64, 8).to(E4M3)
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = function(*args, **(kwargs or {}))
            sizes.extend([out.untyped_storage().nbytes()] if isinstance(out, Tensor) else [])
            return out

    with Sizes():
        to_fragments(data, scales)
    given = [data.nbytes, scales.nbytes]  # as large as the result's
    assert max(size for size in sizes if size not in given) <= 4 * 64 * 128


# --- refused ----------------------------------------------------------------------------------

_DATA, _SCALES = torch.zeros(70, 40, dtype=torch.uint8), torch.zeros(70, 5, dtype=E4M3)


@pytest.mark.parametrize(
    ("data", "scales", "message"),
    [
        (_DATA.char(), _SCALES, "data: dtype is int8, must be uint8"),
        (_DATA, _SCALES.view(torch.uint8), "scales: dtype is uint8, must be float8_e4m3fn"),
        (_DATA[:, :36], _SCALES, r"data: shape is \(70, 36\), .* K a multiple of 16; pad K"),
        (_DATA[0], _SCALES, r"data: shape is \(40,\), must be \(\.\.\., N, K/2\)"),
        (_DATA[None], _SCALES, r"scales: shape is \(70, 5\), must be \(1, 70, 5\); linear"),
        (_DATA, to_blocked(_SCALES), r"scales: shape is .*, must be \(70, 5\); linear scales"),
    ],
    ids=["data dtype", "scales dtype", "K", "one row", "batch", "blocked scales"],
)
def test_weight_is_refused(data: Tensor, scales: Tensor, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        to_fragments(data, scales)


@pytest.mark.parametrize(
    ("n", "k", "message"),
    [
        (129, 80, r"data: shape is \(2, 2, 4, 32, 16\), must be \(3, 2, .*layout of 129 × 80"),
        (70, 144, r"data: shape is \(2, 2, 4, 32, 16\), must be \(2, 3, .*layout of 70 × 144"),
    ],
    ids=["N", "K"],
)
def test_other_sizes_are_refused(n: int, k: int, message: str) -> None:
    fragments = to_fragments(_DATA, _SCALES)
    with pytest.raises(InvalidArgument, match=message):
        from_fragments(*fragments, n, k)


def test_other_scales_are_refused() -> None:
    fragments = to_fragments(_DATA, _SCALES)
    with pytest.raises(InvalidArgument, match=r"scales: shape is \(1, 2, 4, 8, 8\), must be \(2,"):
        from_fragments(*Fragments(fragments.data, fragments.scales[:1]), 70, 80)
