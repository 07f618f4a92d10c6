"""Weights and inputs at the limits of float formats, and bounds on NVFP4's error."""

from collections.abc import Callable

import torch
from torch import Tensor

OUTLIER = 1e4
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def ordinary(n: int, k: int) -> Tensor:
    """Weights with standard deviation .02, as in trained models."""
    return torch.randn(n, k, dtype=torch.float64) * 0.02


def with_outlier(n: int, k: int, size: float = OUTLIER) -> Tensor:
    """Ordinary weights with one far larger element."""
    weight = ordinary(n, k)
    weight[1, 17] = size
    return weight


def with_zero_rows(n: int, k: int) -> Tensor:
    """Weights with zeros in every other row, as in pruned models."""
    return ordinary(n, k) * (torch.arange(n) % 2).unsqueeze(1)


WEIGHTS: dict[str, Callable[[int, int], Tensor]] = {
    "ordinary": ordinary,
    "zero": lambda n, k: torch.zeros(n, k, dtype=torch.float64),
    "negative zero": lambda n, k: -torch.zeros(n, k, dtype=torch.float64),
    "zero rows": with_zero_rows,
    "1e-30": lambda n, k: 50 * ordinary(n, k) * 1e-30,
    "1e30": lambda n, k: 50 * ordinary(n, k) * 1e30,
    "subnormal": lambda n, k: 50 * ordinary(n, k) * 1e-39,
    "one outlier": with_outlier,
}


def inputs(k: int) -> Tensor:
    """Rows of different magnitudes: float64 ``(7, k)``."""
    rows = torch.randn(7, k, dtype=torch.float64)
    rows[1] = 0.0
    rows[2] = -0.0
    rows[3] *= 1e-30
    rows[4] *= 1e30
    rows[5, 3] = OUTLIER
    rows[6, ::2] = 0.0
    return rows


def decoded(data: Tensor, scales: Tensor, global_scale: Tensor, *, divisor: bool = False) -> Tensor:
    """Values decoded by the format's definition, in float64: ``(..., K)``.

    ``divisor``: whether the global scale is stored as a divisor, as by compressed-tensors.
    """
    codes = torch.stack([data & 0xF, data >> 4], -1).flatten(-2).int()
    values = E2M1[codes & 7] * (1 - 2 * (codes >> 3)).double()
    factor = 1 / global_scale.double() if divisor else global_scale.double()
    return values * scales.double().repeat_interleave(16, -1) * factor


def rounding(values: Tensor, step: Tensor | float, searched: bool = False) -> Tensor:
    """Bound on NVFP4's error in each of ``values`` ``(..., K)``.

    The scale of a block is a sixth of its maximum, rounded to E4M3 with an error of a 16th, or of
    half the smallest E4M3 number, 2⁻⁹. The error of an element is half of E2M1's widest step, which
    is 2 times the scale, or, by clipping, 6 times the scale's error: together 17/96 of the maximum,
    plus three times 2⁻⁹ global scales.

    Args:
        values: exact values.
        step: global scale, for all values or for each row.
        searched: whether block scales are searched for the least squared error.
    """
    amax = values.double().unflatten(-1, (-1, 16)).abs().amax(-1).repeat_interleave(16, -1)
    per_row = step.double().unsqueeze(-1) if isinstance(step, Tensor) and step.ndim else step
    return (amax * 17 / 96 + 3 * 2.0**-9 * per_row) * (4 if searched else 1) * (1 + 2.0**-20)
