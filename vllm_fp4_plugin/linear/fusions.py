"""Fusions of a linear layer with the norm before it and the layer after it, made and undone."""

from collections.abc import Sequence
from typing import Any

from torch.nn import Module
from vllm.config import get_current_vllm_config

from nvfp4_kernels.devices import dtype_name
from vllm_fp4_plugin.fusion import all_reduce_norm, norm_quantize
from vllm_fp4_plugin.fusion import gate_up as fused_mlp
from vllm_fp4_plugin.fusion.match_norm import NormMatch, norm_before
from vllm_fp4_plugin.fusion.norm_quantize import Feeding
from vllm_fp4_plugin.plan import LinearPlan, hash_kernels
from vllm_fp4_plugin.report import LayerRecord
from vllm_fp4_plugin.warmup import Norm

ONLY_FP8_WRITES_FP8 = "result in 16 bits: only FP8 products write FP8"


def fuse_norm(method: Any, layer: Any, owners: Sequence[Module]) -> NormMatch | None:
    """Let the norm before a layer quantise for the layer, and report the norm.

    Args:
        method: our method of the layer; its plan quantises the input.
        layer: the layer.
        owners: fully constructed modules around the layer, the innermost first.

    Returns:
        The norm that now quantises; None if there is none, or a reason against the fusion.
    """
    plan, config, prefix = method.plan, get_current_vllm_config(), method.prefix
    report, fuses = method.startup.report, method.options.fuse_norm
    match = norm_before(layer, prefix, owners, on_gpu=plan.kernel.arch != "cpu")
    if match is None:
        return None
    per_token = plan.activation == "per-token"
    kernels = norm_quantize.kernels(per_token, plan.is_fp8)
    why_not = norm_quantize.unsupported_reason(config, fuses) or match.why_not
    name, shown = match.name, prefix.rpartition(".")[2]
    found_before = all_reduce_norm.NONE
    if not why_not and kernels is not None:
        found_before = all_reduce_norm.before(match, layer, kernels[1])
        why_not = all_reduce_norm.vllm_does_better(config, found_before)
    if why_not or kernels is None:
        report.add(LayerRecord(name, "vLLM", "16-bit", why_not, 0, 0))
        return None
    producer, reduced, note = found_before
    if producer is not None:
        producer.quant_method.hand_on_part(producer)
    match.norm.feeding = Feeding(layer, per_token, plan.terms, *kernels, reduced)
    reason = "; ".join(filter(None, (f"quantises for {shown}", note)))
    arithmetic = plan.arithmetic.removeprefix("W4")
    report.add(LayerRecord(name, kernels[1].label, arithmetic, reason, 0, 0))
    if plan.kernel.arch != "cpu":
        dtype: Any = dtype_name(layer.params_dtype)
        sizes = dtype_name(match.norm.weight.dtype), plan.k, per_token, plan.terms
        needed = Norm(dtype, *sizes, plan.kernel.batch_invariant, plan.is_fp8)
        method.startup.require_kernels(name, needed)
    kept = f"{name.rpartition('.')[2]} {reason}", *(kernel.target for kernel in kernels)
    hash_kernels(config, kept, plan.terms, method.options)
    return match


def unfuse_norm(method: Any, match: NormMatch) -> None:
    """Make a norm return 16 bits again, because the layer that it fed takes 16 bits.

    ``method``, ``match``: argument and result of ``fuse_norm``, for a plan of FP8 activations,
    whose norms take no part in an all-reduce.
    """
    assert match.norm.feeding.reduction is None
    match.norm.feeding = None
    shown = method.prefix.rpartition(".")[2]
    record = LayerRecord(match.name, "vLLM", "16-bit", f"{shown} takes 16 bits", 0, 0)
    method.startup.report.add(record)
    method.startup.products.pop(match.name, None)


def consumer_of(method: Any, layer: Any, owner: Any) -> tuple[Any, str]:
    """Layer that takes the result of SiLU-mul quantised, or None; and a note for the report.

    Args:
        method: our method of a fused gate and up projection.
        layer: the projection.
        owner: fully constructed module that holds the projection.
    """
    plan = method.plan
    match, why_not = fused_mlp.consumer_of(owner, layer)
    if match is None and plan.quantizer is not None:
        return None, f"result in 16 bits: {why_not}"
    taker = getattr(getattr(match, "quant_method", None), "plan", None)
    if not isinstance(taker, LinearPlan) or taker.quantizer is None:
        return None, ""  # takes 16-bit inputs
    name = match.quant_method.prefix.rpartition(".")[2]
    if taker.activation != "static":
        return None, f"result in 16 bits: {name} has a scale per token"
    if taker.is_fp8 != plan.is_fp8:
        return None, ONLY_FP8_WRITES_FP8
    return match, f"result quantised for {name}"
