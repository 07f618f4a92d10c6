"""Choice of the method for a layer that is quantised, but not in NVFP4."""

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from nvfp4_kernels.devices import device_family
from vllm_fp4_plugin.delegated.reference import ReferenceLinearMethod
from vllm_fp4_plugin.delegated.vllm_methods import label, vllm_method
from vllm_fp4_plugin.device import current_device
from vllm_fp4_plugin.formats import Format, LayerGroup
from vllm_fp4_plugin.formats.kind import Kind
from vllm_fp4_plugin.report import LayerRecord


def choose(
    layer: Any,
    prefix: str,
    group: LayerGroup,
    format: Format,
    packed_modules: Mapping[str, list[str]],
    reason: str,
) -> tuple[QuantizeMethodBase, LayerRecord]:
    """Choose the method of a layer: vLLM's, or a reference (see ``serves_by_reference``).

    Args:
        layer: layer that vLLM builds.
        prefix: name of the layer.
        group: quantization scheme of the layer, not NVFP4.
        format: format of the checkpoint.
        packed_modules: names of a fused layer's shards, by the name of the fused layer.
        reason: reason for the scheme, for the report.

    Returns:
        The method, and its record for the report.

    Raises:
        UnsupportedCheckpoint: no method serves the layer.
    """
    method: QuantizeMethodBase
    if serves_by_reference(group):
        method = ReferenceLinearMethod(group, group.scale_dims(format), prefix)
        kernel = reference_label(group)
    else:
        method = vllm_method(layer, prefix, group, format, packed_modules)
        kernel = f"{group.kind.family} (vLLM: {label(layer, method)})"
    n = sum(getattr(layer, "output_partition_sizes", [layer.output_size]))
    k = getattr(layer, "input_size_per_partition", layer.input_size)
    size = group.kind.weight_bytes(n, k)
    return method, LayerRecord(prefix, kernel, arithmetic(group), reason, n * k, size)


def serves_by_reference(group: LayerGroup) -> bool:
    """Whether the plugin's reference serves a scheme, instead of vLLM's own method.

    True on a CPU, except for FP8 per channel with dynamic input scales, which vLLM's CPU build
    serves on every CPU. The build has no kernels for MX formats; its FP8 block kernels need AMX;
    per-tensor scales of shards are merged by an op that the build declares without a kernel.
    """
    served = group.kind is Kind.FP8_CHANNEL and group.inputs == "dynamic"
    return device_family(current_device()) == "cpu" and not served


def reference_label(group: LayerGroup) -> str:
    """Name of the reference for a scheme, for reports."""
    return f"{group.kind.family}_linear/reference (cpu)"


def arithmetic(group: LayerGroup) -> str:
    """Bits of weights and activations of a scheme that is not NVFP4, e.g. ``W8A8 static``."""
    bits = "4" if group.kind is Kind.MXFP4 else "8"
    if group.inputs == "16-bit":
        return f"W{bits}A16"
    return f"W{bits}A{bits} {group.inputs}"
