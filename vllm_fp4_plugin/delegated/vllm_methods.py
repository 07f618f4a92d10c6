"""vLLM's own methods for non-NVFP4 layers, built by vLLM's configs for the checkpoint's format."""

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from vllm_fp4_plugin.formats import INVERSE_SCALE, Format, LayerGroup, UnsupportedCheckpoint
from vllm_fp4_plugin.formats.kind import FP8_BLOCK_SIZE, Kind


def vllm_method(
    layer: Any,
    prefix: str,
    group: LayerGroup,
    format: Format,
    packed_modules: Mapping[str, list[str]],
) -> QuantizeMethodBase:
    """Get vLLM's method for a layer of ``group``, from a config made for this layer alone.

    Args:
        layer: layer that vLLM builds.
        prefix: name of the layer.
        group: quantization scheme of the layer.
        format: format of the checkpoint.
        packed_modules: see ``choice.choose``.

    Raises:
        UnsupportedCheckpoint: vLLM has no method for the layer.
    """
    try:
        if group.scale == INVERSE_SCALE:
            config = fp8_blocks()
        elif format.name == "modelopt":
            config = _modelopt(group)
        else:
            config = _compressed_tensors(prefix, group)
        config.packed_modules_mapping = dict(packed_modules)
        method = config.get_quant_method(layer, prefix)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise _refusal(prefix, group, f"({error})") from error
    if method is None or isinstance(method, UnquantizedLinearMethod):
        raise _refusal(prefix, group, "and would take it for a 16-bit one")
    return method


def label(layer: Any, method: QuantizeMethodBase) -> str:
    """Class name of the layer's scheme in vLLM; of ``method`` if the layer has no scheme."""
    return type(getattr(layer, "scheme", None) or method).__name__


def fp8_blocks() -> Any:
    """Config of vLLM's own FP8 format, in which block scales are named ``weight_scale_inv``."""
    fields = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK_SIZE] * 2,
    }
    return get_quantization_config("fp8").from_config(fields)


def _modelopt(group: LayerGroup) -> Any:
    name = "modelopt_mxfp8" if group.kind is Kind.MXFP8 else "modelopt"
    fields = {"quant_method": name, "ignore": [], **group.settings}
    return get_quantization_config(name).from_config(fields)


def _compressed_tensors(prefix: str, group: LayerGroup) -> Any:
    settings = dict(group.settings)
    fields = {
        "format": settings["format"],
        "config_groups": {"group_0": settings | {"targets": [prefix]}},
        "ignore": [],
    }
    return get_quantization_config("compressed-tensors").from_config(fields)


def _refusal(prefix: str, group: LayerGroup, why: str) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(
        f"{prefix}: is {group.kind}, which vLLM has no method for {why}; must be NVFP4, 16-bit or "
        "what vLLM serves on this device; quantise the model with this layer excluded"
    )
