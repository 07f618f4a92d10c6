"""Layers of a model, and their kernels."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from nvfp4_kernels.attention.merge.tile import MergeTile
from nvfp4_kernels.attention.sm100.choose import AttentionProblem
from nvfp4_kernels.attention.sm100.choose import choose_config as choose_attention
from nvfp4_kernels.attention.sm100.tile import Variant
from nvfp4_kernels.formats.terms import TermLayout
from nvfp4_kernels.gemm.sm100.choose import Problem, choose_config
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig
from nvfp4_kernels.precompile.attention_sm100 import (
    CACHES,
    Cache,
    attention_kernels,
    hands_over,
)
from nvfp4_kernels.precompile.linear_sm100 import block_scaled_kernels
from nvfp4_kernels.precompile.model import Attention, Layer, quantizing_mlps
from nvfp4_kernels.precompile.norm_sm100 import norm_kernels
from nvfp4_kernels.quantize.rms_norm.choose import choose_config as choose_norm
from nvfp4_kernels.tool.config_file import UnusableModel
from nvfp4_kernels.tool.model import explicit, read_model
from nvfp4_kernels.tool.shapes import LLAMA_8B, given_shape

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}


def config(tmp_path: Path, **changed: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changed}))
    return tmp_path


def sizes(path: Path, **options: Any) -> dict[str, tuple[int, int]]:
    return {layer.name: (layer.n, layer.k) for layer in read_model(path, **options).layers}


def test_llama(tmp_path: Path) -> None:
    model = read_model(config(tmp_path))
    assert model.layers == LLAMA_8B.layers
    assert model.dtype == "bfloat16"
    assert model.attention == Attention(32, 8, 128)


def test_tensor_parallel_shares_heads_and_inner_size(tmp_path: Path) -> None:
    assert sizes(config(tmp_path), tensor_parallel=4) == {
        "qkv_proj": (1536, 4096),
        "o_proj": (4096, 1024),
        "gate_up_proj": (3584, 4096),
        "down_proj": (4096, 3584),
    }


def test_each_gpu_has_at_least_one_kv_head(tmp_path: Path) -> None:
    assert sizes(config(tmp_path), tensor_parallel=16)["qkv_proj"] == ((2 + 2) * 128, 4096)


def test_head_dim_need_not_be_hidden_over_heads(tmp_path: Path) -> None:
    found = sizes(config(tmp_path, model_type="qwen3", head_dim=256))
    assert found["qkv_proj"] == (48 * 256, 4096)
    assert found["o_proj"] == (4096, 32 * 256)


@pytest.mark.parametrize(
    ("changed", "windows"),
    [
        ({"sliding_window": 4096}, (0, 4096)),
        ({"sliding_window": 4096, "use_sliding_window": False}, (0,)),
        ({"sliding_window": None}, (0,)),
        ({"sliding_window": 512, "layer_types": ["sliding_attention"]}, (512,)),
        (
            {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"]},
            (0, 512),
        ),
    ],
    ids=["unsaid", "off", "none", "all", "some"],
)
def test_windows(tmp_path: Path, changed: dict[str, Any], windows: tuple[int, ...]) -> None:
    attention = read_model(config(tmp_path, **changed), tensor_parallel=16).attention
    assert attention == Attention(2, 1, 128, windows)


def test_soft_cap(tmp_path: Path) -> None:
    attention = read_model(config(tmp_path, attn_logit_softcapping=50.0)).attention
    assert attention == Attention(32, 8, 128, soft_cap=True)


@pytest.mark.parametrize(
    ("changed", "biased"),
    [
        ({}, []),
        ({"model_type": "qwen2"}, ["qkv_proj"]),
        ({"attention_bias": True}, ["qkv_proj", "o_proj"]),
        ({"mlp_bias": True}, ["gate_up_proj", "down_proj"]),
    ],
    ids=["llama", "qwen2", "attention", "mlp"],
)
def test_biases(tmp_path: Path, changed: dict[str, Any], biased: list[str]) -> None:
    layers = read_model(config(tmp_path, **changed)).layers
    assert [layer.name for layer in layers if layer.bias] == biased


def test_unfused_mlp(tmp_path: Path) -> None:
    layers = read_model(config(tmp_path), fuse_mlp=False).layers
    assert Layer("gate_up_proj", 28672, 4096, shards=2) in layers


def test_decoder_of_a_multimodal_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA}))
    assert read_model(tmp_path / "config.json").layers == LLAMA_8B.layers


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_size": None}, "hidden_size is None, must be a positive number"),
        ({"num_local_experts": 8}, "has 8 experts in a layer, must be a dense decoder"),
        ({"torch_dtype": "float32"}, "dtype is 'float32', must be bfloat16 or float16"),
        ({"intermediate_size": 100}, "gate_up_proj: N is 100, must be a positive multiple of 16"),
        ({"hidden_size": True}, "hidden_size is True, must be a positive number"),
        ({"head_dim": "x"}, "head_dim is 'x', must be a positive number"),
        ({"num_key_value_heads": "x"}, "num_key_value_heads is 'x', must be a positive number"),
        ({"num_key_value_heads": -2}, "num_key_value_heads is -2, must be a positive number"),
        (
            {"num_key_value_heads": 5},
            "num_key_value_heads is 5, must be a divisor of num_attention_heads = 32",
        ),
        ({"sliding_window": -1}, "sliding_window is -1, must be a positive number"),
        ({"sliding_window": 8, "layer_types": 5}, "layer_types is 5, must be a list of strings"),
        ({"rope_parameters": "x"}, "rope_parameters is 'x', must be an object"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\], must be an object"),
        (
            {"rope_parameters": {"partial_rotary_factor": "x"}},
            "partial_rotary_factor is 'x', must be a number above 0, at most 1",
        ),
    ],
    ids=[
        "no size",
        "experts",
        "dtype",
        "odd size",
        "no number",
        "head",
        "heads",
        "negative heads",
        "odd groups of heads",
        "window",
        "kinds of layers",
        "rope",
        "old rope",
        "rotary factor",
    ],
)
def test_models_that_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableModel, match=message):
        read_model(config(tmp_path, **changed))


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableModel, match=r"cannot be read .*, must be a config.json"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnusableModel, match="is no JSON"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UnusableModel, match="is no JSON object"):
        read_model(tmp_path)


def test_gpus_that_do_not_divide(tmp_path: Path) -> None:
    with pytest.raises(UnusableModel, match="--tensor-parallel is 3, must divide num_attention"):
        read_model(config(tmp_path), tensor_parallel=3)


@pytest.mark.parametrize("text", ["64", "64,64,64", "64,x", "64,-1", "0,64"])
def test_sizes_in_another_form(text: str) -> None:
    with pytest.raises(UnusableModel, match=r"--linear: is .*, must be N,K"):
        explicit([text], [])


def test_shapes() -> None:
    assert given_shape("3,32,64", gate_up=True).problem == Problem(3, 32, 64, 1, 2)
    assert given_shape("3,32,64,5", gate_up=False).problem == Problem(3, 32, 64, 5, 1)
    with pytest.raises(UnusableModel, match=r"--shape: is '3,32', must be M,N,K\[,L\]"):
        given_shape("3,32", gate_up=False)


# --- kernels ----------------------------------------------------------------------------------


def test_every_number_of_tokens_has_its_kernel() -> None:
    model = explicit(["4096,4096"], [])
    found = {
        spec.fields
        for spec in block_scaled_kernels(model, max_tokens=1200, activations=("static",))
    }
    for m in range(1, 1201):
        assert choose_config(Problem(m, 4096, 4096), EpilogueConfig("bfloat16")) in found


@pytest.mark.parametrize("terms", [2, 3])
def test_activations_in_terms_have_theirs(terms: int) -> None:
    model = explicit(["4096,4096"], [])
    found = block_scaled_kernels(model, max_tokens=300, activations=("static",), terms=terms)
    products = {spec.fields for spec in found if spec.op == "gemm"}
    output = EpilogueConfig("bfloat16")
    expected = [choose_config(Problem(m, 4096, 4096, 1, 1, terms), output) for m in range(1, 301)]
    assert products == set(expected)
    layouts = {spec.fields[-1] for spec in found if spec.op == "quantize"}
    assert layouts == {TermLayout(terms, packed=True), TermLayout(terms)}


def test_layers_share_kernels() -> None:
    model = explicit(["4096,4096", "4096,14336"], [])
    found = block_scaled_kernels(model, max_tokens=64, activations=("static",))
    assert ["linear 4096,4096", "linear 4096,14336"] in found.values()


def test_scales_of_activations_make_other_kernels() -> None:
    both = block_scaled_kernels(LLAMA_8B, max_tokens=8)
    apart = [
        block_scaled_kernels(LLAMA_8B, max_tokens=8, activations=(a,))
        for a in ("static", "per-token")
    ]
    assert both.keys() == apart[0].keys() | apart[1].keys()
    assert not apart[0].keys() & apart[1].keys()
    assert {spec.op for spec in both} == {"quantize", "gemm", "silu_mul_gemm"}


@pytest.mark.parametrize("terms", [1, 2])
def test_mlps_that_quantise_their_result(terms: int) -> None:
    """Fused MLPs that quantise their result need other kernels, and only for gate and up."""
    found, plain = (
        block_scaled_kernels(model, max_tokens=64, activations=("static",))
        for model in (quantizing_mlps(LLAMA_8B, terms), LLAMA_8B)
    )
    assert {spec.op for spec in found.keys() - plain.keys()} == {"silu_mul_gemm"}
    assert {spec.op for spec in plain.keys() - found.keys()} == {"silu_mul_gemm"}
    outputs = {spec.fields[1] for spec in found if spec.op == "silu_mul_gemm"}
    assert {(output.dtype, output.terms.count) for output in outputs} == {("nvfp4", terms)}


@pytest.mark.parametrize("per_token", [False, True])
def test_norms_have_a_kernel_for_every_number_of_tokens(per_token: bool) -> None:
    found = norm_kernels("bfloat16", "float32", 4096, max_tokens=1200, per_token=per_token, terms=2)
    fields = {spec.fields for spec in found}
    for m in range(1, 1201):
        for adds in (False, True):
            how = "bfloat16", "float32", adds, per_token
            assert (*how, choose_norm(m, 4096), TermLayout.of(2, m)) in fields


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("quantized", [False, True], ids=["", "quantized"])
def test_every_batch_has_its_attention_kernel(
    quantized: bool, cache: Cache, window: int, sinks: bool
) -> None:
    attention = Attention(8, 2, 128, (window,), sinks=sinks)
    specs = attention_kernels(attention, "bfloat16", caches=(cache,), quantized=quantized)
    found = {spec.fields for spec in specs}
    sizes = product((1, 7, 64, 300), (1, 5, 20, 200, 4096), (1, 500, 9000, 1 << 17))
    for batch, queries, keys in sizes:
        problem = AttentionProblem(batch, queries, keys, 2, 4, 128, cache == "fp8", window)
        tile, splits = choose_attention(problem)
        variant = Variant(
            "bfloat16",
            "paged",
            16,
            causal=True,
            window=window > 0,
            sinks=sinks,
            split=splits > 1,
            quantized=quantized,
            merges=splits > 1,
        )
        if tile.query_tiles == 2 and splits > 1:
            variant = replace(variant, sinks=False, quantized=False, merges=False)
        assert (tile, variant) in found
    tiles = [fields[0] for fields in found if isinstance(fields[0], MergeTile)]
    merges = {(tile.sinks, tile.quantized) for tile in tiles}
    assert merges == {(sinks, quantized)}


def test_what_attention_hands_over() -> None:
    assert hands_over(Attention(8, 2, 128), "static", 1)
    assert not hands_over(Attention(8, 2, 128), "static", 2)
    assert not hands_over(Attention(8, 2, 128), "per-token", 1)
    assert not hands_over(Attention(8, 2, 80), "static", 1)
    assert not hands_over(Attention(3, 1, 32), "static", 1)


def test_attention_that_no_kernel_serves_is_left_out() -> None:
    assert attention_kernels(Attention(8, 2, 72), "bfloat16") == {}
    narrow = attention_kernels(Attention(8, 2, 16), "bfloat16")
    assert narrow
    assert not any(getattr(spec.fields[0], "fp8", False) for spec in narrow)
