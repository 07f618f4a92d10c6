"""Fusions into attention, resolved once the model around it is built.

Attention quantises its result for the layer that consumes it, and rotates queries and keys when
storing keys. Any linear layer of ours in the same module triggers the resolution.
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
    """Resolve the fusions of our attention layers in the module that holds a linear layer.

    Args:
        owners: fully constructed modules around the layer, the innermost first.
        layer: the linear layer.
        plan: plan of the layer.
        report: gets a note of each fusion, or the reason against it.
        options: options of the user.
    """
    if not owners:
        return
    for name, module in list(owners[0]._modules.items()):
        # Hopper's attention stores keys itself, and its GEMMs take 16-bit inputs.
        if isinstance(module, Attention) and type(module.impl) is PagedAttentionImpl:
            said = [_settle_rotation(owners, name, module, options)]
            if plan.quantizer is not None and attention_quantize.feeds(owners[0], name, layer):
                said.append(_settle_result(owners[0], name, layer, plan, options))
            for each in filter(None, said):
                module.impl.said = "; ".join(filter(None, (module.impl.said, each)))
                report.amend(module.layer_name, each)


def _settle_rotation(owners: Sequence[Module], name: str, attention: Any, options: Options) -> str:
    """Fuse the preceding rotary embedding, if there is one, into attention.

    Returns:
        Note for the report, with the reason if the embedding stays unfused; may be empty.
    """
    owner: Any = owners[0]
    rotary_name, rotary = match_rotary.rotary_before(owner, name)
    if rotary is None or attention.impl.rotation_settled:
        return ""
    attention.impl.rotation_settled = True
    against = "" if options.fuse_attention else OFF
    against = against or match_rotary.obstacle(owners, name, rotary_name)
    if against:
        return f"{rotary_name} apart: {against}"
    said = match_rotary.bind(owner, name, rotary_name)
    kernel = match_rotary.kernel_of(attention)
    assert kernel is not None
    hash_kernels(get_current_vllm_config(), (f"{name}: {said}", kernel.target), 1, options)
    return said


def _settle_result(owner: Any, name: str, layer: Any, plan: LinearPlan, options: Options) -> str:
    """Let attention quantise its result for the linear layer that consumes it.

    Returns:
        Note for the report, with the reason if attention cannot do this.
    """
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
