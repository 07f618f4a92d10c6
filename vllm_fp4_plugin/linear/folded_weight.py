"""Conversion of weights for products of FP8 activations: see ``nvfp4_kernels.formats.folded``."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_kernels.formats.folded import MAX_ROW_ERROR, to_folded
from nvfp4_kernels.formats.fp8_rows import FP8_MAX
from nvfp4_kernels.formats.nvfp4 import GLOBAL_RANGE
from vllm_fp4_plugin.kernel_weight import KernelWeight


class Folded(NamedTuple):
    """Folded weight of a linear layer, and how well it folded.

    Attributes:
        weight: weight in the folded layout, with a factor for each row.
        error: float32 ``()``, largest relative RMS error of a row; infinite if the factor of a row
            is no normal float32.
    """

    weight: KernelWeight
    error: Tensor


def folded_weight(
    data: Tensor,
    scales: Tensor,
    weight_global: Tensor,
    input_global: Tensor | None,
    shard_sizes: Sequence[int],
    *,
    gate_up: bool,
) -> Folded:
    """Fold a weight, and all scales but those of tokens into a factor for each row.

    Args:
        data: uint8 ``(N, K/2)``, two E2M1 codes per byte.
        scales: float8_e4m3fn ``(N, K/16)``, linear layout.
        weight_global: float32 ``(S,)``, global scales of the shards, as factors.
        input_global: float32 ``(S,)``, input scales of the shards for NVFP4, as factors, or None.
            The shards share their input, and so one scale: the largest. The value of E4M3's 1.0 is
            six times as large, so that both formats saturate at one magnitude.
        shard_sizes: rows of the shards, which add up to N.
        gate_up: whether the rows are a gate and an up projection of equal size, to run as one op.

    Raises:
        InvalidArgument: a block scale is NaN.
    """
    input_scale = None
    if input_global is not None:
        input_scale = input_global.max() * (GLOBAL_RANGE / FP8_MAX)
    alpha = weight_global if input_scale is None else weight_global * input_scale
    factors = alpha.repeat_interleave(torch.tensor(list(shard_sizes), device=alpha.device))
    if gate_up:
        data, factors = data.unflatten(0, (2, -1)), factors.unflatten(0, (2, -1))
        scales = scales.view(torch.uint8).unflatten(0, (2, -1)).view(torch.float8_e4m3fn)
    folded = to_folded(data, scales)
    factors = factors * folded.row_scale
    is_normal = factors.min() >= torch.finfo(torch.float32).tiny
    error = torch.where(is_normal, folded.row_error.max(), torch.inf)
    return Folded(KernelWeight(folded.data, folded.scales, factors, input_scale), error)


def why_not(error: float) -> str:
    """Reason why a weight of this ``Folded.error`` must not be folded; empty if it may be."""
    if error <= MAX_ROW_ERROR:
        return ""
    return f"FP8 changes a row of its weight by {error:.1%}, must be at most {MAX_ROW_ERROR:.0%}"
