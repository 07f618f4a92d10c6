"""Settlement of what attention does beside attending, once the model around it is built.

Attention quantises its result for the layer that it feeds, and rotates queries and keys where it
stores them. Any linear layer of ours that stands beside attention settles it.
"""

from collections.abc import Sequence
from typing import Any

from torch.nn import Module
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention

from vllm_fp4_plugin.attention.impl import PagedAttentionImpl
from vllm_fp4_plugin.fusion import attention_quantize, match_rotary
from vllm_fp4_plugin.options import Options
from vllm_fp4_plugin.plan import LinearPlan, hash_kernels
from vllm_fp4_plugin.report import Report

OFF = "switched off (fuse_attention)"


def settle(
    owners: Sequence[Module], layer: Any, plan: LinearPlan, report: Report, options: Options
) -> None:
    """Settle attention layers of ours in the module that holds a linear layer.

    Args:
        owners: complete modules that were being built when the layer was, the nearest first.
        layer: the linear layer.
        plan: its plan.
        report: told what attention does, or why it does not.
        options: the user's.
    """
    if not owners:
        return
    for name, module in list(owners[0]._modules.items()):
        # Hopper's stores keys itself, and its products take 16 bits.
        if isinstance(module, Attention) and type(module.impl) is PagedAttentionImpl:
            said = [_settle_rotation(owners, name, module, options)]
            if plan.quantizer is not None and attention_quantize.feeds(owners[0], name, layer):
                said.append(_settle_result(owners[0], name, layer, plan, options))
            for each in filter(None, said):
                module.impl.said = "; ".join(filter(None, (module.impl.said, each)))
                report.amend(module.layer_name, each)


def _settle_rotation(owners: Sequence[Module], name: str, attention: Any, options: Options) -> str:
    """Bind attention to the rotary embedding before it, if there is one; says so, or why not."""
    owner: Any = owners[0]
    rotary_name, rotary = match_rotary.rotary_before(owner, name)
    if rotary is None or attention.impl.rotation_settled:
        return ""
    attention.impl.rotation_settled = True
    against = "" if options.fuse_attention else OFF
    against = against or match_rotary.obstacle(owners, name, rotary_name)
    if against:
        return f"{rotary_name} apart: {against}"
    said = match_rotary.bind(owner, name, rotary_name).said
    kernel = match_rotary.kernel_of(attention)
    assert kernel is not None
    hash_kernels(get_current_vllm_config(), (f"{name}: {said}", kernel.target), 1, options)
    return said


def _settle_result(owner: Any, name: str, layer: Any, plan: LinearPlan, options: Options) -> str:
    """Bind attention to the linear layer that it feeds; says so, or why not."""
    config, attention = get_current_vllm_config(), owner._modules[name]
    against = "" if options.fuse_attention else OFF
    if config.lora_config is not None:
        against = against or "LoRA is enabled"
    against = against or attention_quantize.obstacle(owner, name, attention, layer)
    if against:
        return f"result in 16 bits: {against}"
    kernel = attention_quantize.hand_over(attention, layer)
    said = f"result quantised for {layer.prefix.rpartition('.')[2]}"
    hash_kernels(config, (f"{name}: {said}", kernel.target), plan.terms, options)
    return said
