"""Custom ops of a layer's experts: one call from 16-bit tokens to 16-bit outputs.

The ops call the kernels that the layer's plan names, and check nothing. Dynamo, which traces
through vLLM's layer on CPU, must see a single call: only the device knows the experts that a batch
reaches, and the token tiles depend on the number of tokens, for which Dynamo must not specialise.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library, register_fake

from nvfp4_kernels.activation import Activation
from nvfp4_kernels.dispatch import load_target
from nvfp4_kernels.formats.output import Output, PerToken, PerTokenFp8, Static, StaticFp8
from nvfp4_kernels.gemm.arguments import weight_layout
from nvfp4_kernels.gemm.call import GroupedGemmCall
from nvfp4_kernels.gemm.grouped.tile_tokens import ExpertSizes, choose_tile_tokens
from nvfp4_kernels.moe.dispatch.call import DispatchCall, Dispatched, Ids, Logits
from nvfp4_kernels.moe.topk.op import router_of
from vllm_fp4_plugin.ops.define import define, readable

_LIBRARY = Library("nvfp4_tc", "FRAGMENT")


class KernelExperts(NamedTuple):
    """Experts of one rank, L in number, in the form that both ops take.

    Attributes:
        w13: uint8 ``(L, 2, I, H/2)``, gate before up, or ``(L, I, H/2)`` without a gate; or the
            same weights in fragment or folded layout.
        w13_scale: block scales: float8_e4m3fn, each matrix in blocked layout; or uint8 in fragment
            layout; or int32 in folded layout: activations are E4M3.
        w13_alpha: factor of gemm1's results, float32 ``(L, 2)`` or ``(L,)``: the global scale,
            times ``w13_input`` unless None; of folded weights ``(L, 2, I)`` or ``(L, I)``, a factor
            of each row.
        w2: uint8 ``(L, H, I/2)``, or the same weights in fragment or folded layout.
        w2_scale: as ``w13_scale``.
        w2_alpha: factor of gemm2's results, float32 ``(L,)``, of folded weights ``(L, H)``, as
            ``w13_alpha``.
        w13_input: calibrated input scale of gemm1, float32 ``()``, for all experts; None: a scale
            per token, or 16-bit activations.
        w2_input: calibrated input scale of gemm2, float32 ``(L,)``; None as ``w13_input``.
        w13_bias: of x's dtype, ``(L, 2, I)`` or ``(L, I)``; None without biases.
        w2_bias: of x's dtype, ``(L, H)``; None as ``w13_bias``.
    """

    w13: Tensor
    w13_scale: Tensor
    w13_alpha: Tensor
    w2: Tensor
    w2_scale: Tensor
    w2_alpha: Tensor
    w13_input: Tensor | None
    w2_input: Tensor | None
    w13_bias: Tensor | None
    w2_bias: Tensor | None


class ExpertsCall(NamedTuple):
    """Arguments that a layer passes to both ops, in the order of the ops' schema.

    Attributes:
        expert_map: int32 ``(E,)``, weight row of each expert id, -1 for experts of other ranks;
            None: an id is the row itself.
        experts: weights, scales and biases.
        sizes: first four fields of ``ExpertSizes``.
        kernels: ``ExpertsPlan.targets``.
        quantizes: whether activations are quantised, to E4M3 if weights are folded, else NVFP4.
        terms: number of NVFP4 values whose sum represents each element of an activation.
        activation: name of an ``nvfp4_kernels.activation.Activation``; the next three fields are
            its parameters.
        limit: bound of gate and up; None: no bound.
        alpha: factor in the sigmoid.
        beta: constant added to up.
    """

    expert_map: Tensor | None
    experts: KernelExperts
    sizes: Sequence[int]
    kernels: Sequence[str]
    quantizes: bool
    terms: int
    activation: str
    limit: float | None
    alpha: float
    beta: float

    @classmethod
    def of(cls, expert_map: Tensor | None, *flat: Any) -> "ExpertsCall":
        """Bundle an op's flat arguments, ``flat`` being the fields after ``expert_map``."""
        return cls(expert_map, KernelExperts(*flat[:_TENSORS]), *flat[_TENSORS:])

    @property
    def of_layer(self) -> ExpertSizes:
        """Sizes of the layer."""
        h, i, held, total = self.sizes
        of_rows = int(self.is_fp8)  # alpha's dimension over an expert's rows
        return ExpertSizes(h, i, held, total, gated=self.experts.w13_alpha.ndim - of_rows == 2)

    @property
    def is_fp8(self) -> bool:
        """Whether activations are E4M3, told by the layout of the weights."""
        return weight_layout(self.experts.w13_scale) == "folded"

    @property
    def token_output(self) -> Output:
        """Format of gemm1's input; None: 16 bits."""
        if not self.quantizes:
            return None
        scale = self.experts.w13_input
        return self.per_token_output if scale is None else self._static(scale)

    @property
    def hidden_output(self) -> Static | StaticFp8 | None:
        """Format of gemm1's result; None: 16 bits, perhaps quantised by a further launch."""
        scale = self.experts.w2_input
        return None if scale is None else self._static(scale)

    @property
    def per_token_output(self) -> PerToken | PerTokenFp8:
        """Format of activations with a scale per token."""
        return PerTokenFp8() if self.is_fp8 else PerToken(self.terms)

    def _static(self, scale: Tensor) -> Static | StaticFp8:
        return StaticFp8(scale) if self.is_fp8 else Static(scale, self.terms)


