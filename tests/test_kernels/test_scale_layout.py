"""The blocked scale layout of the tensor core, and E4M3 casts of scales."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.model_executor.layers.quantization.utils import nvfp4_utils
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
    convert_swizzled_to_linear,
)

from nvfp4_kernels import InvalidArgument
from nvfp4_kernels.formats.nvfp4 import blocked_shape, from_blocked, to_blocked
from tests.test_kernels import oracle
from tests.test_kernels.strategies import PROPERTY, batch_shapes, generators

# (rows, columns), whole atoms and ragged in either direction.
SHAPES = {
    "one atom": (128, 4),
    "one scale": (1, 1),
    "ragged rows": (129, 4),
    "ragged columns": (128, 5),
    "less than a quarter": (31, 3),
    "between quarters": (97, 8),
    "several atoms": (384, 12),
    "ragged both": (300, 23),
    "Llama 8B o_proj, a quarter": (1024, 64),
    "no rows": (0, 4),
}
LAYOUT = pytest.mark.parametrize(("rows", "cols"), SHAPES.values(), ids=SHAPES)


def distinct_bytes(*shape: int) -> torch.Tensor:
    """Bytes 1 to 251 in turn; as 251 is prime, positions an atom or a row apart differ."""
    count = torch.arange(int(np.prod(shape)))
    return (count % 251 + 1).to(torch.uint8).view(shape)


@LAYOUT
def test_every_offset(rows: int, cols: int) -> None:
    scales = distinct_bytes(rows, cols)
    flat = to_blocked(scales).flatten().tolist()
    for r, row in enumerate(scales.tolist()):
        for c, scale in enumerate(row):
            atom = (r // 128) * -(-cols // 4) + c // 4
            assert flat[atom * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] == scale


@LAYOUT
def test_padding_is_zero(rows: int, cols: int) -> None:
    """Every byte without a scale is 0, whatever the memory held before."""
    blocked = to_blocked(distinct_bytes(rows, cols))
    assert blocked.shape == blocked_shape(rows, cols)
    assert torch.equal(blocked, oracle.blocked(distinct_bytes(rows, cols)))
    assert blocked.count_nonzero() == rows * cols


@given(
    batch_shapes,
    st.integers(0, 260),
    st.integers(0, 9),
    generators,
    st.sampled_from([torch.uint8, torch.float8_e4m3fn]),
)
@PROPERTY
def test_round_trip(
    batch: tuple[int, ...], rows: int, cols: int, rng: np.random.Generator, dtype: torch.dtype
) -> None:
    raw = torch.from_numpy(rng.integers(0, 256, (*batch, rows, cols), dtype=np.uint8))
    blocked = to_blocked(raw.view(dtype))
    assert blocked.dtype == dtype
    assert blocked.shape == (*batch, *blocked_shape(rows, cols))
    assert blocked.is_contiguous()
    back = from_blocked(blocked, rows, cols)
    assert back.dtype == dtype
    assert back.is_contiguous()
    assert torch.equal(back.view(torch.uint8), raw)


def test_strided_input() -> None:
    scales = distinct_bytes(9, 130).mT
    assert torch.equal(to_blocked(scales), to_blocked(scales.contiguous()))
    batch = to_blocked(distinct_bytes(2, 300, 9))
    assert torch.equal(from_blocked(batch[:, 1:2], 128, 9), distinct_bytes(2, 300, 9)[:, 128:256])


@pytest.mark.parametrize(
    ("shape", "rows", "cols"),
    [
        ((1, 1, 32, 16), 129, 4),
        ((1, 1, 32, 16), 128, 5),
        ((2, 1, 32, 16), 128, 4),
        ((1, 1, 16, 32), 128, 4),
        ((7, 1, 2, 32, 16), 128, 4),
        ((128, 4), 128, 4),
    ],
)
def test_wrong_blocked_shape_is_refused(shape: tuple[int, ...], rows: int, cols: int) -> None:
    message = rf"blocked: shape .* does not hold {rows} × {cols} scales.* make it with to_blocked"
    with pytest.raises(InvalidArgument, match=message):
        from_blocked(torch.zeros(shape, dtype=torch.uint8), rows, cols)


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (300, 23), (3, 130, 9)])
def test_same_bytes_as_vllm(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    scales = torch.randint(0, 0x7F, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    # vLLM's function ends with a move to the GPU.
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    theirs = nvfp4_utils.swizzle_blockscale(scales).view(torch.uint8)
    assert torch.equal(to_blocked(scales).view(torch.uint8).flatten(), theirs.flatten())


def test_vllm_reads_the_layout() -> None:
    scales = distinct_bytes(300, 24)
    linear = convert_swizzled_to_linear(to_blocked(scales), 300, 16 * 24, 16)
    assert torch.equal(linear, scales)


def test_e4m3_decodes_as_ml_dtypes() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(codes.view(torch.float8_e4m3fn).float().numpy(), expected)


def test_e4m3_rounds_as_ml_dtypes() -> None:
    """Every positive E4M3 value up to 448, every tie between two values, and their neighbours."""
    grid = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (grid[1:] + grid[:-1]) / 2
    points = torch.cat([grid, ties])
    up, down = torch.nextafter(points, torch.tensor(1e9)), torch.nextafter(points, torch.tensor(0))
    x = torch.cat([points, up, down])
    theirs = torch.from_numpy(x.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    assert torch.equal(x.to(torch.float8_e4m3fn).view(torch.uint8), theirs)
