"""Models of vLLM that check the quantization config's class: served right, or refused by name."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    UnquantizedLinearMethod,
)

from nvfp4_kernels.formats.nvfp4 import quantize_weight
from tests.registry import configs
from tests.test_plugin.checkpoint.test_layer_kinds import NVFP4, PLAIN, headers
from tests.test_plugin.linear.test_linear_layers import checkpoint
from tests.vllm_classes import ROOT
from vllm_fp4_plugin import model_demands
from vllm_fp4_plugin.attention import choice
from vllm_fp4_plugin.checkpoint.layer_kinds import LayerKinds
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.formats.kind import Kind
from vllm_fp4_plugin.ignore import MixedShards

# --- places in vLLM's models, all read by a person ----------------------------------------------

ASKED = "asks ours for methods: the tensors decide"
OTHERS = "is about other methods' settings alone"
REFUSED = "refuses a class that it does not know: refused before, by name"
SNIFFS = {
    "models/flint/model": (2, "vLLM's stock layers, which ask ours"),
    "models/hy_v4/nvidia/mtp": (1, OTHERS),
    "models/kimi_k3/nvidia/kda": (1, "pads rows to 16, not 128: vLLM's method pads FP8 blocks"),
    "models/kimi_k3/nvidia/model": (1, ASKED),
    "models/muse_spark/nvidia/model": (4, REFUSED),
    "models/muse_spark/nvidia/muse_moe_runner": (2, REFUSED),
    "models/qwen4_exp/common/ngram_embedding": (7, "refused where its codes are not values"),
    "models/qwen4_exp/nvidia/ngram_embedding": (1, "for a line of the log"),
    "models/qwen4_exp/nvidia/model": (1, ASKED),
    "models/step5/nvidia/mega_moe": (2, REFUSED),
    "bailing_moe_v3": (3, OTHERS),
    "bailing_moe_v3_vl": (2, ASKED),
    "cohere2_vision": (1, OTHERS),
    "config": (1, OTHERS),
    "diffusion_gemma": (1, ASKED),
    "embedding_gemma2": (1, ASKED),
    "exaone_moe": (1, OTHERS),
    "gemma4_mm": (1, ASKED),
    "glm4_1v": (1, ASKED),
    "internvl": (1, OTHERS),
    "kimi_k25": (1, ASKED),
    "llama4_eagle": (1, OTHERS),
    "nemotron_vl": (1, OTHERS),
    "openpangu_vl": (1, OTHERS),
    "qianfan_ocr": (2, OTHERS),
    "qwen3_5_mtp": (2, ASKED),
    "qwen3_next_mtp": (1, ASKED),
    "siglip": (1, OTHERS),
    "skyworkr1v": (1, OTHERS),
    "transformers/base": (1, OTHERS),
    "utils": (1, "a draft's names: see draft_names"),
}
_LOOK = re.compile(
    r"isinstance\(\s*(?:\w+\.)*\w*quant_config,|quant_config\.get_name\(\)"
    r"|type\((?:\w+\.)*\w*quant_config\)"
)


def sniffs() -> Iterator[tuple[str, int]]:
    """Modules of vLLM's models for NVIDIA GPUs, and the number of checks of a config's class."""
    for folder in ("models", "model_executor/models"):
        for file in sorted((ROOT / folder).glob("**/*.py")):
            count = len(_LOOK.findall(file.read_text()))
            if count and "amd" not in file.parts:
                name = file.relative_to(ROOT).with_suffix("").as_posix()
                yield name.removeprefix("model_executor/models/"), count


def test_every_place_that_looks_at_the_configs_class_was_read() -> None:
    """Every new check must be read and listed above."""
    found = dict(sniffs())
    assert found
    assert found.keys() <= SNIFFS.keys()
    assert {name: count for name, count in found.items() if count != SNIFFS[name][0]} == {}


# --- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, "checkpoint"], ids=["16-bit", "NVFP4"])
@pytest.mark.parametrize(
    ("architecture", "remedy"),
    [
        ("MuseSparkForConditionalGeneration", "serve an NVFP4 checkpoint with --quantization"),
        ("MuseSparkDSparkModel", "give a draft in 16 bits, and no quantization"),
    ],
)
def test_models_that_take_no_config_of_ours(
    architecture: str, remedy: str, given: str | None, tmp_path: Path
) -> None:
    config = Nvfp4TcConfig(None if given is None else checkpoint())
    with pytest.raises(UnsupportedCheckpoint, match=rf"^{architecture}: .*; {remedy}") as caught:
        config.maybe_update_config(str(tmp_path), SimpleNamespace(architectures=[architecture]))
    assert "\n" not in str(caught.value)


def test_refusals_are_of_architectures_that_vllm_has() -> None:
    refused = model_demands._REFUSALS.keys()
    unknown = refused - set(configs.architectures())
    assert unknown in (set(), refused)  # vLLM 0.32 has none of them


@pytest.mark.parametrize("is_moe", [True, False])
@pytest.mark.parametrize("backend", ["deep_gemm_mega_moe", "auto"])
def test_mega_kernels_of_experts(backend: str, is_moe: bool) -> None:
    config = SimpleNamespace(
        kernel_config=SimpleNamespace(moe_backend=backend),
        model_config=SimpleNamespace(is_moe=is_moe),
    )
    if backend == "auto" or not is_moe:
        model_demands.check_experts(config)
        return
    with pytest.raises(UnsupportedCheckpoint, match=r"^--moe-backend: .*; serve without"):
        model_demands.check_experts(config)


def test_mega_kernels_are_refused_before_the_first_layer(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_config.kernel_config, "moe_backend", "deep_gemm_mega_moe")
    monkeypatch.setattr(type(vllm_config.model_config), "is_moe", True, raising=False)
    with pytest.raises(UnsupportedCheckpoint, match="--moe-backend"):
        ColumnParallelLinear(128, 128, bias=False, quant_config=Nvfp4TcConfig(), prefix="up")


def test_flint_keeps_flashinfers_attention(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any("FlashInfer" in reason for reason in choice.unsupported_reasons(vllm_config))
    monkeypatch.setattr(vllm_config.model_config.hf_text_config, "model_type", "flint")
    assert any(
        "of flint write FlashInfer's" in each for each in choice.unsupported_reasons(vllm_config)
    )


# --- Step 5 -------------------------------------------------------------------------------------

ATTENTION = "layers.0.self_attn"
PACKED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "qkv_indexer_proj": ["q_proj", "k_proj", "v_proj", "sparse_indexer_q", "g_proj"],
}


class Step5FusedQKVIndexerLinear(QKVParallelLinear):
    """Stand-in for vLLM's layer of the same name, by which the plugin knows the layer."""


