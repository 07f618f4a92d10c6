"""NVIDIA ModelOpt's format: its tensors, and its config read and written.

* 0.31 and later: ``config.json`` holds ``quantization_config`` with ``quant_method: "modelopt"``,
  ``quant_algo``, ``ignore`` and ``config_groups``.
* 0.29 and earlier: ``hf_quant_config.json`` holds ``quantization`` with ``quant_algo``,
  ``group_size``, ``exclude_modules`` and ``kv_cache_quant_algo``. Later versions write it too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nvfp4_kernels.nvfp4 import BLOCK_SIZE
from vllm_fp4_plugin import versions
from vllm_fp4_plugin.formats.config_groups import (
    check_block_size,
    read_groups,
    read_kv_scheme,
    read_weight_only,
)
from vllm_fp4_plugin.formats.format import (
    CheckpointConfig,
    Format,
    TensorNames,
    UnsupportedCheckpoint,
)

LEGACY_FILE = "hf_quant_config.json"

_W4A4, _W4A16 = "NVFP4", "W4A16_NVFP4"
_FP8_KV = {"dynamic": False, "num_bits": 8, "type": "float"}
_PRODUCER = {"name": "vllm_fp4_plugin", "version": versions.PLUGIN}
_REMEDY = "serve it with --quantization modelopt or modelopt_mixed"


class ModelOpt(Format):
    """ModelOpt's format: the global scales are factors."""

    name = "modelopt"
    names = TensorNames(
        weight="weight",
        block_scale="weight_scale",
        weight_global="weight_scale_2",
        input_global="input_scale",
        k_scale="k_proj.k_scale",
        v_scale="v_proj.v_scale",
    )
    scalar = ()
    reciprocal = False

    def wrote(self, config: Mapping[str, Any]) -> bool:
        method = str(config.get("quant_method", "")).lower()
        producer = config.get("producer")
        by_modelopt = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
        return method.startswith("modelopt") or (not method and by_modelopt)

    def claims_nvfp4(self, config: Mapping[str, Any]) -> bool:
        return _W4A4 in _algorithm(_inner(config))

    def parse(self, config: Mapping[str, Any]) -> CheckpointConfig:
        inner = _inner(config)
        algorithm = _algorithm(inner)
        if algorithm not in (_W4A4, _W4A16) or "quantized_layers" in inner:
            raise UnsupportedCheckpoint(
                f"quant_algo: is {inner.get('quant_algo')!r}, must be {_W4A4} or {_W4A16} for a "
                f"whole model; {_REMEDY}"
            )
        check_block_size("group_size", inner.get("group_size"))
        groups = read_groups(config, _REMEDY)
        weight_only = algorithm == _W4A16 or read_weight_only(groups, _REMEDY)
        ignore = inner.get("exclude_modules" if _is_legacy(config) else "ignore") or ()
        return CheckpointConfig(self, weight_only, tuple(ignore), None, _kv_scheme(inner))

    def config(self, ignore: Sequence[str], *, weight_only: bool, fp8_kv: bool) -> dict[str, Any]:
        nvfp4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK_SIZE}
        group = {
            "input_activations": None if weight_only else nvfp4,
            "weights": nvfp4,
            "targets": ["Linear"],
        }
        config = {
            "config_groups": {"group_0": group},
            "ignore": list(ignore),
            "quant_algo": _W4A16 if weight_only else _W4A4,
            "producer": _PRODUCER,
            "quant_method": "modelopt",
        }
        return config | ({"kv_cache_scheme": _FP8_KV} if fp8_kv else {})

    def further_files(
        self, ignore: Sequence[str], *, weight_only: bool, fp8_kv: bool
    ) -> dict[str, dict[str, Any]]:
        quantization = {
            "quant_algo": _W4A16 if weight_only else _W4A4,
            "kv_cache_quant_algo": "FP8" if fp8_kv else None,
            "group_size": BLOCK_SIZE,
            "exclude_modules": list(ignore),
        }
        return {LEGACY_FILE: {"producer": _PRODUCER, "quantization": quantization}}


def _is_legacy(config: Mapping[str, Any]) -> bool:
    return "quantization" in config


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner: Mapping[str, Any] = config["quantization"] if _is_legacy(config) else config
    return inner


def _algorithm(inner: Mapping[str, Any]) -> str:
    return str(inner.get("quant_algo", "")).upper()


def _kv_scheme(inner: Mapping[str, Any]) -> dict[str, Any] | None:
    algorithm = inner.get("kv_cache_quant_algo")
    if inner.get("kv_cache_scheme") is not None or algorithm is None:
        return read_kv_scheme(inner.get("kv_cache_scheme"))
    if str(algorithm).upper() != "FP8":
        raise UnsupportedCheckpoint(
            f"kv_cache_quant_algo: is {algorithm!r}, must be FP8 or absent; "
            "export the checkpoint with an FP8 KV cache or none"
        )
    return dict(_FP8_KV)
