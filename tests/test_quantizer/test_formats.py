"""Tensors written for each linear: names, dtypes, shapes and values."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nvfp4_kernels.formats.scale_search import quantize_with_rule
from tests.test_quantizer.checkpoints import LINEARS, read_config, read_tensors, save_checkpoint
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

FORMATS = {
    "modelopt": ("weight", "weight_scale_2", "input_scale", ()),
    "compressed-tensors": ("weight_packed", "weight_global_scale", "input_global_scale", (1,)),
}
EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS)


def decode(data: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    """Values of packed codes, low nibble first; independent of the library."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)
    return grid[codes.long()] * scales.float().repeat_interleave(16, dim=-1) * global_scale


def relative_mse(decoded: Tensor, original: Tensor) -> float:
    return float((decoded - original.float()).square().sum() / original.float().square().sum())


def decoded(tensors: dict[str, Tensor], name: str, format: str) -> Tensor:
    weight, global_scale, _, _ = FORMATS[format]
    scale = tensors[f"{name}.{global_scale}"]
    scale = scale if format == "modelopt" else 1 / scale
    return decode(tensors[f"{name}.{weight}"], tensors[f"{name}.weight_scale"], scale)


@pytest.mark.parametrize(
    ("format", "scales"),
    [
        ("modelopt", "absmax"),
        ("modelopt", "sweep"),
        ("compressed-tensors", "absmax"),
        ("compressed-tensors", "four-over-six"),
    ],
)
def test_weights_equal_the_library_s(llama: Path, tmp_path: Path, format, scales):
    quantize_checkpoint(llama, tmp_path / "dst", format=format, scales=scales)

    before, after = read_tensors(llama), read_tensors(tmp_path / "dst")
    weight, global_scale, _, scalar = FORMATS[format]
    for name in LINEARS:
        expected = quantize_with_rule(before[f"{name}.weight"], scales, convention=format)
        assert after[f"{name}.{weight}"].dtype == torch.uint8
        assert torch.equal(after[f"{name}.{weight}"], expected.data)
        assert after[f"{name}.weight_scale"].dtype == torch.float8_e4m3fn
        assert torch.equal(after[f"{name}.weight_scale"].float(), expected.scales.float())
        stored = after[f"{name}.{global_scale}"]
        assert stored.dtype == torch.float32
        assert stored.shape == scalar
        amax = before[f"{name}.weight"].abs().max().float()
        assert stored.item() == (amax / 2688 if format == "modelopt" else 2688 / amax).item()


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_decodes_close_to_the_original(tmp_path: Path, format, dtype):
    src = save_checkpoint(tmp_path / "src", dtype=dtype)
    summary = quantize_checkpoint(src, tmp_path / "dst", format=format)

    before, after = read_tensors(src), read_tensors(tmp_path / "dst")
    errors = [relative_mse(decoded(after, n, format), before[f"{n}.weight"]) for n in LINEARS]
    # .00904 for Gaussian weights, measured over many more values than here.
    assert max(errors) < 0.0105
    assert summary.mean_relative_mse == pytest.approx(sum(errors) / len(errors), rel=1e-4)
    assert 4.5 < summary.bits_per_weight < 4.52


def test_searched_scales_have_less_error(llama: Path, tmp_path: Path):
    errors = [
        quantize_checkpoint(llama, tmp_path / rule, scales=rule).mean_relative_mse
        for rule in ("sweep", "four-over-six", "absmax")
    ]
    assert errors[0] < 0.9 * errors[1] < 0.9 * errors[2]


def test_a_weight_larger_than_a_slice_is_quantised_whole(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    quantize_checkpoint(llama, tmp_path / "whole")
    monkeypatch.setattr("vllm_fp4_plugin.quantizer.weights._SLICE_ELEMENTS", 7 * 64)
    quantize_checkpoint(llama, tmp_path / "sliced")

    whole, sliced = (tmp_path / d / "model.safetensors" for d in ("whole", "sliced"))
    assert whole.read_bytes() == sliced.read_bytes()


@EVERY_FORMAT
def test_all_else_is_kept_bit_for_bit(llama: Path, tmp_path: Path, format):
    quantize_checkpoint(llama, tmp_path / "dst", format=format)

    before, after = read_tensors(llama), read_tensors(tmp_path / "dst")
    kept = before.keys() - {f"{name}.weight" for name in LINEARS}
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} < kept
    weight, global_scale, _, _ = FORMATS[format]
    parts = (weight, "weight_scale", global_scale)
    assert after.keys() == kept | {f"{name}.{part}" for name in LINEARS for part in parts}
    for name in kept:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name], before[name])


def test_global_scales_are_each_shard_s_own_unless_asked(llama: Path, tmp_path: Path):
    quantize_checkpoint(llama, tmp_path / "own")
    quantize_checkpoint(llama, tmp_path / "shared", shared_fused_scale=True)

    before, own, shared = (read_tensors(d) for d in (llama, tmp_path / "own", tmp_path / "shared"))

    def scales(tensors: dict[str, Tensor], *parts: str) -> list[float]:
        return [tensors[f"model.layers.1.{p}.weight_scale_2"].item() for p in parts]

    for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                  ("mlp.gate_proj", "mlp.up_proj")):  # fmt: skip
        assert len(set(scales(own, *group))) == len(group)
        assert set(scales(shared, *group)) == {max(scales(own, *group))}
    assert scales(shared, "mlp.down_proj") == scales(own, "mlp.down_proj")
    for name in LINEARS:
        assert relative_mse(decoded(shared, name, "modelopt"), before[f"{name}.weight"]) < 0.012


def test_modelopt_config(llama: Path, text: Path, tmp_path: Path):
    quantize_checkpoint(llama, tmp_path / "dst", calibrate=text, seq_len=64, kv_cache_scheme="fp8")

    config = read_config(tmp_path / "dst")
    quantization = config.pop("quantization_config")
    assert config == read_config(llama)
    nvfp4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert quantization["quant_method"] == "modelopt"
    assert quantization["quant_algo"] == "NVFP4"
    assert quantization["ignore"] == ["lm_head"]
    assert quantization["config_groups"] == {
        "group_0": {"input_activations": nvfp4, "weights": nvfp4, "targets": ["Linear"]}
    }
    assert quantization["kv_cache_scheme"] == {"dynamic": False, "num_bits": 8, "type": "float"}
    legacy = json.loads((tmp_path / "dst" / "hf_quant_config.json").read_text())
    assert legacy["quantization"] == {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }


@EVERY_FORMAT
def test_without_text_the_checkpoint_is_weight_only(llama: Path, tmp_path: Path, format):
    summary = quantize_checkpoint(llama, tmp_path / "dst", format=format)

    assert summary.calibration_tokens == 0
    quantization = read_config(tmp_path / "dst")["quantization_config"]
    groups = quantization["config_groups"].values()
    assert [group["input_activations"] for group in groups] == [None]
    parts = {name.rpartition(".")[2] for name in read_tensors(tmp_path / "dst")}
    assert not parts & {"input_scale", "input_global_scale"}
    if format == "modelopt":
        assert quantization["quant_algo"] == "W4A16_NVFP4"
        legacy = json.loads((tmp_path / "dst" / "hf_quant_config.json").read_text())
        assert legacy["quantization"]["quant_algo"] == "W4A16_NVFP4"
    else:
        assert not (tmp_path / "dst" / "hf_quant_config.json").exists()
