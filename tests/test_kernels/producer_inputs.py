"""Weights that this package and checkpoint producers must quantise to the same bits."""

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_ROWS, _K = 8, 64


def producer_inputs(dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Weights ``(rows, K)`` of one dtype, by name; none is all zero."""
    rng = np.random.default_rng(seed)
    gauss = rng.standard_normal((_ROWS, _K))
    outliers = gauss * np.where(rng.random(_K) < 0.05, 50.0, 1.0)
    zero_blocks = gauss.copy()
    zero_blocks[:, 16:48] = 0.0
    negative_zeros = np.where(rng.random(gauss.shape) < 0.5, -0.0, gauss)
    octaves = gauss * 2.0 ** np.repeat(rng.integers(-20, 1, (_ROWS, _K // 16)), 16, axis=1)
    tiny = 2.0**-20 if dtype == torch.float16 else 2.0**-114
    weights = {
        "gauss": 0.02 * gauss,
        "laplace": rng.laplace(size=gauss.shape),
        "student-t": rng.standard_t(4, size=gauss.shape),
        "outlier channels": outliers,
        "zero blocks": zero_blocks,
        "negative zeros": negative_zeros,
        "octaves": octaves,
        "tiny": gauss * tiny,
        "huge": np.clip(gauss / 3, -1, 1) * torch.finfo(dtype).max,
        "ties": _ties(rng),
        "near ties": _near_ties(rng),
        "one block": gauss[:1, :16],
    }
    return {name: torch.from_numpy(w).to(dtype) for name, w in weights.items()}


def _ties(rng: np.random.Generator) -> np.ndarray:
    """Weights whose quotients are multiples of 1/4, with every tie of the E2M1 grid.

    Block scales are powers of two; one block scale of 448 makes the global scale 2⁻⁶ exactly.
    """
    quotients = rng.integers(-24, 25, (_ROWS, _K // 16, 16)) / 4
    quotients[..., 0] = 6.0
    scales = 2.0 ** rng.integers(-3, 8, (_ROWS, _K // 16, 1))
    scales[0, 0] = 448.0
    return (quotients * scales * 2.0**-6).reshape(_ROWS, _K)


def _near_ties(rng: np.random.Generator) -> np.ndarray:
    """Maxima and elements within two float32 ulps of a tie, where the order of operations shows."""
    grid = np.arange(0x30, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    below, above = grid[:-1], grid[1:]
    largest = np.float32(rng.uniform(1, 2))
    global_scale = largest / np.float32(2688)
    choice = rng.integers(0, len(below), (2 * _ROWS, 2 * _K // 16, 1))
    ties = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], (*choice.shape[:2], 16))
    signs = rng.choice([-1.0, 1.0], ties.shape)
    elements = (ties * below[choice] * global_scale).astype(np.float32)
    elements[..., :1] = (below[choice] + above[choice]) / 2 * 6 * global_scale
    elements += rng.integers(-2, 3, elements.shape) * np.spacing(elements)
    elements[0, 0, 0] = largest
    return (signs * elements).reshape(2 * _ROWS, 2 * _K)