def step5(config: Nvfp4TcConfig) -> Any:
    config.packed_modules_mapping = PACKED
    return Step5FusedQKVIndexerLinear(
        128,
        128,
        1,
        1,
        bias=False,
        quant_config=config,
        prefix="layers.0.self_attn.qkv_indexer_proj",
    )


@pytest.mark.usefixtures("vllm_config")
def test_step5s_projection_with_an_indexer_stays_in_16_bits_online() -> None:
    config = Nvfp4TcConfig()
    layer = step5(config)
    assert type(layer.quant_method) is UnquantizedLinearMethod
    assert not config.startup.pending
    [record] = config.startup.report.layers
    assert "multiplies its weight itself" in record.reason


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("kind", [PLAIN, NVFP4], ids=["16-bit", "NVFP4"])
def test_step5s_projection_of_a_checkpoint(kind: Any) -> None:
    config = Nvfp4TcConfig(checkpoint())
    assert config._kinds is not None
    config._kinds.read(
        headers({f"{ATTENTION}.{name}": kind for name in PACKED["qkv_indexer_proj"]})
    )
    if kind is PLAIN:
        assert type(step5(config).quant_method) is UnquantizedLinearMethod
        return
    with pytest.raises(UnsupportedCheckpoint, match=r"qkv_indexer_proj: is NVFP4.*must be in 16"):
        step5(config)


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("online", [True, False])
def test_a_question_about_a_layer_is_in_no_account(online: bool) -> None:
    """Step 5 builds layers only to compare their methods; such layers are not reported."""
    config = Nvfp4TcConfig(None if online else checkpoint())
    asked = LinearBase(128, 128, quant_config=config, prefix=f"{ATTENTION}.g_proj")
    assert "Nvfp4" in type(asked.quant_method).__name__
    assert not config.startup.pending
    assert not config.startup.report.layers
    assert not config.startup._names
    built = ColumnParallelLinear(
        128, 128, bias=False, quant_config=config, prefix=f"{ATTENTION}.g_proj"
    )
    assert type(built.quant_method) is type(asked.quant_method)
    assert config.startup.pending == {f"{ATTENTION}.g_proj"}


