"""Choice of what serves a layer that is quantised, but not in NVFP4."""

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.platforms import current_platform

from vllm_fp4_plugin.delegated.reference import ReferenceLinearMethod
from vllm_fp4_plugin.delegated.vllm_methods import label, vllm_method
from vllm_fp4_plugin.formats import Format, LayerGroup
from vllm_fp4_plugin.kind import Kind
from vllm_fp4_plugin.report import LayerRecord


def choose(
    layer: Any,
    prefix: str,
    group: LayerGroup,
    format: Format,
    packed_modules: Mapping[str, list[str]],
    reason: str,
) -> tuple[QuantizeMethodBase, LayerRecord]:
    """Choose the method of a layer: vLLM's, or on CPU, where it has none, a reference.

    Args:
        layer: layer that vLLM builds.
        prefix: its name.
        group: what it is, not NVFP4.
        format: format of the checkpoint.
        packed_modules: shards of fused layers.
        reason: reason for its kind, for the report.

    Returns:
        The method, and what the report says of it.

    Raises:
        UnsupportedCheckpoint: nobody serves it.
    """
    method: QuantizeMethodBase
    if current_platform.is_cpu() and not _vllm_serves_on_cpu(group):
        method = ReferenceLinearMethod(group, format.scale_dims.get(group.kind, 0), prefix)
        kernel = f"{group.kind.family}_linear/reference (cpu)"
    else:
        method = vllm_method(layer, prefix, group, format, packed_modules)
        kernel = f"{group.kind.family} (vLLM: {label(layer, method)})"
    n = sum(getattr(layer, "output_partition_sizes", [layer.output_size]))
    k = getattr(layer, "input_size_per_partition", layer.input_size)
    size = group.kind.weight_bytes(n, k)
    return method, LayerRecord(prefix, kernel, _arithmetic(group), reason, n * k, size)


def _vllm_serves_on_cpu(group: LayerGroup) -> bool:
    """Whether vLLM's CPU build serves a kind, on every CPU.

    It has nothing for MX formats; blocks need AMX; per-tensor scales are made one for all shards by
    an op that it lacks.
    """
    return group.kind is Kind.FP8_CHANNEL and group.inputs == "dynamic"


def _arithmetic(group: LayerGroup) -> str:
    bits = "4" if group.kind is Kind.MXFP4 else "8"
    if group.inputs == "16-bit":
        return f"W{bits}A16"
    return f"W{bits}A{bits} {group.inputs}"
