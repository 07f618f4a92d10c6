"""Quantization configs as producers write them, and configs that are refused."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.formats import FORMATS, UnsupportedCheckpoint, is_nvfp4, parse, parse_beside
from vllm_fp4_plugin.formats.kind import Kind
from vllm_fp4_plugin.formats.modelopt import LEGACY_FILE
from vllm_fp4_plugin.ignore import matches

FP4 = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
FP8_KV = {"num_bits": 8, "type": "float", "dynamic": False}
NVFP4_KV = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}

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
    """Copy of ``config`` with the field at dotted ``path`` set, or removed by ``...``."""
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
    assert checkpoint.ignore == ("lm_head", "model.layers.0")
    assert checkpoint.targets is None
    assert checkpoint.kv_cache_scheme == FP8_KV
    assert not checkpoint.nvfp4_cache
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


FP8_DOWN = {"up_proj": {"quant_algo": "NVFP4"}, "down_proj": {"quant_algo": "FP8"}}
MX = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}
NVFP4_CACHES = {
    "modelopt": edited(MODELOPT, "kv_cache_scheme", NVFP4_KV),
    "modelopt, no group size": edited(
        MODELOPT, "kv_cache_scheme", {"num_bits": 4, "type": "float", "dynamic": False}
    ),
    "modelopt, legacy": edited(MODELOPT_LEGACY, "quantization.kv_cache_quant_algo", "NVFP4"),
    "modelopt, mixed": MODELOPT
    | {"quant_algo": "MIXED_PRECISION", "kv_cache_scheme": NVFP4_KV, "quantized_layers": FP8_DOWN},
    "modelopt, silent": {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": "nvfp4",
    },
    "compressed-tensors": edited(COMPRESSED_TENSORS, "kv_cache_scheme", NVFP4_KV),
    "compressed-tensors, mixed": edited(
        edited(COMPRESSED_TENSORS, "kv_cache_scheme", NVFP4_KV),
        "config_groups.group_1",
        {"targets": ["re:.*down_proj"], "weights": MX, "format": "mxfp8-quantized"},
    ),
}


@pytest.mark.parametrize("case", NVFP4_CACHES)
def test_a_declared_nvfp4_cache(case: str) -> None:
    """A declared NVFP4 cache does not affect the weights, and is not an FP8 cache."""
    checkpoint = parse(NVFP4_CACHES[case])
    assert checkpoint.nvfp4_cache
    assert checkpoint.kv_cache_scheme is None


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
            "quant_algo: is 'FP8', must be NVFP4, W4A16_NVFP4 or MIXED_PRECISION",
        ),
        (edited(MODELOPT, "quant_algo", "NVFP5"), "quant_algo: is 'NVFP5'"),
        (edited(MODELOPT, "quant_algo", ...), "quant_algo: is None"),
        (MODELOPT | {"quantized_layers": {"a": {}}}, r"quantized_layers\.a\.quant_algo: is None"),
        (
            edited(MODELOPT_LEGACY, "quantization.group_size", 32),
            "group_size: is 32, must be 16",
        ),
        (
            edited(MODELOPT, "config_groups.group_0.weights.group_size", 128),
            r"weights\.group_size: is 128, must be 16",
        ),
        (
            edited(MODELOPT_LEGACY, "quantization.kv_cache_quant_algo", "INT8"),
            "kv_cache_quant_algo: is 'INT8', must be FP8, NVFP4 or absent",
        ),
        (
            edited(MODELOPT, "kv_cache_scheme", {"num_bits": 4, "type": "int"}),
            "kv_cache_scheme: is .* must be 8-bit float",
        ),
        (
            edited(COMPRESSED_TENSORS, "kv_cache_scheme", NVFP4_KV | {"group_size": 32}),
            "kv_cache_scheme: is .* must be 8-bit float .*, or NVFP4",
        ),
        (
            edited(
                edited(COMPRESSED_TENSORS, "format", "float-quantized"),
                "config_groups.group_0.format",
                ...,
            ),
            "format: is float-quantized, must be nvfp4-pack-quantized for the NVFP4 weights of",
        ),
        (
            edited(COMPRESSED_TENSORS, "config_groups.group_0.format", "pack-quantized"),
            r"group_0\.format: is pack-quantized, must be nvfp4-pack-quantized",
        ),
        (
            edited(COMPRESSED_TENSORS, "config_groups.group_0.weights.num_bits", 8),
            r"weights\.strategy: is 'tensor_group' with groups of 16 for 8-bit floats",
        ),
        (
            edited(COMPRESSED_TENSORS, "config_groups.group_0.weights.type", "int"),
            r"weights: is 4-bit int, must be 4-bit float \(NVFP4, MXFP4\) or 8-bit float",
        ),
        (
            edited(COMPRESSED_TENSORS, "config_groups.group_0.weights.group_size", 32),
            "group_size: is 32, must be 16",
        ),
        (
            edited(COMPRESSED_TENSORS, "config_groups.group_0.input_activations.num_bits", 8),
            "input_activations: is 8-bit",
        ),
        (COMPRESSED_TENSORS | {"transform_config": {"x": 1}}, "transform_config: is set"),
        (
            edited(COMPRESSED_TENSORS, "config_groups.group_0.targets", []),
            "config_groups.group_0: names no targets",
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
        (edited(COMPRESSED_TENSORS, "config_groups.group_0.format", "pack-quantized"), True),
        (
            COMPRESSED_TENSORS | {"format": "pack-quantized", "config_groups": {}},
            False,
        ),
        ({"quant_method": "fp8"}, False),
        (edited(MODELOPT, "quant_algo", 4), False),
        (MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": 3}}, False),
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
    # vLLM adds an empty quant_method to a file without one.
    legacy = [content | {"quant_method": ""} for content in further.values()]
    for written in (config, *further.values(), *legacy):
        assert is_nvfp4(written)
        found = parse(written)
        assert (found.format.name, found.weight_only) == (name, weight_only)
        assert (found.ignore, found.targets) == (tuple(ignore), None)
        assert (found.kv_cache_scheme is not None) == fp8_kv


# --- spellings --------------------------------------------------------------------------------

NAMES = ["lm_head", "model.layers.1*", "*.gate", "model.visual.*"]
READ = ("lm_head", "model.layers.1", "*.gate", "model.visual.*")


@pytest.mark.parametrize("nesting", ["", "quantization", "quantization_config"])
@pytest.mark.parametrize("spelling", ["ignore", "exclude_modules"])
def test_the_list_of_16_bit_modules_in_every_spelling(spelling: str, nesting: str) -> None:
    fields = {"quant_algo": "NVFP4", "group_size": 16, spelling: NAMES}
    config = {"quant_method": "modelopt"} | ({nesting: fields} if nesting else fields)
    assert parse(config).ignore == READ


def test_both_spellings_count() -> None:
    config = MODELOPT | {"exclude_modules": ["lm_head", "model.visual*"]}
    assert parse(config).ignore == ("lm_head", "model.layers.0", "model.visual")


def test_a_trailing_star_means_a_module_and_what_is_below_it() -> None:
    ignore = parse(edited(MODELOPT, "ignore", ["model.layers.1*"])).ignore
    assert matches("model.layers.1", ignore)
    assert matches("model.layers.1.mlp.down_proj", ignore)
    for layer in range(10, 20):
        assert not matches(f"model.layers.{layer}.mlp.down_proj", ignore)


def test_a_star_of_compressed_tensors_is_left_as_it_is() -> None:
    assert parse(edited(COMPRESSED_TENSORS, "ignore", ["model.layers.1*"])).ignore == (
        "model.layers.1*",
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (edited(MODELOPT, "ignore", "lm_head"), "ignore: is 'lm_head', must be a list of module"),
        (edited(MODELOPT, "ignore", [3]), r"ignore\[0\]: is 3, must be the name of a module"),
        (edited(MODELOPT, "ignore", {"lm_head": 1}), "ignore: is {'lm_head': 1}, must be a list"),
        (
            edited(MODELOPT_LEGACY, "quantization.exclude_modules", "lm_head"),
            "exclude_modules: is 'lm_head', must be a list",
        ),
        (edited(MODELOPT, "quant_algo", 4), "quant_algo: is 4, must be a string"),
        (MODELOPT_LEGACY | {"quantization": "NVFP4"}, "quantization: is 'NVFP4', must be an obj"),
        (edited(MODELOPT, "config_groups", []), r"config_groups: is \[\], must be an object"),
        (edited(MODELOPT, "config_groups", [{}]), r"config_groups: is \[\{\}\], must be an object"),
        (
            MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": ["a"]},
            r"quantized_layers: is \['a'\], must be an object",
        ),
        (
            MODELOPT | {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": "FP8"}},
            r"quantized_layers\.a: is 'FP8', must be an object",
        ),
        (edited(COMPRESSED_TENSORS, "ignore", "lm_head"), "ignore: is 'lm_head', must be a list"),
        (
            edited(COMPRESSED_TENSORS, "config_groups.group_0.targets", "Linear"),
            r"group_0\.targets: is 'Linear', must be a list",
        ),
        (
            edited(COMPRESSED_TENSORS, "config_groups.group_0.targets", [None]),
            r"group_0\.targets\[0\]: is None, must be the name",
        ),
        (
            edited(COMPRESSED_TENSORS, "config_groups.group_0.weights", ["fp4"]),
            r"weights: is \['fp4'\], must be an object",
        ),
        (
            edited(COMPRESSED_TENSORS, "config_groups.group_0.input_activations", "fp4"),
            "input_activations: is 'fp4', must be an object",
        ),
        (edited(COMPRESSED_TENSORS, "config_groups", ["Linear"]), "config_groups: is .*an object"),
    ],
)
def test_fields_of_another_type_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=message):
        parse(config)


# --- mixed precision --------------------------------------------------------------------------

LAYERS = {
    "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
    "model.layers.0.mlp.down_proj": {"quant_algo": "w4a16_nvfp4"},
    "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
    "model.layers.0.self_attn.k_proj": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "model.layers.0.self_attn.v_proj": {"quant_algo": "fp8_pb_wo"},
    "model.layers.0.self_attn.o_proj": {"quant_algo": "MXFP8"},
}
MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "exclude_modules": ["lm_head"],
    "quantized_layers": LAYERS,
}


@pytest.mark.parametrize("nested", [False, True])
def test_modelopt_mixed(nested: bool) -> None:
    config: dict[str, Any] = MIXED
    if nested:
        config = {"producer": {"name": "modelopt"}, "quantization": MIXED}
    checkpoint = parse(config)
    assert is_nvfp4(config)
    assert checkpoint.ignore == ("lm_head",)
    found = [(group.kind, group.targets) for group in checkpoint.declared]
    kinds = (
        Kind.NVFP4, Kind.NVFP4_A16, Kind.FP8, Kind.FP8_CHANNEL, Kind.FP8_BLOCK, Kind.MXFP8
    )  # fmt: skip
    assert found == [(kind, (name,)) for kind, name in zip(kinds, LAYERS, strict=True)]


def test_modelopt_mixed_by_config_groups() -> None:
    fp8 = {"num_bits": 8, "type": "float", "dynamic": False}
    groups = {
        "group_0": {"weights": fp8, "input_activations": fp8, "targets": ["a.q_proj"]},
        "group_1": {"weights": FP4, "input_activations": None, "targets": ["a.up_proj"]},
    }
    checkpoint = parse(edited(MIXED, "quantized_layers", ...) | {"config_groups": groups})
    found = [(group.kind, group.targets) for group in checkpoint.declared]
    assert found == [(Kind.FP8, ("a.q_proj",)), (Kind.NVFP4_A16, ("a.up_proj",))]


def test_modelopt_mixed_that_names_no_layer() -> None:
    checkpoint = parse(edited(MIXED, "quantized_layers", ...))
    assert checkpoint.is_silent
    assert checkpoint.declared == ()


FP8_ARGS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
FP8_GROUP = {
    "format": "float-quantized",
    "targets": ["re:.*self_attn.*"],
    "weights": FP8_ARGS | {"strategy": "channel"},
    "input_activations": FP8_ARGS | {"strategy": "token", "dynamic": True},
}
MIXED_GROUPS = edited(COMPRESSED_TENSORS, "format", "mixed-precision")
MIXED_GROUPS["config_groups"]["group_1"] = FP8_GROUP


@pytest.mark.parametrize(
    ("weights", "kind"),
    [
        ({"strategy": "tensor"}, Kind.FP8),
        ({"strategy": "channel"}, Kind.FP8_CHANNEL),
        ({"strategy": "block", "block_structure": [128, 128]}, Kind.FP8_BLOCK),
    ],
)
def test_compressed_tensors_mixed(weights: dict[str, Any], kind: Kind) -> None:
    config = edited(MIXED_GROUPS, "config_groups.group_1.weights", FP8_ARGS | weights)
    assert is_nvfp4(config)
    first, second = parse(config).declared
    assert (first.kind, first.targets) == (Kind.NVFP4, None)
    assert (second.kind, second.targets) == (kind, ("re:.*self_attn.*",))


def test_weight_only_and_w4a4_side_by_side() -> None:
    weight_only = {"targets": ["re:.*mlp"], "weights": CT_ARGS}
    checkpoint = parse(edited(COMPRESSED_TENSORS, "config_groups.group_1", weight_only))
    assert [group.kind for group in checkpoint.declared] == [Kind.NVFP4, Kind.NVFP4_A16]


def test_groups_of_attention_are_a_cache() -> None:
    group = {"targets": ["LlamaAttention"], "weights": None}
    checkpoint = parse(edited(COMPRESSED_TENSORS, "config_groups.group_1", group))
    assert checkpoint.groups == ()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            edited(MIXED, "quantized_layers", {"a.q_proj": {"quant_algo": "W4A8_AWQ"}}),
            r"quantized_layers\.a\.q_proj\.quant_algo: is 'W4A8_AWQ', must be NVFP4, ",
        ),
        (
            edited(MIXED, "quantized_layers", {"a.q_proj": {"quant_algo": "FP8"}}),
            "quantized_layers: holds FP8 per-tensor alone, must hold NVFP4 layers",
        ),
        (
            edited(MIXED, "quantized_layers", {"a": {"quant_algo": "NVFP4", "group_size": 32}}),
            r"quantized_layers\.a\.group_size: is 32, must be 16",
        ),
        (
            edited(
                MODELOPT,
                "config_groups.group_1",
                {"weights": FP8_ARGS, "targets": ["re:.*mlp.*"]},
            ),
            "config_groups: hold FP8 per-tensor, NVFP4, must hold NVFP4 as quant_algo NVFP4 says",
        ),
        (
            edited(MIXED_GROUPS, "config_groups.group_1.weights.type", "int"),
            r"group_1\.weights: is 8-bit int, must be 4-bit float",
        ),
        (
            edited(COMPRESSED_TENSORS, "config_groups", {}),
            "config_groups: describes no layers, must hold NVFP4 layers for nvfp4-tc",
        ),
        (
            edited(
                MIXED_GROUPS,
                "config_groups.group_1.weights",
                FP8_ARGS | {"strategy": "block", "block_structure": [64, 64]},
            ),
            r"block_structure: is \[64, 64\], must be \[128, 128\]",
        ),
        (
            edited(MIXED_GROUPS, "config_groups.group_1.input_activations.num_bits", 16),
            r"group_1\.input_activations: is 16-bit float, must be 8-bit float or absent beside",
        ),
        (
            edited(MIXED_GROUPS, "config_groups.group_1.format", "nvfp4-pack-quantized"),
            r"group_1\.format: is nvfp4-pack-quantized, must be float-quantized or naive-quantized",
        ),
    ],
)
def test_mixed_that_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=message):
        parse(config)


def test_the_list_that_is_only_in_the_file_beside(tmp_path: Path) -> None:
    assert parse_beside(tmp_path) is None
    (tmp_path / LEGACY_FILE).write_text(json.dumps({"quantization": MIXED}))
    (tmp_path / "config.json").write_text("{}")
    config = Nvfp4TcConfig.from_config(edited(MIXED, "quantized_layers", ...))
    config.maybe_update_config(str(tmp_path))
    assert config._kinds is not None
    name = "model.layers.0.mlp.down_proj"
    assert config._kinds.of(name, {}).group.kind is Kind.NVFP4_A16
    (tmp_path / LEGACY_FILE).write_text("{")
    with pytest.raises(UnsupportedCheckpoint, match=rf"{LEGACY_FILE}: is no JSON"):
        parse_beside(tmp_path)