def test_a_copy_renames_for_itself_and_shares_the_account() -> None:
    """Step 5's draft renames modules in a copy of the target's config; both share the report."""
    from vllm.model_executor.models.utils import WeightsMapper

    config = Nvfp4TcConfig(checkpoint())
    assert config._kinds is not None
    config._kinds.read(headers({"language_model.model.layers.0.mlp.down_proj": NVFP4}))
    copied = copy.deepcopy(config)
    assert copied.startup is config.startup
    copied.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix={"language_model.": ""}))
    name = "model.layers.0.mlp.down_proj"
    assert copied._kinds is not None
    assert copied._kinds.tensors_kind(name) is not None
    assert config._kinds.tensors_kind(name) is None


# --- Beam -------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", [PLAIN, NVFP4], ids=["16-bit", "NVFP4"])
@pytest.mark.parametrize("others", [PLAIN, NVFP4], ids=["16-bit", "NVFP4"])
def test_beams_projection_with_a_gate_is_found_on_disk(gate: Any, others: Any) -> None:
    """Beam's projection has four shards on disk, one under another name; the tensors decide."""
    beam = pytest.importorskip("vllm.models.beam", reason="vLLM 0.33 has it").BeamForCausalLM
    attention = "model.layers.0.self_attn"
    kinds = LayerKinds(checkpoint())
    projections = {f"{attention}.{name}_proj": others for name in "qkv"}
    kinds.read(headers(projections | {f"{attention}.gate_proj": gate}))
    kinds.rename(beam.hf_to_vllm_mapper)
    name = f"{attention}.qkv_gate_proj"
    if gate is not others:
        with pytest.raises(MixedShards, match="qkv_gate_proj"):
            kinds.of(name, beam.packed_modules_mapping)
        return
    found = kinds.of(name, beam.packed_modules_mapping).group.kind
    assert found is (Kind.UNQUANTIZED if gate is PLAIN else Kind.NVFP4)


# --- drafts whose tensors decide ----------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["mtp.fc", "model.mtp.fc"])
@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.usefixtures("vllm_config")
def test_tensors_say_what_a_drafts_fc_is(quantised: bool, prefix: str, tmp_path: Path) -> None:
    """No exporter lists the draft's fc: the tensors tell whether the layer is quantised."""
    weight = quantize_weight(torch.randn(128, 256))
    parts = (weight.data, weight.scales, weight.global_scale)
    names = ("weight", "weight_scale", "weight_scale_2")
    module = prefix if quantised else "model.layers.0.mlp.up_proj"
    tensors = {f"{module}.{name}": part for name, part in zip(names, parts, strict=True)}
    if not quantised:
        tensors[f"{prefix}.weight"] = torch.zeros(128, 256, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    config = Nvfp4TcConfig.from_config(
        {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": []}
    )
    config.maybe_update_config(str(tmp_path), SimpleNamespace(architectures=["Qwen3_5MTP"]))
    layer = ColumnParallelLinear(
        256, 128, bias=False, gather_output=True, quant_config=config, prefix=prefix
    )
    expected = "Nvfp4LinearMethod" if quantised else "UnquantizedLinearMethod"
    assert type(layer.quant_method).__name__ == expected
