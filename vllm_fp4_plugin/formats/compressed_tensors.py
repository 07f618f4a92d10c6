"""The format of compressed-tensors (llm-compressor): its tensors, and its config read and written.

``config.json`` holds ``quantization_config`` with ``format: "nvfp4-pack-quantized"`` and
``config_groups``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nvfp4_kernels.nvfp4 import BLOCK_SIZE
from vllm_fp4_plugin.formats.config_groups import read_groups, read_kv_scheme, read_weight_only
from vllm_fp4_plugin.formats.format import (
    CheckpointConfig,
    Format,
    TensorNames,
    UnsupportedCheckpoint,
)

_PACKING = "nvfp4-pack-quantized"
_REMEDY = "serve it with --quantization compressed-tensors"


class CompressedTensors(Format):
    """compressed-tensors' format: the global scales are divisors."""

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

    def wrote(self, config: Mapping[str, Any]) -> bool:
        method = str(config.get("quant_method", "")).lower().replace("_", "-")
        return method == "compressed-tensors"

    def claims_nvfp4(self, config: Mapping[str, Any]) -> bool:
        return config.get("format") == _PACKING

    def parse(self, config: Mapping[str, Any]) -> CheckpointConfig:
        for field in ("sparsity_config", "transform_config"):
            if config.get(field):
                raise UnsupportedCheckpoint(f"{field}: is set, must be absent; {_REMEDY}")
        _check_packing(config)
        groups = read_groups(config, _REMEDY)
        weight_only = read_weight_only(groups, _REMEDY)
        targets = [target for group in groups.values() for target in group.get("targets") or ()]
        if not targets:
            raise UnsupportedCheckpoint(
                "config_groups: names no targets, must say which layers are quantised; "
                "export the checkpoint again"
            )
        return CheckpointConfig(
            self,
            weight_only,
            tuple(config.get("ignore") or ()),
            None if "Linear" in targets else tuple(targets),
            read_kv_scheme(config.get("kv_cache_scheme")),
        )

    def config(self, ignore: Sequence[str], *, weight_only: bool, fp8_kv: bool) -> dict[str, Any]:
        nvfp4 = {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "tensor_group",
            "group_size": BLOCK_SIZE,
            "dynamic": False,
            "scale_dtype": "torch.float8_e4m3fn",
        }
        # "local": block scales are found at run time, the global scale is the stored one.
        inputs = nvfp4 | {"dynamic": "local", "observer": "static_minmax"}
        group = {
            "targets": ["Linear"],
            "weights": nvfp4,
            "input_activations": None if weight_only else inputs,
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


def _check_packing(config: Mapping[str, Any]) -> None:
    """Raise unless the whole config, and every group that says so itself, is packed as NVFP4."""
    groups = config.get("config_groups")
    of_groups = groups.values() if isinstance(groups, Mapping) else ()
    said = [config, *(group for group in of_groups if isinstance(group, Mapping))]
    formats = {part.get("format") for part in said if part is config or part.get("format")}
    if formats != {_PACKING}:
        raise UnsupportedCheckpoint(
            f"format: is {', '.join(sorted(map(str, formats)))}, must be {_PACKING} for every "
            f"config group; {_REMEDY}"
        )
