"""What ``config.json`` and ``hf_quant_config.json`` say of a quantised checkpoint."""

import json
from pathlib import Path
from typing import Any

from nvfp4_kernels.nvfp4 import BLOCK_SIZE, Convention
from vllm_fp4_plugin import __version__

_PRODUCER = {"name": "vllm_fp4_plugin", "version": __version__}


def write_configs(
    folder: Path,
    config: dict[str, Any],
    format: Convention,
    *,
    ignore: list[str],
    weight_only: bool,
    fp8_kv: bool,
) -> None:
    """Write the model's ``config`` with its quantisation into ``folder``.

    Args:
        folder: of the quantised checkpoint.
        config: the source's ``config.json``.
        format: whose style to follow.
        ignore: names of the linears that were not quantised.
        weight_only: inputs stay in 16 bits.
        fp8_kv: scales of an FP8 key/value cache are stored.
    """
    make = modelopt_config if format == "modelopt" else compressed_tensors_config
    quantization = make(ignore, weight_only, fp8_kv)
    _write_json(folder / "config.json", config | {"quantization_config": quantization})
    if format == "modelopt":
        legacy = modelopt_legacy_config(ignore, weight_only, fp8_kv)
        _write_json(folder / "hf_quant_config.json", legacy)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def modelopt_config(ignore: list[str], weight_only: bool, fp8_kv: bool) -> dict[str, Any]:
    """``quantization_config`` in the style of ModelOpt 0.31 and later."""
    nvfp4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK_SIZE}
    group = {
        "input_activations": None if weight_only else nvfp4,
        "weights": nvfp4,
        "targets": ["Linear"],
    }
    config = {
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "quant_algo": _modelopt_algorithm(weight_only),
        "producer": _PRODUCER,
        "quant_method": "modelopt",
    }
    if fp8_kv:
        config["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return config


def modelopt_legacy_config(ignore: list[str], weight_only: bool, fp8_kv: bool) -> dict[str, Any]:
    """``hf_quant_config.json``, which ModelOpt writes beside the above for older readers."""
    return {
        "producer": _PRODUCER,
        "quantization": {
            "quant_algo": _modelopt_algorithm(weight_only),
            "kv_cache_quant_algo": "FP8" if fp8_kv else None,
            "group_size": BLOCK_SIZE,
            "exclude_modules": ignore,
        },
    }


def _modelopt_algorithm(weight_only: bool) -> str:
    return "W4A16_NVFP4" if weight_only else "NVFP4"


def compressed_tensors_config(ignore: list[str], weight_only: bool, fp8_kv: bool) -> dict[str, Any]:
    """``quantization_config`` in the style of compressed-tensors, ``nvfp4-pack-quantized``."""
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
    packing = "nvfp4-pack-quantized"
    group = {
        "targets": ["Linear"],
        "weights": nvfp4,
        "input_activations": None if weight_only else inputs,
        "output_activations": None,
        "format": packing,
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
        "format": packing,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": kv if fp8_kv else None,
    }
