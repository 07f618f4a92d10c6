"""Conversion of weights for products of FP8 activations: see ``nvfp4_kernels.formats.folded``."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_kernels.formats.folded import MAX_ROW_ERROR, to_folded
from nvfp4_kernels.formats.fp8_rows import FP8_MAX
from nvfp4_kernels.formats.nvfp4 import GLOBAL_RANGE
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.kernel_weight import KernelWeight


class FoldedMatrices(NamedTuple):
    """Weight, or stack of weights, in the folded layout, and how well each folded.

    Attributes:
        data: uint8 ``(..., row tiles, K tiles, 2, 4, 32, 16)``.
        scales: int32 ``(..., row tiles, K tiles, 4, 32)``.
        factors: float32 ``(..., N)``, factor of each row.
        errors: float32 ``(...)``, largest relative RMS error of a row of each weight; infinite if
            the factor of a row is no normal float32.
    """

    data: Tensor
    scales: Tensor
    factors: Tensor
    errors: Tensor


class Folded(NamedTuple):
    """Folded weight of a linear layer, and how well it folded.

    Attributes:
        weight: weight in the folded layout, with a factor for each row.
        error: float32 ``()``, largest of ``FoldedMatrices.errors``.
    """

    weight: KernelWeight
    error: Tensor


def fp8_scale(scale: Tensor) -> Tensor:
    """Calibrated scale of E4M3 activations, of any shape, from the scale for NVFP4, a factor.

    The value of E4M3's 1.0 is six times as large, so that both formats saturate at one magnitude.
    """
    return scale * (GLOBAL_RANGE / FP8_MAX)


def fold(data: Tensor, scales: Tensor, alpha: Tensor) -> FoldedMatrices:
    """Fold weights, and all scales but those of tokens into a factor for each row.

    Args:
        data: uint8 ``(..., N, K/2)``, two E2M1 codes per byte.
        scales: float8_e4m3fn ``(..., N, K/16)``, linear layout.
        alpha: float32, factors of the rows' results, broadcast to ``(..., N)``: global scales,
            times calibrated input scales if any.

    Raises:
        InvalidArgument: a block scale is NaN.
    """
    folded = to_folded(data, scales)
    factors = alpha * folded.row_scale
    is_normal = factors.amin(-1) >= torch.finfo(torch.float32).tiny
    errors = torch.where(is_normal, folded.row_error.amax(-1), torch.inf)
    return FoldedMatrices(folded.data, folded.scales, factors, errors)


def folded_weight(
    data: Tensor,
    scales: Tensor,
    weight_global: Tensor,
    input_global: Tensor | None,
    shard_sizes: Sequence[int],
    *,
    gate_up: bool,
) -> Folded:
    """Fold the weight of a linear layer.

    Args:
        data: uint8 ``(N, K/2)``, two E2M1 codes per byte.
        scales: float8_e4m3fn ``(N, K/16)``, linear layout.
        weight_global: float32 ``(S,)``, global scales of the shards, as factors.
        input_global: float32 ``(S,)``, input scales of the shards for NVFP4, as factors, or None.
            The shards share their input, and so one scale: the largest.
        shard_sizes: rows of the shards, which add up to N.
        gate_up: whether the rows are a gate and an up projection of equal size, to run as one op.

    Raises:
        InvalidArgument: a block scale is NaN.
    """
    input_scale = None if input_global is None else fp8_scale(input_global.max())
    alpha = weight_global if input_scale is None else weight_global * input_scale
    factors = alpha.repeat_interleave(torch.tensor(list(shard_sizes), device=alpha.device))
    if gate_up:
        data, factors = data.unflatten(0, (2, -1)), factors.unflatten(0, (2, -1))
        scales = scales.view(torch.uint8).unflatten(0, (2, -1)).view(torch.float8_e4m3fn)
    folded = fold(data, scales, factors)
    weight = KernelWeight(folded.data, folded.scales, folded.factors, input_scale)
    return Folded(weight, folded.errors.max())


def why_not(error: float) -> str:
    """Reason why a weight of this ``Folded.error`` must not be folded; empty if it may be."""
    if error <= MAX_ROW_ERROR:
        return ""
    if math.isinf(error):
        return "FP8 makes a factor of a row of its weight too small for float32, below 2⁻¹²⁶"
    return f"FP8 changes a row of its weight by {error:.1%}, must be at most {MAX_ROW_ERROR:.0%}"


def folds_no_longer(reason: str) -> UnsupportedCheckpoint:
    """Error for a weight that is loaded again and, unlike the first, must not be folded.

    ``reason``: name of the weight, and the result of ``why_not``.
    """
    return UnsupportedCheckpoint(
        f"{reason} for activations in FP8, as at start; start the server with these weights, or "
        "with nvfp4_tc.activation '16-bit'"
    )
