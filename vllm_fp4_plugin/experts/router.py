"""Router of a layer of experts: whether our kernels can choose experts exactly as vLLM would.

The arguments of vLLM's layer decide. Features that no argument states, such as zero experts, show
in the routing method that vLLM names.
"""

from typing import Any, get_args

import torch
from torch import Tensor
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType

from nvfp4_kernels.devices import dtype_name
from nvfp4_kernels.moe.router import MAX_EXPERTS, MAX_GROUPS, MAX_TOP_K, Router, Scoring
from nvfp4_kernels.precompile.experts_layer import Choice

_KNOWN = (
    RoutingMethodType.Default,
    RoutingMethodType.Renormalize,
    RoutingMethodType.RenormalizeNaive,
    RoutingMethodType.DeepSeekV3,
    RoutingMethodType.SigmoidRenorm,
    RoutingMethodType.MiniMax2,
    RoutingMethodType.Sigmoid,
)


def choice_of(layer: Any) -> tuple[Choice | None, str]:
    """Our top-k choice for a layer and no reason; or None and the reason why vLLM must choose."""
    why_not = _unsupported_reason(layer)
    if why_not is not None:
        return None, f"experts chosen by vLLM: {why_not}"
    config, bias = layer.moe_config, layer.e_score_correction_bias
    # vLLM's router without groups and without a bias applies no scaling factor.
    scaled = layer.use_grouped_topk or bias is not None
    router = Router(
        config.experts_per_token,
        layer.scoring_func,
        layer.renormalize,
        *_groups(layer),
        layer.routed_scaling_factor if scaled else 1.0,
    )
    logits = config.router_logits_dtype or config.in_dtype
    return Choice(router, dtype_name(logits), bias is not None), ""


def _unsupported_reason(layer: Any) -> str | None:
    config, bias = layer.moe_config, layer.e_score_correction_bias
    if layer.custom_routing_function is not None:
        return "the model has a function for it"
    if getattr(config, "require_decomposed_backend", False):  # since vLLM 0.33
        return "it changes them after its router"
    if config.routing_method not in _KNOWN or layer.scoring_func not in get_args(Scoring):
        return f"routing method {RoutingMethodType(config.routing_method).name}"
    if layer.expert_map_manager.num_fused_shared_experts:
        return "shared ones are among them"
    if layer.apply_router_weight_on_input:
        return "weights come before the first product"
    if bias is not None and bias.dtype != torch.float32:
        return f"their bias is {dtype_name(bias.dtype)}"
    if get_current_vllm_config().aux_output_config.enable_return_routed_experts:
        return "requests ask which they were"
    experts, top_k, (groups, top_groups) = (
        config.num_experts,
        config.experts_per_token,
        _groups(layer),
    )
    if groups > 1 and (groups > min(MAX_GROUPS, experts // 2) or experts % groups):
        return f"{groups} groups of {experts}"
    if not top_k <= min(MAX_TOP_K, experts // groups * top_groups) or experts > MAX_EXPERTS:
        return f"{top_k} of {experts}"
    return None


def _groups(layer: Any) -> tuple[int, int]:
    """Number of expert groups, and number of groups from which a token selects experts."""
    if not layer.use_grouped_topk:
        return 1, 1
    return layer.num_expert_group or 1, layer.topk_group or 1


def padding(logits: Tensor) -> Tensor | None:
    """Mask of a batch's padding rows, bool ``(M,)``; None: not known, or not to be skipped.

    If tokens are gathered from several ranks, vLLM marks padding only among this rank's tokens.
    """
    if logits.device.type == "cpu" or not envs.VLLM_MOE_SKIP_PADDING:
        return None
    if not is_forward_context_available():
        return None
    context = get_forward_context()
    if context.is_padding is None or context.dp_metadata is not None:
        return None
    return context.is_padding[: len(logits)] if len(context.is_padding) >= len(logits) else None
