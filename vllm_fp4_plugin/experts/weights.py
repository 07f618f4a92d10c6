"""Conversion of a rank's experts to the kernels' layout, by pure functions, after each load."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4_kernels.formats.fragments import to_fragments
from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE, to_blocked
from nvfp4_kernels.precompile.experts_layer import padded_width
from vllm_fp4_plugin.experts.op import KernelExperts
from vllm_fp4_plugin.experts.plan import ExpertsPlan
from vllm_fp4_plugin.kernel_weight import weight_bytes
from vllm_fp4_plugin.linear.folded_weight import fold, fp8_scale


class StoredExperts(NamedTuple):
    """Experts of one rank in linear layout: L experts, S projections before the activation.

    Attributes:
        w13: uint8 ``(L, S, I, H/2)``, gate before up.
        w13_scale: float8_e4m3fn ``(L, S, I, H/16)``, linear layout.
        w13_global: float32 ``(L, S)``, global scales as factors.
        w2: uint8 ``(L, H, I/2)``.
        w2_scale: float8_e4m3fn ``(L, H, I/16)``, linear layout.
        w2_global: float32 ``(L,)``, global scales as factors.
        w13_input: float32 ``()``, input scale of gemm1, for all experts; None if not calibrated.
        w2_input: float32 ``(L,)``, input scales of gemm2; None if not calibrated.
        w13_bias: 16-bit floats ``(L, S, I)``, or None.
        w2_bias: 16-bit floats ``(L, H)``, or None.
    """

    w13: Tensor
    w13_scale: Tensor
    w13_global: Tensor
    w2: Tensor
    w2_scale: Tensor
    w2_global: Tensor
    w13_input: Tensor | None
    w2_input: Tensor | None
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None


class FoldedExperts(NamedTuple):
    """Experts in the folded layout, and how well they folded.

    Attributes:
        experts: weights, factors of rows, scales and biases.
        errors: float32 ``(L, S + 1)``, ``FoldedMatrices.errors`` of each expert's projections, down
            last.
    """

    experts: KernelExperts
    errors: Tensor


def kernel_experts(stored: StoredExperts, plan: ExpertsPlan) -> KernelExperts:
    """Convert experts to the plan's layout, pad I, and fold global and input scales into alphas.

    ``plan``: of 16-bit or NVFP4 activations; ``folded_experts`` is for FP8.
    """
    w13, w13_scale, w13_global, w2, w2_scale, w2_global, w13_input, w2_input, *biases = stored
    w13_bias, w2_bias = biases
    if plan.inputs != "static":
        w13_input = w2_input = None
    w13_alpha = w13_global if w13_input is None else w13_global * w13_input
    w2_alpha = w2_global if w2_input is None else w2_global * w2_input
    more = padded_width(w13.shape[-2], plan.first.arch) - w13.shape[-2]
    if more:
        w13, w13_scale, w2, w2_scale = _padded(more, w13, w13_scale, w2, w2_scale)
        w13_bias = None if w13_bias is None else pad(w13_bias, (0, more))
    if not plan.gated:
        w13_bias = None if w13_bias is None else w13_bias[:, 0].contiguous()
        w13, w13_scale, w13_alpha = w13[:, 0], w13_scale[:, 0], w13_alpha[:, 0]
    w13, w13_scale = _in_layout(w13, w13_scale, plan)
    w2, w2_scale = _in_layout(w2, w2_scale, plan)
    alphas = w13_alpha.contiguous().clone(), w2_alpha.clone()
    return KernelExperts(
        w13, w13_scale, alphas[0], w2, w2_scale, alphas[1], w13_input, w2_input, w13_bias, w2_bias
    )


def folded_experts(stored: StoredExperts, plan: ExpertsPlan) -> FoldedExperts:
    """Fold experts for FP8 activations, and all scales but those of tokens into factors of rows.

    Raises:
        InvalidArgument: a block scale is NaN.
    """
    w13_alpha, w2_alpha = stored.w13_global, stored.w2_global
    w13_input = w2_input = None
    if plan.inputs == "static":
        assert stored.w13_input is not None
        assert stored.w2_input is not None
        w13_input, w2_input = fp8_scale(stored.w13_input), fp8_scale(stored.w2_input)
        w13_alpha, w2_alpha = w13_alpha * w13_input, w2_alpha * w2_input
    w13, w13_scale, w13_bias = stored.w13, stored.w13_scale, stored.w13_bias
    if not plan.gated:
        w13_bias = None if w13_bias is None else w13_bias[:, 0].contiguous()
        w13, w13_scale, w13_alpha = w13[:, 0], w13_scale[:, 0], w13_alpha[:, 0]
    first = fold(w13, w13_scale, w13_alpha.unsqueeze(-1))
    second = fold(stored.w2, stored.w2_scale, w2_alpha.unsqueeze(-1))
    errors = torch.cat([first.errors.view(len(w13), -1), second.errors.view(-1, 1)], 1)
    held = KernelExperts(*first[:3], *second[:3], w13_input, w2_input, w13_bias, stored.w2_bias)
    return FoldedExperts(held, errors)


def _in_layout(data: Tensor, scales: Tensor, plan: ExpertsPlan) -> tuple[Tensor, Tensor]:
    """Data and scales of a weight in the kernels' layout."""
    if plan.weight_layout == "blocked":
        return data.contiguous(), to_blocked(scales)
    packed = to_fragments(data, scales)
    return packed.data, packed.scales


def _padded(
    more: int, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor
) -> tuple[Tensor, ...]:
    """Pad I by ``more`` zeros: the results do not change, as every activation maps zero to zero."""
    return (
        pad(w13, (0, 0, 0, more)),
        _pad_scales(w13_scale, (0, 0, 0, more)),
        pad(w2, (0, more // 2)),
        _pad_scales(w2_scale, (0, more // BLOCK_SIZE)),
    )


def _pad_scales(scales: Tensor, by: tuple[int, ...]) -> Tensor:
    return pad(scales.view(torch.uint8), by).view(scales.dtype)


def experts_bytes(count: int, projections: int, h: int, i: int, plan: ExpertsPlan) -> int:
    """Bytes of the weights of ``count`` experts, scales included.

    Args:
        count: number of experts.
        projections: number of projections before the activation, 2 with a gate and 1 without.
        h: hidden size.
        i: intermediate size on this rank.
        plan: plan of the layer.
    """
    layout, i = plan.weight_layout, padded_width(i, plan.first.arch)
    each = projections * weight_bytes(i, h, layout) + weight_bytes(h, i, layout)
    factors = projections * i + h if plan.is_fp8 else projections + 1
    inputs = 1 + count if plan.inputs == "static" else 0
    return count * (each + 4 * factors) + 4 * inputs