_TENSORS = len(KernelExperts._fields)
_FIELDS = len(ExpertsCall._fields) - 1 + _TENSORS  # of a call, flat


def _experts(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *flat: Any) -> Tensor:
    """Sum each token's results of this rank's experts, weighted by the routing weights.

    Args:
        x: bfloat16 or float16 ``(M, H)``.
        topk_weights: float32 ``(M, k)``; weights of slots without an expert on this rank are
            unused.
        topk_ids: int32 ``(M, k)``; an id without an expert, such as -1 for padding, adds nothing.
        flat: fields of an ``ExpertsCall``, then a bool: whether the routing weight is applied
            before gemm1, instead of after gemm2.

    Returns:
        ``(M, H)`` of x's dtype.
    """
    *fields, weight_on_input = flat
    call = ExpertsCall.of(*fields)
    sizes = call.of_layer
    tile_tokens = choose_tile_tokens(x.device, len(x), topk_ids.shape[1], sizes)
    weights = topk_weights.float().contiguous()
    on_input, on_output = (weights, None) if weight_on_input else (None, weights)
    source = Ids(topk_ids.int().contiguous(), sizes.held, tile_tokens, call.expert_map)
    dispatch = load_target(call.kernels[0])
    tiles = dispatch(DispatchCall(readable(x), source, call.token_output, on_input))
    return _products(call, sizes, tiles, on_output, x.dtype)


def _routed_experts(
    x: Tensor, router_logits: Tensor, bias: Tensor | None, padding: Tensor | None, *flat: Any
) -> Tensor:
    """Choose each token's experts from ``router_logits`` ``(M, E)``; then do as ``_experts`` does.

    ``bias`` of the scores is float32 ``(E,)``, or None; ``padding``, bool ``(M,)`` or None, marks
    rows without a token. ``flat`` holds the fields of an ``ExpertsCall``, then of a ``Router``.
    """
    call, router = ExpertsCall.of(*flat[:_FIELDS]), router_of(*flat[_FIELDS:])
    sizes = call.of_layer
    tile_tokens = choose_tile_tokens(x.device, len(x), router.top_k, sizes)
    x = readable(x)
    logits = readable(router_logits)
    source = Logits(logits, router, sizes.held, tile_tokens, call.expert_map, bias, padding)
    tiles = load_target(call.kernels[0])(DispatchCall(x, source, call.token_output))
    return _products(call, sizes, tiles, tiles.topk_weights, x.dtype)


def _products(
    call: ExpertsCall,
    sizes: ExpertSizes,
    tiles: Dispatched,
    weights: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Run gemm1, requantize (if the plan has it) and gemm2 on token tiles; sum each token's slots.

    ``weights``, float32 ``(M, k)``, weight the slots in the sum; None: the sum is not weighted.
    """
    _, first, between, second, combine = call.kernels
    a, a_scales, row_scale, routing, _ = tiles
    groups, terms, weight = routing.groups, call.terms, call.experts
    activation = Activation(call.activation, call.limit, call.alpha, call.beta)
    hidden, hidden_scales = load_target(first)(
        GroupedGemmCall(
            a, a_scales, groups, weight.w13, weight.w13_scale, weight.w13_alpha, row_scale,
            weight.w13_bias, sizes.i, activation, dtype, terms,
            call.hidden_output, global_experts=sizes.total,
        )
    )  # fmt: skip
    row_scale = None
    if between:
        requantized = load_target(between)(DispatchCall(hidden, routing, call.per_token_output))
        hidden, hidden_scales, row_scale, _, _ = requantized
    # gemm1 waited for the routing before it let dependents start, so gemm2, launched next, may load
    # weights while gemm1 ends.
    out, _ = load_target(second)(
        GroupedGemmCall(
            hidden, hidden_scales, groups, weight.w2, weight.w2_scale, weight.w2_alpha, row_scale,
            weight.w2_bias, sizes.h, None, dtype, terms, None, routed_before=not between,
            global_experts=sizes.total,
        )
    )  # fmt: skip
    return load_target(combine)(out, routing.rows, weights, dtype)


# Schema of the layer's arguments to both ops.
_OF_LAYER = (
    "Tensor? expert_map, Tensor w13, Tensor w13_scale, Tensor w13_alpha, Tensor w2, "
    "Tensor w2_scale, Tensor w2_alpha, Tensor? w13_input, Tensor? w2_input, Tensor? w13_bias, "
    "Tensor? w2_bias, SymInt[] sizes, str[] kernels, bool quantizes, int terms, str activation, "
    "float? limit, float alpha, float beta"
)
experts = define(
    _LIBRARY,
    "experts",
    f"Tensor x, Tensor topk_weights, Tensor topk_ids, {_OF_LAYER}, bool weight_on_input",
    _experts,
)
routed_experts = define(
    _LIBRARY,
    "routed_experts",
    f"Tensor x, Tensor router_logits, Tensor? router_bias, Tensor? padding, {_OF_LAYER}, "
    "int top_k, str scoring, bool renormalize, int groups, int top_groups, float scale",
    _routed_experts,
)


@register_fake("nvfp4_tc::experts", lib=_LIBRARY)
@register_fake("nvfp4_tc::routed_experts", lib=_LIBRARY)
def _(x: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(x)
