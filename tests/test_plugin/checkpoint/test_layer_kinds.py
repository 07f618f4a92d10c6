"""Kinds of layers, by vLLM's names, from a checkpoint's headers, compared with its config."""

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import WeightsMapper

from vllm_fp4_plugin.checkpoint.files import TensorHeader
from vllm_fp4_plugin.checkpoint.layer_kinds import LayerKinds
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.delegated.reference import ReferenceLinearMethod
from vllm_fp4_plugin.formats import UnsupportedCheckpoint, parse
from vllm_fp4_plugin.formats.kind import Kind
from vllm_fp4_plugin.ignore import MixedShards

N, K = 512, 256
FILE = Path("model-00001.safetensors")
PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
ATTENTION = "model.layers.0.self_attn"

Shapes = dict[str, tuple[str, tuple[int, ...]]]

NVFP4: Shapes = {
    "weight": ("U8", (N, K // 2)),
    "weight_scale": ("F8_E4M3", (N, K // 16)),
    "weight_scale_2": ("F32", ()),
    "input_scale": ("F32", ()),
}
NVFP4_A16 = {name: each for name, each in NVFP4.items() if name != "input_scale"}
E4M3: Shapes = {"weight": ("F8_E4M3", (N, K))}
FP8: Shapes = E4M3 | {"weight_scale": ("F32", ()), "input_scale": ("F32", ())}
CHANNEL: Shapes = E4M3 | {"weight_scale": ("F32", (N,))}
BLOCK: Shapes = E4M3 | {"weight_scale": ("F32", (4, 1, 2, 1))}
INVERSE: Shapes = E4M3 | {"weight_scale_inv": ("BF16", (4, 2))}
MXFP8: Shapes = E4M3 | {"weight_scale": ("U8", (N, K // 32))}
PLAIN: Shapes = {"weight": ("BF16", (N, K))}

CT_NVFP4: Shapes = {
    "weight_packed": ("U8", (N, K // 2)),
    "weight_scale": ("F8_E4M3", (N, K // 16)),
    "weight_global_scale": ("F32", (1,)),
    "input_global_scale": ("F32", (1,)),
}
CT_CHANNEL: Shapes = E4M3 | {"weight_scale": ("BF16", (N, 1))}
CT_BLOCK: Shapes = E4M3 | {"weight_scale": ("F32", (4, 2))}
CT_MXFP4: Shapes = {"weight_packed": ("U8", (N, K // 2)), "weight_scale": ("U8", (N, K // 32))}

SILENT = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
UNIFORM: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
FP4_ARGS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
FP8_ARGS = {"num_bits": 8, "type": "float", "strategy": "channel"}
GROUPS = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "format": "nvfp4-pack-quantized",
            "targets": ["Linear"],
            "weights": FP4_ARGS,
            "input_activations": FP4_ARGS,
        },
        "group_1": {
            "format": "float-quantized",
            "targets": [r"re:model\.language_model\..*self_attn.*"],
            "weights": FP8_ARGS,
            "input_activations": FP8_ARGS | {"strategy": "token", "dynamic": True},
        },
    },
}


def headers(modules: dict[str, Shapes]) -> dict[str, TensorHeader]:
    return {
        f"{module}.{tensor}": TensorHeader(dtype, shape, FILE)
        for module, tensors in modules.items()
        for tensor, (dtype, shape) in tensors.items()
    }


def read(config: dict[str, Any], modules: dict[str, Shapes]) -> LayerKinds:
    kinds = LayerKinds(parse(config))
    kinds.read(headers(modules))
    return kinds


def mixed(**layers: str) -> dict[str, Any]:
    return SILENT | {"quantized_layers": {name: {"quant_algo": a} for name, a in layers.items()}}


# --- by the tensors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "kind", "inputs"),
    [
        (NVFP4, Kind.NVFP4, "16-bit"),
        (NVFP4_A16, Kind.NVFP4_A16, "16-bit"),
        (FP8, Kind.FP8, "static"),
        (CHANNEL, Kind.FP8_CHANNEL, "dynamic"),
        (BLOCK, Kind.FP8_BLOCK, "dynamic"),
        (INVERSE, Kind.FP8_BLOCK, "dynamic"),
        (MXFP8, Kind.MXFP8, "dynamic"),
        (PLAIN, Kind.UNQUANTIZED, "16-bit"),
    ],
)
def test_modelopt_without_a_list(tensors: Shapes, kind: Kind, inputs: str) -> None:
    group, reason = read(SILENT, {"m.o_proj": tensors}).of("m.o_proj", PACKED)
    assert (group.kind, group.inputs, reason) == (kind, inputs, "")


@pytest.mark.parametrize(
    ("tensors", "kind"),
    [
        (CT_NVFP4, Kind.NVFP4),
        (CT_CHANNEL, Kind.FP8_CHANNEL),
        (CT_BLOCK, Kind.FP8_BLOCK),
        (INVERSE, Kind.FP8_BLOCK),
        (CT_MXFP4, Kind.MXFP4),
        (E4M3 | {"weight_scale": ("F32", (1,))}, Kind.FP8),
        (MXFP8, Kind.MXFP8),
    ],
)
def test_compressed_tensors(tensors: Shapes, kind: Kind) -> None:
    """The tensors decide against a config that claims NVFP4, and the report names the conflict."""
    group, reason = read(GROUPS, {"m.o_proj": tensors}).of("m.o_proj", PACKED)
    assert group.kind is kind
    assert ("whose config says NVFP4" in reason) == (kind is not Kind.NVFP4)


@pytest.mark.parametrize("algorithm", ["FP8_BLOCK_SCALES", "FP8_PB_WO", "NVFP4", None])
def test_experts_of_an_mtp_layer_with_deepseeks_scales(algorithm: str | None) -> None:
    """The tensors decide, whether the config lists the experts or not."""
    layer = "mtp.layers.0.mlp.experts"
    modules = {f"{layer}.{e}.{p}_proj": INVERSE for e in range(3) for p in ("gate", "up", "down")}
    listed = {} if algorithm is None else {layer: {"quant_algo": algorithm}}
    config = SILENT | {"quantized_layers": listed | {"m.o_proj": {"quant_algo": "NVFP4"}}}
    kinds = read(config, modules | {"m.o_proj": NVFP4})
    group, reason = kinds.of_experts(layer, 3, ["gate_proj", "up_proj", "down_proj"])
    assert (group.kind, group.scale) == (Kind.FP8_BLOCK, "weight_scale_inv")
    says = {"NVFP4": "NVFP4", None: "16-bit"}.get(algorithm, "")
    assert reason == (f"FP8 block in the checkpoint, whose config says {says}" if says else "")


def test_scales_of_two_names_in_one_layer_are_refused() -> None:
    """A method reads one scale name: the other shards' scales would be missing or ignored."""
    each = {"q_proj": BLOCK, "k_proj": INVERSE, "v_proj": INVERSE}
    modules = {f"{ATTENTION}.{name}": tensors for name, tensors in each.items()}
    with pytest.raises(MixedShards, match=r"q_proj is FP8 block, k_proj is FP8 block \(weight_sca"):
        read(SILENT, modules).of(f"{ATTENTION}.qkv_proj", PACKED)
    experts = {"m.experts.0.up_proj": INVERSE, "m.experts.1.up_proj": BLOCK}
    with pytest.raises(UnsupportedCheckpoint, match=r"but .* is FP8 block \(weight_scale_inv\)"):
        read(SILENT, experts)


def test_shapes_that_several_kinds_have_are_what_the_config_says() -> None:
    small: Shapes = {"weight": ("F8_E4M3", (1, K)), "weight_scale": ("F32", (1,))}
    for algorithm, kind in (("FP8_PER_CHANNEL_PER_TOKEN", Kind.FP8_CHANNEL), ("FP8", Kind.FP8)):
        config = SILENT | {
            "quantized_layers": {"m.x": {"quant_algo": algorithm}, "m.y": {"quant_algo": "NVFP4"}}
        }
        tensors = small | ({"input_scale": ("F32", ())} if kind is Kind.FP8 else {})
        assert read(config, {"m.x": tensors}).of("m.x", PACKED).group.kind is kind


# --- config and tensors disagree --------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (PLAIN, "16-bit in the checkpoint, whose config says NVFP4"),
        (FP8, "FP8 per-tensor in the checkpoint, whose config says NVFP4"),
        (NVFP4, ""),
    ],
)
def test_the_tensors_count(tensors: Shapes, reason: str) -> None:
    assert read(UNIFORM, {"m.o_proj": tensors}).of("m.o_proj", PACKED).reason == reason


def test_an_ignored_layer_that_is_quantised_is_served_as_it_is() -> None:
    config = UNIFORM | {"ignore": ["m.o_proj"]}
    group, reason = read(config, {"m.o_proj": NVFP4}).of("m.o_proj", PACKED)
    assert group.kind is Kind.NVFP4
    assert reason == "NVFP4 in the checkpoint, whose config says 16-bit"


def test_weight_only_layers_may_keep_scales_of_their_inputs() -> None:
    config = UNIFORM | {"quant_algo": "W4A16_NVFP4"}
    assert read(config, {"m.o_proj": NVFP4}).of("m.o_proj", PACKED) == (
        parse(config).declared[0],
        "",
    )


@pytest.mark.parametrize(
    "tower", ["vision_tower", "vision_model", "visual", "vit_large_projector", "mm_projector"]
)
def test_a_vision_tower_that_an_export_left_out(tower: str) -> None:
    name = f"model.{tower}.blocks.0.fc1"
    group, reason = read(UNIFORM, {name: PLAIN, "m.o_proj": NVFP4}).of(name, PACKED)
    assert group.kind is Kind.UNQUANTIZED
    assert reason == "left out of the checkpoint's list"


def test_a_vision_tower_is_not_left_out_unseen() -> None:
    """Towers without tensors, or with quantised tensors, have the kind that the config says."""
    name = "model.vision_tower.blocks.0.fc1"
    assert LayerKinds(parse(UNIFORM)).of(name, PACKED).group.kind is Kind.NVFP4
    assert read(UNIFORM, {name: NVFP4}).of(name, PACKED).group.kind is Kind.NVFP4


# --- contradictions ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "tensors", "message"),
    [
        (
            "FP8",
            CHANNEL,
            r"weight_scale: its shape in .* is \(512,\), which is FP8 per-channel",
        ),
        ("FP8_PB_WO", FP8, r"is \(\), which is FP8 per-tensor, must be FP8 block as quantized_lay"),
        ("FP8", E4M3 | {"weight_scale": ("F32", ())}, r"m\.x\.input_scale: is missing beside"),
        ("FP8_PB_WO", BLOCK | {"input_scale": ("F32", ())}, "input_scale: is in .* must not be"),
        ("NVFP4", NVFP4_A16, r"m\.x\.input_scale: is missing .*says that the layer is NVFP4"),
        ("FP8", E4M3, r"m\.x: holds weight F8_E4M3 \[512, 256\] in model-00001\.safetensors, must"),
        (
            "FP8",
            {"weight": ("I8", (N, K)), "weight_scale": ("F32", (N,))},
            r"m\.x: holds weight I8",
        ),
        ("NVFP4", PLAIN | {"weight_scale": ("F32", ())}, r"m\.x: holds weight BF16 .* must hold"),
        ("NVFP4", {"weight": ("U8", (N, K))}, r"m\.x: holds weight U8 \[512, 256\]"),
        ("FP8", E4M3 | {"weight_scale": ("F32", (N, 2))}, r"weight_scale F32 \[512, 2\]"),
        ("FP8_PB_WO", E4M3 | {"weight_scale_inv": ("F32", (4, 3))}, r"_scale_inv F32 \[4, 3\]"),
        ("FP8_PB_WO", E4M3 | {"weight_scale_inv": ("U8", (4, 2))}, r"_scale_inv U8 \[4, 2\]"),
        ("FP8_PB_WO", BLOCK | INVERSE, r"holds .*weight_scale_inv.* must hold .*, not both"),
        ("NVFP4", PLAIN | {"weight_scale_inv": ("F32", (4, 2))}, r"m\.x: holds weight BF16"),
        ("FP8", INVERSE, r"m\.x\.weight_scale_inv: its shape in .*, which is FP8 block, must be"),
        ("MXFP8", E4M3 | {"weight_scale": ("F8_E8M0", (N, K // 32))}, "weight_scale F8_E8M0"),
        ("MXFP8", E4M3 | {"weight_scale": ("U8", (N, K // 16))}, r"weight_scale U8 \[512, 16\]"),
    ],
)
def test_contradictions_are_refused(algorithm: str, tensors: Shapes, message: str) -> None:
    layers = {"m.x": {"quant_algo": algorithm}, "m.y": {"quant_algo": "NVFP4"}}
    with pytest.raises(UnsupportedCheckpoint, match=message) as error:
        read(SILENT | {"quantized_layers": layers}, {"m.x": tensors})
    assert FILE.name in str(error.value)


def test_a_part_of_a_table_that_has_its_scale_elsewhere_is_refused() -> None:
    """Qwen3.8-Flash-Next's n-gram table has one scale for 128 parts, which no layer supports."""
    message = r"shard_12: is a part of a table of embeddings that is F8_E4M3 in .*, must be in 16"
    with pytest.raises(UnsupportedCheckpoint, match=message):
        read(SILENT, {"m.ngram_embedding.shard_12": E4M3, "m.o_proj": NVFP4})
    plain = read(SILENT, {"m.ngram_embedding.shard_12": PLAIN, "m.o_proj": NVFP4})
    assert plain.tensors_kind("m.ngram_embedding.shard_12") is Kind.UNQUANTIZED


def test_shards_of_several_kinds_are_refused() -> None:
    modules = {f"{ATTENTION}.q_proj": FP8, f"{ATTENTION}.k_proj": NVFP4}
    with pytest.raises(MixedShards, match=r"qkv_proj: q_proj is FP8 per-tensor, k_proj is NVFP4; "):
        read(SILENT, modules).of(f"{ATTENTION}.qkv_proj", PACKED)


# --- without tensors --------------------------------------------------------------------------


def test_the_config_alone() -> None:
    layers = {f"{ATTENTION}.{p}_proj": {"quant_algo": "FP8"} for p in "qkv"}
    layers["model.layers.1.mlp.up_proj"] = {"quant_algo": "NVFP4"}
    kinds = LayerKinds(parse(SILENT | {"quantized_layers": layers, "ignore": ["lm_head"]}))
    assert kinds.of(f"{ATTENTION}.qkv_proj", PACKED).group.kind is Kind.FP8
    assert kinds.of(f"{ATTENTION}.o_proj", PACKED).reason == "no target of the checkpoint"
    assert kinds.of("lm_head", PACKED).reason == "ignored by 'lm_head'"
    with pytest.raises(MixedShards, match="gate_proj is 16-bit, up_proj is NVFP4"):
        kinds.of("model.layers.1.mlp.gate_up_proj", PACKED)


def test_a_config_that_does_not_say_needs_tensors() -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"m\.x: the config says MIXED_PRECISION, but"):
        LayerKinds(parse(SILENT)).of("m.x", PACKED)


def test_a_group_that_names_a_layer_comes_before_one_of_every_linear() -> None:
    kinds = LayerKinds(parse(GROUPS))
    name = "model.language_model.layers.0.self_attn.o_proj"
    assert kinds.of(name, PACKED).group.kind is Kind.FP8_CHANNEL
    assert kinds.of("model.layers.0.mlp.down_proj", PACKED).group.kind is Kind.NVFP4


def test_a_fused_layer_by_its_own_name() -> None:
    config = SILENT | {"quantized_layers": {"m.qkv_proj": {"quant_algo": "NVFP4"}}}
    assert LayerKinds(parse(config)).of("m.qkv_proj", PACKED).group.kind is Kind.NVFP4
    assert read(config, {"m.qkv_proj": NVFP4}).of("m.qkv_proj", PACKED).group.kind is Kind.NVFP4


# --- vLLM's names -----------------------------------------------------------------------------

# Mapper of Qwen3-VL and similar models, whose checkpoints name the language model otherwise.
MAPPER = WeightsMapper(
    orig_to_new_prefix={
        "model.visual.": "visual.",
        "lm_head.": "language_model.lm_head.",
        "model.language_model.": "language_model.model.",
    }
)
INNER = WeightsMapper(orig_to_new_prefix={"language_model.": "inner."})


def test_names_pass_through_vllms_mapper() -> None:
    """Regexes are mapped too: they were written for the checkpoint's own names."""
    before, after = "model.language_model.layers.0", "language_model.model.layers.0"
    modules = {
        f"{before}.self_attn.o_proj": CT_CHANNEL,
        f"{before}.mlp.down_proj": CT_NVFP4,
        "model.visual.blocks.0.fc1": PLAIN,
        "lm_head": PLAIN,
    }
    kinds = read(GROUPS, modules)
    kinds.rename(MAPPER.get_rename_mapper())
    found = {
        name: kinds.of(name, PACKED)
        for name in (
            f"{after}.self_attn.o_proj", f"{after}.mlp.down_proj", "visual.blocks.0.fc1",
            "language_model.lm_head",
        )
    }  # fmt: skip
    assert [(layer.group.kind, layer.reason) for layer in found.values()] == [
        (Kind.FP8_CHANNEL, ""),
        (Kind.NVFP4, ""),
        (Kind.UNQUANTIZED, "left out of the checkpoint's list"),
        (Kind.UNQUANTIZED, "ignored by 'language_model.lm_head'"),
    ]


def test_a_second_mapper_does_not_lose_the_names_of_the_first() -> None:
    kinds = read(SILENT, {"model.language_model.a.o_proj": FP8})
    kinds.rename(MAPPER.get_rename_mapper())
    kinds.rename(INNER)
    assert kinds.of("language_model.model.a.o_proj", PACKED).group.kind is Kind.FP8


def test_a_mapper_with_a_regex() -> None:
    mapper = WeightsMapper(orig_to_new_regex={re.compile(r"^backbone\.(\d+)\."): r"model.\1."})
    kinds = read(SILENT, {"backbone.0.o_proj": FP8})
    kinds.rename(mapper)
    assert kinds.of("model.0.o_proj", PACKED).group.kind is Kind.FP8


def test_targets_pass_through_vllms_mapper() -> None:
    layers = {"model.language_model.a.o_proj": {"quant_algo": "NVFP4"}}
    config = SILENT | {"quantized_layers": layers, "ignore": ["model.visual*"]}
    kinds = LayerKinds(parse(config))
    kinds.rename(MAPPER.get_rename_mapper())
    assert kinds.of("language_model.model.a.o_proj", PACKED).group.kind is Kind.NVFP4
    assert kinds.of("visual.blocks.0.fc1", PACKED).reason == "ignored by 'visual'"


def test_what_workers_are_sent_is_small() -> None:
    """A group is stored once for all of its layers, and all experts of a layer count as one."""
    modules = {f"model.layers.{i}.mlp.down_proj": NVFP4 for i in range(200)}
    modules |= {f"model.layers.0.mlp.experts.{i}.up_proj": NVFP4 for i in range(500)}
    config = Nvfp4TcConfig(parse(UNIFORM))
    assert config._kinds is not None
    config._kinds.read(headers(modules))
    sent = pickle.dumps(config)
    assert len(sent) < 30_000
    kinds = pickle.loads(sent)._kinds
    assert kinds.of("model.layers.7.mlp.down_proj", PACKED).group.kind is Kind.NVFP4
    assert kinds.of("model.layers.0.mlp.experts", PACKED).group.kind is Kind.NVFP4


# --- methods of vLLM's quantization interface -------------------------------------------------


def test_vllm_is_told_of_blocks() -> None:
    for tensors, expected in ((BLOCK, True), (FP8, False)):
        config = Nvfp4TcConfig(parse(SILENT))
        assert config._kinds is not None
        config._kinds.read(headers({"m.x": tensors}))
        assert config.has_blocked_weights() is expected
    assert not Nvfp4TcConfig().has_blocked_weights()


@pytest.mark.usefixtures("vllm_config")
def test_a_quantised_embedding_is_refused() -> None:
    config = Nvfp4TcConfig(parse(SILENT))
    assert config._kinds is not None
    config._kinds.read(headers({"model.embed_tokens": NVFP4}))
    message = r"model\.embed_tokens: is NVFP4, must be in 16 bits, .*; quantise the model"
    with pytest.raises(UnsupportedCheckpoint, match=message):
        config.get_quant_method(torch.nn.Identity(), "model.embed_tokens")


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("name", ["lm_head", "language_model.lm_head"])
def test_heads(name: str) -> None:
    for tensors, weight_only in ((NVFP4, False), (NVFP4_A16, True)):
        config = Nvfp4TcConfig(parse(SILENT))
        assert config._kinds is not None
        config._kinds.read(headers({name: tensors}))
        layer = ParallelLMHead(N, K, quant_config=config, prefix="lm_head")
        assert (layer.quant_method.activation == "16-bit") == weight_only
    config._kinds.read(headers({name: PLAIN}))
    assert not hasattr(ParallelLMHead(N, K, quant_config=config, prefix="lm_head"), "weight_scale")
    config._kinds.read(headers({name: FP8}))
    layer = ParallelLMHead(N, K, quant_config=config, prefix="lm_head")
    assert isinstance(layer.quant_method, ReferenceLinearMethod)
    config._kinds.read(headers({name: BLOCK}))
    with pytest.raises(UnsupportedCheckpoint, match=r"lm_head: is FP8 .*padded vocabulary does"):
        ParallelLMHead(N, K, quant_config=config, prefix="lm_head")
