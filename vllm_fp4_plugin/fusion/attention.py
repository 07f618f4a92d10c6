"""Fusions into attention, resolved once the modules around an attention layer are built.

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
NOT_FP8 = "quantises its input itself: attention writes no FP8"


def resolve_fusions(
    owners: Sequence[Module], layer: Any, plan: LinearPlan, report: Report, options: Options
) -> None:
    """Resolve the fusions of our attention layers in the module that holds a linear layer.

    Args:
        owners: fully constructed modules around the layer, the innermost first.
        layer: the linear layer.
        plan: plan of the linear layer.
        report: gets a note of each fusion, or the reason against the fusion.
        options: options of the user.
    """
    if not owners:
        return
    for name, module in list(owners[0]._modules.items()):
        if not isinstance(module, Attention):
            continue
        is_fed = plan.quantizer is not None and attention_quantize.feeds(owners[0], name, layer)
        if is_fed and plan.is_fp8:
            report.amend(layer.prefix, NOT_FP8)
        # Hopper's attention stores keys itself, and no attention writes E4M3.
        if type(module.impl) is PagedAttentionImpl:
            notes = [_resolve_rotation(owners, name, module, options)]
            if is_fed and not plan.is_fp8:
                notes.append(_resolve_result(owners[0], name, layer, plan, options))
            for each in filter(None, notes):
                module.impl.note = "; ".join(filter(None, (module.impl.note, each)))
                report.amend(module.layer_name, each)


def _resolve_rotation(owners: Sequence[Module], name: str, attention: Any, options: Options) -> str:
    """Fuse the preceding rotary embedding, if there is one, into attention.

    Returns:
        Note for the report, with the reason if the embedding stays unfused; empty if there is no
        embedding, or if its fusion is already resolved.
    """
    owner: Any = owners[0]
    rotary_name, rotary = match_rotary.rotary_before(owner, name)
    if rotary is None or attention.impl.rotation_resolved:
        return ""
    attention.impl.rotation_resolved = True
    why_not = "" if options.fuse_attention else OFF
    why_not = why_not or match_rotary.unsupported_reason(owners, name, rotary_name)
    if why_not:
        return f"{rotary_name} apart: {why_not}"
    note = match_rotary.bind(owner, name, rotary_name)
    kernel = match_rotary.kernel_of(attention)
    assert kernel is not None
    hash_kernels(get_current_vllm_config(), (f"{name}: {note}", kernel.target), 1, options)
    return note


def _resolve_result(owner: Any, name: str, layer: Any, plan: LinearPlan, options: Options) -> str:
    """Let attention quantise its result for the linear layer that consumes it.

    Returns:
        Note for the report, with the reason if attention's result stays in 16 bits.
    """
    config, attention = get_current_vllm_config(), owner._modules[name]
    why_not = "" if options.fuse_attention else OFF
    if config.lora_config is not None:
        why_not = why_not or "LoRA is enabled"
    why_not = why_not or attention_quantize.unsupported_reason(owner, name, attention, layer)
    if why_not:
        return f"result in 16 bits: {why_not}"
    kernel = attention_quantize.hand_over(attention, layer)
    note = f"result quantised for {layer.prefix.rpartition('.')[2]}"
    hash_kernels(config, (f"{name}: {note}", kernel.target), plan.terms, options)
    return note
