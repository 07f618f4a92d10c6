"""Random operands of a layer, and its result in float64."""

import torch
from torch import Tensor

from examples.kernel_bench.layers import BenchLayer
from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE, Nvfp4Tensor

CHECKED_ROWS = 4
# Every contender rounds float32 sums to bfloat16; before SiLU-and-multiply some round twice.
LARGEST_ERROR = 2.0**-6


def random_weights(layer: BenchLayer, device: torch.device) -> tuple[Nvfp4Tensor, ...]:
    """Random weight, or gate and up weights; products with unit noise have unit variance.

    All matrices have one global scale, a power of two, so that bfloat16 holds each value exactly.
    """
    rms = 2.9 * 0.6 * 448  # RMS of the codes, of the block scales
    global_scale = torch.tensor(rms * layer.k**0.5, device=device).reciprocal().log2().round()
    made = []
    for _ in range(layer.weights):
        data = torch.randint(0, 256, (layer.n, layer.k // 2), dtype=torch.uint8, device=device)
        scales = torch.rand(layer.n, layer.k // BLOCK_SIZE, device=device) * 384 + 64
        made.append(Nvfp4Tensor(data, scales.to(torch.float8_e4m3fn), global_scale.exp2()))
    return tuple(made)


def random_tokens(m: int, k: int, device: torch.device) -> Tensor:
    """Tokens of unit noise: bfloat16 ``(m, k)``."""
    return torch.randn(m, k, device=device).bfloat16()


def checked_rows(m: int) -> list[int]:
    """Indices of a few of ``m`` rows: the first, the last, and some between."""
    count = min(CHECKED_ROWS, m)
    return sorted({round(i * (m - 1) / max(1, count - 1)) for i in range(count)})


def expected_rows(layer: BenchLayer, x: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    """Result for tokens ``x``: float64 ``(rows, N)``, from the values of the weights."""
    products = [x.double() @ weight.double().mT for weight in weights]
    if not layer.gate_up:
        return products[0]
    gate, up = products
    return torch.nn.functional.silu(gate) * up


def largest_relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest difference, as a share of the largest expected magnitude; NaN if a value is NaN."""
    return float((got.double() - expected).abs().max() / expected.abs().max())
