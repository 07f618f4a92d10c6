"""Stand-in for torch's block-scaled product, the reference of some of NVIDIA's examples."""

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.emulator.examples.scaled_mm import block_scaled_mm

M, N, K = 130, 120, 128


def blocked(scales: np.ndarray) -> torch.Tensor:
    """Scales in cuBLAS's 128 × 4 tiles, by the formula of its documentation."""
    rows, columns = scales.shape
    across = -(-columns // 4)
    tiles = np.zeros(-(-rows // 128) * across * 512, scales.dtype)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * across + c // 4
            tiles[tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4] = scales[r, c]
    return torch.from_numpy(tiles.view(np.uint8))


def fp4(values: np.ndarray) -> torch.Tensor:
    codes = values.view(np.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return torch.from_numpy(packed).view(torch.float4_e2m1fn_x2)


@pytest.mark.parametrize(
    ("values", "scales", "vector"),
    [
        (ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn, 16),
        (ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu, 32),
        (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, 32),
    ],
)
def test_it_is_the_product_of_the_scaled_matrices(values: type, scales: type, vector: int) -> None:
    random = np.random.default_rng(0)
    operands, arguments, factors = [], [], []
    for rows in (M, N):
        matrix = random.normal(0, 2, (rows, K)).astype(values)
        scale = (2.0 ** random.integers(-3, 4, (rows, K // vector))).astype(scales)
        operands.append(matrix.astype(np.float64) * scale.astype(np.float64).repeat(vector, 1))
        if values is ml_dtypes.float4_e2m1fn:
            arguments.append(fp4(matrix))
        else:
            arguments.append(torch.from_numpy(matrix.view(np.uint8)).view(torch.float8_e4m3fn))
        factors.append(blocked(scale).view(getattr(torch, scales.__name__)))
    a, b = arguments
    result = block_scaled_mm(a, b.transpose(0, 1), *factors, out_dtype=torch.float32)
    np.testing.assert_allclose(result.numpy(), operands[0] @ operands[1].T, rtol=1e-6)


def test_what_it_does_not_do_is_refused() -> None:
    ones = torch.ones(1)
    with pytest.raises(NotImplementedError, match="bias and scale_result are not emulated"):
        block_scaled_mm(ones, ones, ones, ones, bias=ones)
