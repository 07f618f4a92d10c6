"""Quantization configs as producers write them, and those that are refused."""

import copy
from typing import Any

import pytest

from vllm_fp4_plugin.formats import FORMATS, UnsupportedCheckpoint, is_nvfp4, parse

FP4 = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
FP8_KV = {"num_bits": 8, "type": "float", "dynamic": False}

MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "ignore": ["lm_head", "model.layers.0*"],
    "config_groups": {"group_0": {"weights": FP4, "input_activations": FP4, "targets": ["Linear"]}},
    "kv_cache_scheme": FP8_KV,
}
MODELOPT_LEGACY = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
}
CT_ARGS = {**FP4, "strategy": "tensor_group", "symmetric": True}
COMPRESSED_TENSORS = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "format": "nvfp4-pack-quantized",
            "targets": ["Linear"],
            "weights": CT_ARGS,
            "input_activations": {**CT_ARGS, "dynamic": "local"},
        }
    },
}


def edited(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of ``config`` with the field at dotted ``path`` set, or removed by ``...``."""
    changed = copy.deepcopy(config)
    *parents, last = path.split(".")
    at = changed
    for key in parents:
        at = at[key]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return changed


def test_modelopt() -> None:
    checkpoint = parse(MODELOPT)
    assert checkpoint.format.name == "modelopt"
    assert not checkpoint.weight_only
    assert checkpoint.ignore == ("lm_head", "model.layers.0*")
    assert checkpoint.targets is None
    assert checkpoint.kv_cache_scheme == FP8_KV
    assert checkpoint.names.weight_global == "weight_scale_2"


@pytest.mark.parametrize("quant_method", [None, "modelopt", "modelopt_fp4"])
def test_modelopt_legacy(quant_method: str | None) -> None:
    named = {} if quant_method is None else {"quant_method": quant_method}
    checkpoint = parse(MODELOPT_LEGACY | named)
    assert checkpoint.ignore == ("lm_head",)
    assert checkpoint.kv_cache_scheme is not None
    assert not checkpoint.weight_only


def test_compressed_tensors() -> None:
    checkpoint = parse(COMPRESSED_TENSORS)
    assert checkpoint.format.name == "compressed-tensors"
    assert checkpoint.format.reciprocal
    assert checkpoint.targets is None
    assert checkpoint.kv_cache_scheme is None


def test_compressed_tensors_targets() -> None:
    targets = ["re:.*mlp.*", "model.layers.0.self_attn.o_proj"]
    config = edited(COMPRESSED_TENSORS, "config_groups.group_0.targets", targets)
    assert parse(config).targets == tuple(targets)


@pytest.mark.parametrize(
    "config",
    [
        edited(MODELOPT, "quant_algo", "W4A16_NVFP4"),
        edited(MODELOPT, "config_groups.group_0.input_activations", None),
        edited(COMPRESSED_TENSORS, "config_groups.group_0.input_activations", None),
        edited(COMPRESSED_TENSORS, "config_groups.group_0.input_activations", ...),
    ],
    ids=["modelopt-algo", "modelopt-groups", "ct-null", "ct-absent"],
)
def test_weight_only(config: dict[str, Any]) -> None:
    assert parse(config).weight_only


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            edited(MODELOPT, "quant_algo", "FP8"),
            "quant_algo: is 'FP8', must be NVFP4 or W4A16_NVFP4",
        ),
        (edited(MODELOPT, "quant_algo", "NVFP5"), "quant_algo: is 'NVFP5'"),
        (edited(MODELOPT, "quant_algo", ...), "quant_algo: is None"),
        (edited(MODELOPT, "quant_algo", "MIXED_PRECISION"), "quant_algo: is 'MIXED_PRECISION'"),
        (MODELOPT | {"quantized_layers": {"a": {}}}, "for a whole model"),
        (
            edited(MODELOPT_LEGACY, "quantization.group_size", 32),
            "group_size: is 32, must be 16",
        ),
        (
            edited(MODELOPT, "config_groups.group_0.weights.group_size", 128),
            r"weights\.group_size: is 128, must be 16",
        ),
        (
            edited(MODELOPT_LEGACY, "quantization.kv_cache_quant_algo", "NVFP4"),
            "kv_cache_quant_algo: is 'NVFP4', must be FP8 or absent",
        ),
        (
            edited(MODELOPT, "kv_cache_scheme", {"num_bits": 4, "type": "float"}),
            "kv_cache_scheme: is .* must be 8-bit float",
        ),
        (edited(COMPRESSED_TENSORS, "format", "float-quantized"), "format: is float-quantized"),
        (
            edited(COMPRESSED_TENSORS, "config_groups.group_0.format", "pack-quantized"),
            "format: is nvfp4-pack-quantized, pack-quantized",
        ),
        (
            edited(COMPRESSED_TENSORS, "config_groups.group_0.weights.num_bits", 8),
            "weights: is 8-bit float, must be 4-bit float",
        ),
        (
            edited(COMPRESSED_TENSORS, "config_groups.group_0.weights.group_size", 32),
            "group_size: is 32, must be 16",
        ),
        (
            edited(COMPRESSED_TENSORS, "config_groups.group_0.input_activations.num_bits", 8),
            "input_activations: is 8-bit",
        ),
        (
            edited(
                COMPRESSED_TENSORS,
                "config_groups.group_1",
                {"targets": ["re:.*mlp"], "weights": CT_ARGS},
            ),
            "config_groups: group_1 quantise weights only, the others activations too",
        ),
        (COMPRESSED_TENSORS | {"transform_config": {"x": 1}}, "transform_config: is set"),
        (
            edited(COMPRESSED_TENSORS, "config_groups.group_0.targets", []),
            "config_groups: names no targets",
        ),
        ({"quant_method": "gptq", "bits": 4}, "quant_method: is 'gptq', nvfp4-tc reads"),
    ],
)
def test_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=message):
        parse(config)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MODELOPT, True),
        (MODELOPT_LEGACY, True),
        (COMPRESSED_TENSORS, True),
        (edited(MODELOPT, "quant_algo", "FP8"), False),
        (edited(COMPRESSED_TENSORS, "format", "pack-quantized"), False),
        ({"quant_method": "fp8"}, False),
    ],
)
def test_is_nvfp4(config: dict[str, Any], expected: bool) -> None:
    assert is_nvfp4(config) is expected


@pytest.mark.parametrize("fp8_kv", [False, True], ids=["16-bit KV", "FP8 KV"])
@pytest.mark.parametrize("weight_only", [False, True], ids=["w4a4", "w4a16"])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_read(name: Any, weight_only: bool, fp8_kv: bool) -> None:
    format, ignore = FORMATS[name], ["lm_head", "model.layers.0.mlp.down_proj"]
    config = format.config(ignore, weight_only=weight_only, fp8_kv=fp8_kv)
    further = format.further_files(ignore, weight_only=weight_only, fp8_kv=fp8_kv)
    legacy = [content | {"quant_method": name} for content in further.values()]
    for written in (config, *legacy):
        assert is_nvfp4(written)
        found = parse(written)
        assert (found.format.name, found.weight_only) == (name, weight_only)
        assert (found.ignore, found.targets) == (tuple(ignore), None)
        assert (found.kv_cache_scheme is not None) == fp8_kv
