"""Choice of what serves a layer of quantised experts."""

from typing import Any

from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, UnquantizedFusedMoEMethod

from nvfp4_kernels.devices import device_family
from nvfp4_kernels.nvfp4 import BLOCK_SIZE
from vllm_fp4_plugin import completeness
from vllm_fp4_plugin.delegated import choice as delegated
from vllm_fp4_plugin.device import current_device, is_planned
from vllm_fp4_plugin.experts.method import Nvfp4ExpertsMethod
from vllm_fp4_plugin.experts.vllm_methods import KEEPS_16_BITS, backend, vllm_experts
from vllm_fp4_plugin.formats import CheckpointConfig, LayerGroup, UnsupportedCheckpoint
from vllm_fp4_plugin.kind import Kind
from vllm_fp4_plugin.options import KEY, Options
from vllm_fp4_plugin.report import LayerRecord
from vllm_fp4_plugin.startup import Startup

REFERENCE = "nvfp4_experts/reference (cpu)"


def choose(
    layer: Any,
    prefix: str,
    group: LayerGroup,
    checkpoint: CheckpointConfig,
    options: Options,
    startup: Startup,
    reason: str,
) -> FusedMoEMethodBase:
    """Choose the method of a layer of experts and report it: vLLM's, or on CPU the reference.

    Args:
        layer: vLLM's layer of routed experts.
        prefix: its name.
        group: what the experts are, not 16-bit.
        checkpoint: content of the checkpoint's config.
        options: the user's.
        startup: told of the choice, and when the weights are in place.
        reason: reason for their kind, for the report.

    Raises:
        UnsupportedCheckpoint: nobody serves them, or the user wants nobody to.
    """
    if options.experts == "refuse":
        raise UnsupportedCheckpoint(
            f"{prefix}: holds {group.kind} experts, and {KEY}.experts is 'refuse'; leave the "
            "option out to have them served by vLLM's methods, on CPU by a reference"
        )
    completeness.check_load_format(get_current_vllm_config().load_config.load_format)
    method: FusedMoEMethodBase
    arithmetic, unquantised = arithmetic_of(group), ""
    kernel = label(prefix, group)
    if kernel != REFERENCE and is_planned():
        # vLLM would ask the GPU that is there, and experts that never run may be of any kind.
        method = UnquantizedFusedMoEMethod(layer.moe_config)
    elif kernel != REFERENCE:
        method, name = vllm_experts(layer, prefix, group, checkpoint, startup)
        kernel = f"{group.kind.family} (vLLM: {name})"
        if group.kind is Kind.NVFP4 and backend(method) in KEEPS_16_BITS:
            arithmetic, unquantised = "W4A16", f"{backend(method)} leaves activations in 16 bits"
    else:
        weight_only = group.kind is Kind.NVFP4_A16
        method = Nvfp4ExpertsMethod(startup, layer, prefix, checkpoint, weight_only=weight_only)
    startup.waiting.add(prefix)
    reason = "; ".join(filter(None, (reason, unquantised)))
    sizes = _sizes(layer, group.kind)
    startup.report.add(LayerRecord(prefix, kernel, arithmetic, reason, *sizes))
    return method


def projections(layer: Any) -> list[str]:
    """Names of an expert's projections in the checkpoint."""
    names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    return [name for name in names if name is not None]


def unquantized(layer: Any, prefix: str, reason: str) -> LayerRecord:
    """Record of experts that vLLM runs in 16 bits, and why."""
    matrices = _matrices(layer)
    elements = sum(count * n * k for count, n, k in matrices)
    return LayerRecord.unquantized(prefix, reason, elements, elements * layer.params_dtype.itemsize)


def label(prefix: str, group: LayerGroup) -> str:
    """Name of what serves quantised experts on this device, for reports.

    Raises:
        UnsupportedCheckpoint: nobody does.
    """
    if device_family(current_device()) != "cpu":
        return f"{group.kind.family} (vLLM)"
    if group.kind.is_nvfp4:
        return REFERENCE
    raise UnsupportedCheckpoint(
        f"{prefix}: holds {group.kind} experts, must hold NVFP4 or 16-bit ones on CPU; serve the "
        "model on a GPU"
    )


def arithmetic_of(group: LayerGroup) -> str:
    """Bits of weights and activations of experts, e.g. ``W4A4 static``."""
    if group.kind.is_nvfp4:
        return "W4A4 static" if group.kind is Kind.NVFP4 else "W4A16"
    return delegated.arithmetic(group)


def _matrices(layer: Any) -> list[tuple[int, int, int]]:
    """Count, rows and columns of the matrices of this rank's experts."""
    config = layer.moe_config
    h, i, e = config.hidden_dim, config.intermediate_size_per_partition, config.num_local_experts
    return [(e * (2 if config.is_act_and_mul else 1), i, h), (e, h, i)]


def _sizes(layer: Any, kind: Kind) -> tuple[int, int]:
    """Elements of the weights on this rank, and the bytes that they take."""
    elements = size = 0
    for count, n, k in _matrices(layer):
        elements += count * n * k
        if kind.is_nvfp4:
            size += count * (n * k // 2 + n * k // BLOCK_SIZE + 4)
        else:
            size += count * kind.weight_bytes(n, k)
    return elements, size
