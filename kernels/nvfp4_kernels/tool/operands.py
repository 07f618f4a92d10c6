"""Operands as NVFP4 data, with their exact float64 values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE, E2M1_VALUES, encode_e2m1, to_blocked
from nvfp4_kernels.formats.terms import stack_scales


@dataclass(frozen=True)
class Operand:
    """Matrix, or batch of matrices, in NVFP4 and in float64.

    Attributes:
        data: uint8 ``(..., rows, K/2)``.
        scales: float8_e4m3fn, blocked.
        values: float64 ``(..., rows, K)``.
    """

    data: Tensor
    scales: Tensor
    values: Tensor


def operand(codes: Tensor, scales: Tensor) -> Operand:
    """Operand from E2M1 values ``(..., rows, K)`` and block scales ``(..., rows, K/16)``."""
    small = scales.to(torch.float8_e4m3fn)
    values = codes.double() * small.double().repeat_interleave(BLOCK_SIZE, -1)
    return Operand(encode_e2m1(codes), to_blocked(small), values)


def grid_operand(shape: tuple[int, ...], seeded: torch.Generator) -> Operand:
    """Operand of small integers and power-of-two scales, whose products sum exactly in float32."""
    codes = _pick([-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0], shape, seeded)
    return operand(codes, _pick([0.5, 1.0, 2.0], _blocks(shape), seeded))


def grid_terms(terms: int, shape: tuple[int, int], seeded: torch.Generator) -> Operand:
    """Operand of ``shape`` (rows, K) that is the sum of ``terms`` > 1 terms of small integers.

    The data are uint8 ``(terms, rows, K/2)``, the scales those of stacked rows, and the values the
    sums, which a product adds exactly in float32.
    """
    stacked = terms, *shape
    codes = _pick([-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0], stacked, seeded)
    scales = _pick([0.5, 1.0, 2.0], _blocks(stacked), seeded).to(torch.float8_e4m3fn)
    values = (codes.double() * scales.double().repeat_interleave(BLOCK_SIZE, -1)).sum(0)
    return Operand(encode_e2m1(codes), stack_scales(scales), values)


def positive_operand(shape: tuple[int, ...], seeded: torch.Generator) -> Operand:
    """Operand of values 1, 2 and 4."""
    codes = _pick([1.0, 2.0], shape, seeded)
    return operand(codes, _pick([1.0, 2.0], _blocks(shape), seeded))


def random_operand(shape: tuple[int, ...], seeded: torch.Generator) -> Operand:
    """Operand of random E2M1 codes, and scales over 12 octaves."""
    codes = _pick([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], shape, seeded)
    octaves = 12 * torch.rand(_blocks(shape), generator=seeded, device=seeded.device) - 6
    return operand(codes, 2.0**octaves)


def _pick(choices: list[float], shape: tuple[int, ...], seeded: torch.Generator) -> Tensor:
    device = seeded.device
    index = torch.randint(len(choices), shape, generator=seeded, device=device)
    return torch.tensor(choices, device=device)[index]


def _blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] // BLOCK_SIZE)
