"""Custom ops of a layer's experts: one dispatch from 16-bit tokens to 16-bit outputs.

The ops call the kernels that the layer's plan names, and check nothing. Dynamo, which traces
through vLLM's layer on CPU, sees one call: the experts that a batch reaches are known on the device
alone, and the token tiles depend on the number of tokens, which must not be specialised on.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_fake

from nvfp4_kernels.activation import Activation
from nvfp4_kernels.formats.output import Static
from nvfp4_kernels.gemm.call import GroupedGemmCall
from nvfp4_kernels.gemm.grouped.tile_tokens import ExpertSizes, choose_tile_tokens
from nvfp4_kernels.moe.routing import Routing
from nvfp4_kernels.moe.topk.op import router_of
from vllm_fp4_plugin.ops.define import define, function, readable

_LIBRARY = Library("nvfp4_tc", "FRAGMENT")


def _experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    w13: Tensor,
    w13_scale: Tensor,
    w13_alpha: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_alpha: Tensor,
    w13_input: Tensor | None,
    w2_input: Tensor | None,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    sizes: Sequence[int],
    kernels: Sequence[str],
    quantizes: bool,
    terms: int,
    activation: str,
    limit: float | None,
    alpha: float,
    beta: float,
    weight_on_input: bool,
) -> Tensor:
    """Sum, for each token, the results of this rank's experts, by their routing weights.

    Args:
        x: bfloat16 or float16 ``(M, H)``.
        topk_weights: float32 ``(M, k)``; weights of slots without an expert on this rank are
            unused.
        topk_ids: int32 ``(M, k)``; an id without an expert, such as -1 for padding, adds nothing.
        expert_map: int32 ``(E,)``, weight row of each id, -1 on other ranks; None: ids are rows.
        w13: uint8 ``(L, 2, I, H/2)``, gate before up, or ``(L, I, H/2)`` without a gate; or their
            data in fragment layout.
        w13_scale: float8_e4m3fn, blocked layout of each matrix; or uint8, fragment layout.
        w13_alpha: float32 ``(L, 2)`` or ``(L,)``; includes ``w13_input`` if given.
        w2: uint8 ``(L, H, I/2)``, or the data in fragment layout.
        w2_scale: as ``w13_scale``.
        w2_alpha: float32 ``(L,)``; includes ``w2_input`` if given.
        w13_input: float32 ``()``, calibrated for all experts; None: a scale per token, or 16-bit
            activations.
        w2_input: float32 ``(L,)``, calibrated for each expert; None as ``w13_input``.
        w13_bias: of x's dtype, ``(L, 2, I)`` or ``(L, I)``; None without biases.
        w2_bias: of x's dtype, ``(L, H)``; None as ``w13_bias``.
        sizes: first four fields of ``ExpertSizes``.
        kernels: targets of ``ExpertsPlan``.
        quantizes: activations are NVFP4.
        terms: NVFP4 values summed for each activation.
        activation: name in ``nvfp4_kernels.activation.Activation``, as the next three arguments.
        limit: bound of gate and up.
        alpha: factor in the sigmoid.
        beta: constant added to up.
        weight_on_input: apply the routing weight before gemm1, not after gemm2.

    Returns:
        ``(M, H)`` of x's dtype.
    """
    of_layer, tile_tokens = _of_batch(x, sizes, w13_alpha, topk_ids.shape[1])
    weights = topk_weights.float().contiguous()
    on_input, on_output = (weights, None) if weight_on_input else (None, weights)
    scale = () if w13_input is None else (w13_input,)
    how: tuple[Any, ...] = (on_input, terms) if quantizes else (on_input,)
    x = readable(x)
    tiles = function(kernels[0])(
        x, topk_ids.int().contiguous(), expert_map, of_layer.held, tile_tokens, *scale, *how
    )
    return _products(
        x.dtype, tiles, on_output, w13, w13_scale, w13_alpha, w2, w2_scale, w2_alpha, w2_input,
        w13_bias, w2_bias, of_layer, kernels, terms, Activation(activation, limit, alpha, beta),
    )  # fmt: skip


def _routed_experts(
    x: Tensor,
    router_logits: Tensor,
    router_bias: Tensor | None,
    padding: Tensor | None,
    expert_map: Tensor | None,
    w13: Tensor,
    w13_scale: Tensor,
    w13_alpha: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_alpha: Tensor,
    w13_input: Tensor | None,
    w2_input: Tensor | None,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    sizes: Sequence[int],
    kernels: Sequence[str],
    quantizes: bool,
    terms: int,
    activation: str,
    limit: float | None,
    alpha: float,
    beta: float,
    top_k: int,
    scoring: str,
    renormalize: bool,
    groups: int,
    top_groups: int,
    scale: float,
) -> Tensor:
    """Choose each token's experts by ``router_logits`` ``(M, E)``; then as ``_experts``.

    ``router_bias`` is float32 ``(E,)``, or None; ``padding``, bool ``(M,)`` or None, marks rows
    without a token. The arguments after ``beta`` make a ``Router``.
    """
    router = router_of(top_k, scoring, renormalize, groups, top_groups, scale)
    of_layer, tile_tokens = _of_batch(x, sizes, w13_alpha, top_k)
    given = () if w13_input is None else (w13_input,)
    how: tuple[Any, ...] = (terms,) if quantizes else ()
    x = readable(x)
    weights, *tiles = function(kernels[0])(
        x, readable(router_logits), router_bias, padding, expert_map,
        of_layer.held, tile_tokens, *given, *how, router,
    )  # fmt: skip
    return _products(
        x.dtype, tiles, weights, w13, w13_scale, w13_alpha, w2, w2_scale, w2_alpha, w2_input,
        w13_bias, w2_bias, of_layer, kernels, terms, Activation(activation, limit, alpha, beta),
    )  # fmt: skip


def _of_batch(
    x: Tensor, sizes: Sequence[int], w13_alpha: Tensor, top_k: int
) -> tuple[ExpertSizes, int]:
    """Sizes of the layer, and rows of a token tile (padded expert block) of this batch."""
    h, i, held, total = sizes
    of_layer = ExpertSizes(h, i, held, total, gated=w13_alpha.ndim == 2)
    return of_layer, choose_tile_tokens(x.device, len(x), top_k, of_layer)


def _products(
    dtype: torch.dtype,
    tiles: Sequence[Tensor],
    weights: Tensor | None,
    w13: Tensor,
    w13_scale: Tensor,
    w13_alpha: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w2_alpha: Tensor,
    w2_input: Tensor | None,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    sizes: ExpertSizes,
    kernels: Sequence[str],
    terms: int,
    activation: Activation,
) -> Tensor:
    """Run gemm1, requantize and gemm2 on token tiles; sum per token, by ``weights`` if given."""
    _, first, between, second, combine = kernels
    groups, slots, rows, a, *scales = tiles
    a_scales, row_scale = (*scales, None, None)[:2]
    output = None if w2_input is None else Static(w2_input, terms)
    hidden, hidden_scales = function(first)(
        GroupedGemmCall(
            a, a_scales, groups, w13, w13_scale, w13_alpha, row_scale, w13_bias, sizes.i,
            activation, dtype, terms, output, global_experts=sizes.total,
        )
    )  # fmt: skip
    row_scale = None
    if between:
        routing = Routing(groups, slots, rows)
        hidden, hidden_scales, row_scale = function(between)(hidden, routing, None, terms)
    # gemm1 waited for the routing before it let dependents start, so gemm2, launched next, may load
    # weights while gemm1 ends.
    out, _ = function(second)(
        GroupedGemmCall(
            hidden, hidden_scales, groups, w2, w2_scale, w2_alpha, row_scale, w2_bias, sizes.h,
            None, dtype, terms, None, routed_before=not between, global_experts=sizes.total,
        )
    )  # fmt: skip
    return function(combine)(out, rows, weights, dtype)


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
