"""Mixture of NVFP4 experts in torch: pure functions, which the method on CPU is made of.

E experts on this rank, S projections before the activation (gate and up, or up alone), H wide
inputs, I wide activations, M tokens, each with k slots.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from nvfp4_kernels.nvfp4 import block_scaled_product, quantize_activation, to_blocked

GATED = ("silu", "gelu", "gelu_tanh", "swigluoai_uninterleave")
UNGATED = ("silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul")
ACTIVATIONS = (*GATED, *UNGATED)


class Experts(NamedTuple):
    """Weights of the experts of one rank; all but ``w13_input`` have an expert a row.

    Attributes:
        w13: uint8 ``(E, S, I, H/2)``, gate before up.
        w13_scale: float8_e4m3fn ``(E, S, …)``, blocked.
        w13_global: float32 ``(E, S)``, factors.
        w2: uint8 ``(E, H, I/2)``.
        w2_scale: float8_e4m3fn ``(E, …)``, blocked.
        w2_global: float32 ``(E,)``, factors.
        w13_input: float32 ``()``, the factor that all experts' inputs are quantised with; None:
            they stay in 16 bits.
        w2_input: float32 ``(E,)``, likewise of what the activation gives.
    """

    w13: Tensor
    w13_scale: Tensor
    w13_global: Tensor
    w2: Tensor
    w2_scale: Tensor
    w2_global: Tensor
    w13_input: Tensor | None
    w2_input: Tensor | None


class Activation(NamedTuple):
    """Activation between the products.

    Attributes:
        name: one of ``ACTIVATIONS``, as vLLM names them.
        limit: bound of gate from above and of up on both sides; None: there is none.
        alpha: factor in the sigmoid of ``swigluoai_uninterleave``.
        beta: what it adds to up.
    """

    name: str
    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0

    def __call__(self, projections: Tensor) -> Tensor:
        """Apply it to float32 ``(S, M, I)``: float32 ``(M, I)``."""
        if self.name == "relu2_no_mul":
            return relu(projections[0]).square()
        if self.name in UNGATED:
            return _unary(self.name.removesuffix("_no_mul"), projections[0])
        gate, up = projections
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.name == "swigluoai_uninterleave":
            return gate * torch.sigmoid(self.alpha * gate) * (up + self.beta)
        return _unary(self.name, gate) * up


def _unary(name: str, x: Tensor) -> Tensor:
    if name == "silu":
        return silu(x)
    return gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")


def mixture(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    experts: Experts,
    activation: Activation,
    *,
    weight_on_input: bool,
) -> Tensor:
    """Sum, for each token, what this rank's experts say in its slots, by their weights.

    Sums in float32 and in the order of the slots: a token's result depends on no other token.

    Args:
        x: bfloat16 or float16 ``(M, H)``.
        topk_weights: float32 ``(M, k)``; those of slots without an expert here are not looked at.
        topk_ids: int32 ``(M, k)``; an id that is no expert's, such as -1 for padding, adds nothing.
        expert_map: int32, rows of ``experts`` by id, -1 for other ranks'; None: ids are rows.
        experts: the weights.
        activation: what is between the products.
        weight_on_input: a token is multiplied by its weight before the first product, not after the
            second.

    Returns:
        ``(M, H)`` of x's dtype.
    """
    rows = local_rows(topk_ids, expert_map, len(experts.w13))
    slots = x.new_zeros((*topk_ids.shape, x.shape[1]), dtype=torch.float32)
    for row in rows.unique().tolist():
        if row < 0:
            continue
        token, slot = (rows == row).nonzero(as_tuple=True)
        inputs, factor = x[token].float(), topk_weights[token, slot].float().unsqueeze(1)
        if weight_on_input:
            inputs, factor = inputs * factor, torch.ones_like(factor)
        slots[token, slot] = expert(inputs.to(x.dtype), row, experts, activation) * factor
    out = slots.new_zeros(x.shape)
    for slot_values in slots.unbind(1):
        out += slot_values
    return out.to(x.dtype)


def local_rows(topk_ids: Tensor, expert_map: Tensor | None, count: int) -> Tensor:
    """Rows of the experts of this rank that the slots go to: int64 ``(M, k)``, -1 for none."""
    total = count if expert_map is None else len(expert_map)
    ids = topk_ids.long()
    known = (ids >= 0) & (ids < total)
    ids = torch.where(known, ids, 0)
    rows = ids if expert_map is None else expert_map.long()[ids]
    return torch.where(known, rows, -1)


def expert(x: Tensor, row: int, experts: Experts, activation: Activation) -> Tensor:
    """Compute what one expert says of 16-bit ``(M, H)``: float32 ``(M, H)``."""
    data, scales, factor = _operand(x, experts.w13_input)
    projections = torch.stack(
        [
            block_scaled_product(data, scales, experts.w13[row, s], experts.w13_scale[row, s])
            * (experts.w13_global[row, s] * factor)
            for s in range(experts.w13.shape[1])
        ]
    )
    hidden = activation(projections)
    if experts.w2_input is None:
        hidden = hidden.to(x.dtype)  # as it comes from a kernel of 16-bit activations
    data, scales, factor = _operand(hidden, experts.w2_input, row)
    product = block_scaled_product(data, scales, experts.w2[row], experts.w2_scale[row])
    return product * (experts.w2_global[row] * factor)


def _operand(
    x: Tensor, input_scale: Tensor | None, row: int | None = None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Data and block scales of a product's input, and the factor that its values lack."""
    if input_scale is None:
        return x, None, torch.ones((), dtype=torch.float32, device=x.device)
    scale = input_scale if row is None else input_scale[row]
    data, scales = quantize_activation(x, scale)
    return data, to_blocked(scales), scale
