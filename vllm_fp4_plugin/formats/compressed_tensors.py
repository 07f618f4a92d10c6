"""Format of compressed-tensors (llm-compressor): tensor names, reader and writer of its config.

``config.json`` holds ``quantization_config`` with ``config_groups`` and their ``format``; with
several formats, each group has its own. A group's targets are names of modules, ``re:`` regexes, or
``Linear`` for every linear without a group of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE
from vllm_fp4_plugin.formats.config_groups import (
    EVERY_LINEAR,
    check_any_nvfp4,
    input_scaling,
    is_nvfp4_cache,
    is_uniform,
    read_groups,
    read_kv_scheme,
)
from vllm_fp4_plugin.formats.fields import read_names
from vllm_fp4_plugin.formats.format import (
    CheckpointConfig,
    Format,
    LayerGroup,
    TensorNames,
    UnsupportedCheckpoint,
)
from vllm_fp4_plugin.formats.kind import FP8_BLOCK_SIZE, MX_BLOCK_SIZE, Kind

_PACKING = "nvfp4-pack-quantized"
_FP8_PACKINGS = ("float-quantized", "naive-quantized")
_PACKINGS = {
    "nvfp4": (_PACKING,),
    "fp8": _FP8_PACKINGS,
    "mxfp8": ("mxfp8-quantized", *_FP8_PACKINGS),
    "mxfp4": ("mxfp4-pack-quantized",),
}
_REMEDY = "serve it with --quantization compressed-tensors"

_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_MX = {"strategy": "group", "group_size": MX_BLOCK_SIZE, "scale_dtype": "torch.uint8"}
_FP4: dict[str, Any] = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": BLOCK_SIZE,
    "dynamic": False,
    "scale_dtype": "torch.float8_e4m3fn",
}
_WEIGHTS: dict[Kind, dict[str, Any]] = {
    Kind.NVFP4: _FP4,
    Kind.NVFP4_A16: _FP4,
    Kind.FP8: _FP8 | {"strategy": "tensor"},
    Kind.FP8_CHANNEL: _FP8 | {"strategy": "channel"},
    Kind.FP8_BLOCK: _FP8 | {"strategy": "block", "block_structure": [FP8_BLOCK_SIZE] * 2},
    Kind.MXFP8: _FP8 | _MX,
    Kind.MXFP4: _FP8 | _MX | {"num_bits": 4},
}
_PER_TOKEN = _FP8 | {"strategy": "token", "dynamic": True}
_INPUTS: dict[Kind, dict[str, Any] | None] = {
    # "local": block scales are computed at run time, the global scale is the stored one.
    Kind.NVFP4: _FP4 | {"dynamic": "local", "observer": "static_minmax"},
    Kind.NVFP4_A16: None,
    Kind.FP8: _PER_TOKEN,
    Kind.FP8_CHANNEL: _PER_TOKEN,
    Kind.FP8_BLOCK: _FP8 | {"strategy": "group", "group_size": FP8_BLOCK_SIZE, "dynamic": True},
    Kind.MXFP8: _FP8 | _MX | {"dynamic": True},
    Kind.MXFP4: None,
}


class CompressedTensors(Format):
    """Format of compressed-tensors, whose global scales are divisors."""

    name = "compressed-tensors"
    names = TensorNames(
        weight="weight_packed",
        block_scale="weight_scale",
        weight_global="weight_global_scale",
        input_global="input_global_scale",
        k_scale="k_scale",
        v_scale="v_scale",
    )
    scalar = (1,)
    reciprocal = True
    scale_dims = MappingProxyType({Kind.FP8_CHANNEL: 2, Kind.FP8_BLOCK: 2})

    def wrote(self, config: Mapping[str, Any]) -> bool:
        method = str(config.get("quant_method", "")).lower().replace("_", "-")
        return method == "compressed-tensors"

    def claims_nvfp4(self, config: Mapping[str, Any]) -> bool:
        groups = config.get("config_groups")
        parts = groups.values() if isinstance(groups, Mapping) else ()
        formats = (part.get("format") for part in parts if isinstance(part, Mapping))
        return _PACKING in (config.get("format"), *formats)

    def parse(self, config: Mapping[str, Any]) -> CheckpointConfig:
        for field in ("sparsity_config", "transform_config"):
            if config.get(field):
                raise UnsupportedCheckpoint(f"{field}: is set, must be absent; {_REMEDY}")
        groups = [_with_packing(group, config) for group in read_groups(config, _REMEDY)]
        for group in groups:
            if group.targets == ():
                raise UnsupportedCheckpoint(
                    f"{group.where}: names no targets, must say which layers are quantised; "
                    "export the checkpoint again"
                )
        check_any_nvfp4("config_groups", groups, _REMEDY)
        ignore = read_names("ignore", config.get("ignore"))
        scheme = read_kv_scheme(config.get("kv_cache_scheme"))
        nvfp4_cache = is_nvfp4_cache(config.get("kv_cache_scheme"))
        if not is_uniform(groups):
            return CheckpointConfig(
                self, True, ignore, None, scheme, tuple(groups), nvfp4_cache=nvfp4_cache
            )
        weight_only = groups[0].kind is Kind.NVFP4_A16
        targets = [target for group in groups for target in group.targets or (EVERY_LINEAR,)]
        named = None if EVERY_LINEAR in targets else tuple(targets)
        return CheckpointConfig(self, weight_only, ignore, named, scheme, nvfp4_cache=nvfp4_cache)

    def group(self, kind: Kind, *, static_input: bool) -> LayerGroup | None:
        static = static_input and kind in (Kind.FP8, Kind.FP8_CHANNEL)
        inputs = _FP8 | {"strategy": "tensor"} if static else _INPUTS[kind]
        settings = {
            "weights": _WEIGHTS[kind],
            "input_activations": inputs,
            "format": _PACKINGS[kind.family][0],
        }
        return LayerGroup("the headers", kind, None, settings, input_scaling(kind, inputs))

    def config(self, ignore: Sequence[str], *, weight_only: bool, fp8_kv: bool) -> dict[str, Any]:
        kind = Kind.NVFP4_A16 if weight_only else Kind.NVFP4
        group = {
            "targets": ["Linear"],
            "weights": _WEIGHTS[kind],
            "input_activations": _INPUTS[kind],
            "output_activations": None,
            "format": _PACKING,
        }
        kv = {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "tensor",
            "dynamic": False,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": _PACKING,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(ignore),
            "kv_cache_scheme": kv if fp8_kv else None,
        }


def _with_packing(group: LayerGroup, config: Mapping[str, Any]) -> LayerGroup:
    """Copy of ``group`` with ``format`` in the settings: the group's own, else the config's.

    Raises:
        UnsupportedCheckpoint: the format cannot hold the group's weights.
    """
    own = group.settings.get("format")
    packing = own or config.get("format")
    accepted = _PACKINGS[group.kind.family]
    if packing not in accepted:
        field = f"{group.where}.format" if own else "format"
        raise UnsupportedCheckpoint(
            f"{field}: is {packing}, must be {' or '.join(accepted)} for the {group.kind} weights "
            f"of {group.where}; {_REMEDY}"
        )
    return replace(group, settings=dict(group.settings) | {"format": packing})
