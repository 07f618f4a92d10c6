"""Readers of the checkpoints: the producers' libraries, this plugin, vLLM's own loaders."""

import json
from pathlib import Path

import pytest
import torch

from nvfp4_kernels.formats.scale_search import quantize_with_rule
from tests.test_quantizer.checkpoints import LINEARS, read_config, read_tensors
from vllm_fp4_plugin import formats
from vllm_fp4_plugin.checkpoint import files as checkpoint_files
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint


@pytest.mark.parametrize("calibrated", [False, True], ids=["weight-only", "calibrated"])
def test_compressed_tensors_reads_the_config(llama: Path, text: Path, tmp_path: Path, calibrated):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    options = {"calibrate": text, "seq_len": 64, "kv_cache_scheme": "fp8"} if calibrated else {}
    quantize_checkpoint(llama, tmp_path / "dst", format="compressed-tensors", **options)

    config = read_config(tmp_path / "dst")["quantization_config"]
    parsed = quantization.QuantizationConfig.model_validate(config)
    preset = "NVFP4" if calibrated else "NVFP4A16"
    scheme = quantization.preset_name_to_scheme(preset, ["Linear"])
    scheme.format = "nvfp4-pack-quantized"
    assert parsed.config_groups == {"group_0": scheme}
    assert parsed.format == "nvfp4-pack-quantized"
    assert parsed.quantization_status == quantization.QuantizationStatus.COMPRESSED
    assert parsed.ignore == ["lm_head"]
    assert (parsed.kv_cache_scheme is not None) == calibrated


@pytest.mark.parametrize("scales", ["absmax", "sweep"])
def test_compressed_tensors_unpacks_the_same_values(llama: Path, tmp_path: Path, scales):
    nvfp4 = pytest.importorskip("compressed_tensors.compressors.nvfp4.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    scheme = quantization.preset_name_to_scheme("NVFP4A16", ["Linear"])
    quantize_checkpoint(llama, tmp_path / "dst", format="compressed-tensors", scales=scales)

    before, after = read_tensors(llama), read_tensors(tmp_path / "dst")
    for name in LINEARS:
        state = {
            part: after[f"{name}.{part}"]
            for part in ("weight_packed", "weight_scale", "weight_global_scale")
        }
        unpacked = nvfp4.NVFP4PackedCompressor.decompress(state, scheme)["weight"]
        expected = quantize_with_rule(
            before[f"{name}.weight"], scales, convention="compressed-tensors"
        ).dequantize()
        # The library multiplies in bfloat16, the plugin in float32.
        torch.testing.assert_close(unpacked.float(), expected, rtol=2**-7, atol=0)


def test_compressed_tensors_packs_to_the_same_bits(llama: Path, tmp_path: Path):
    nvfp4 = pytest.importorskip("compressed_tensors.compressors.nvfp4.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    scheme = quantization.preset_name_to_scheme("NVFP4A16", ["Linear"])
    quantize_checkpoint(llama, tmp_path / "dst", format="compressed-tensors")

    before, after = read_tensors(llama), read_tensors(tmp_path / "dst")
    for name in LINEARS:
        weight = before[f"{name}.weight"].float()  # in bfloat16 it would round its own scales
        blocks = weight.unflatten(-1, (-1, 16))
        divisor = quantization.utils.generate_gparam(weight.min(), weight.max())
        scales, _ = quantization.utils.calculate_qparams(
            blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=divisor
        )
        state = {"weight": weight, "weight_scale": scales, "weight_global_scale": divisor}
        # The library's rounding function would be compiled, which takes seconds and changes
        # nothing.
        with torch.compiler.set_stance("force_eager"):
            packed = nvfp4.NVFP4PackedCompressor.compress(state, scheme)
        for part, tensor in packed.items():
            assert after[f"{name}.{part}"].dtype == tensor.dtype
            assert torch.equal(after[f"{name}.{part}"].float(), tensor.float())


def test_modelopt_unpacks_the_same_values(llama: Path, tmp_path: Path):
    module = pytest.importorskip(
        "modelopt.torch.quantization.qtensor.nvfp4_tensor", exc_type=ImportError
    )
    quantize_checkpoint(llama, tmp_path / "dst")

    before, after = read_tensors(llama), read_tensors(tmp_path / "dst")
    for name in LINEARS:
        original = before[f"{name}.weight"]
        packed, scale, scale_2 = module.NVFP4QTensor.quantize(original.clone(), 16)
        assert torch.equal(packed._quantized_data, after[f"{name}.weight"])
        assert torch.equal(scale.float(), after[f"{name}.weight_scale"].float())
        assert torch.equal(scale_2, after[f"{name}.weight_scale_2"])
        unpacked = module.NVFP4QTensor(
            original.shape, torch.float32, after[f"{name}.weight"]
        ).dequantize(
            scale=after[f"{name}.weight_scale"],
            double_scale=after[f"{name}.weight_scale_2"],
            block_sizes={-1: 16},
        )
        assert torch.equal(unpacked, quantize_with_rule(original).dequantize())


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("calibrated", [False, True], ids=["weight-only", "calibrated"])
def test_the_plugin_accepts_every_checkpoint(
    llama: Path, text: Path, tmp_path: Path, format: str, calibrated: bool
):
    options = {"calibrate": text, "seq_len": 64, "kv_cache_scheme": "fp8"} if calibrated else {}
    quantize_checkpoint(llama, tmp_path / "dst", format=format, **options)

    found = formats.parse(read_config(tmp_path / "dst")["quantization_config"])
    checkpoint_files.check_nvfp4(checkpoint_files.read_headers(tmp_path / "dst"), found)
    assert found.format.name == format
    assert found.weight_only != calibrated
    assert (found.kv_cache_scheme is not None) == calibrated


@pytest.mark.parametrize("calibrated", [False, True], ids=["weight-only", "calibrated"])
def test_vllm_s_loaders_choose_as_we_do(llama: Path, text: Path, tmp_path: Path, calibrated: bool):
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    options = {"calibrate": text, "seq_len": 64} if calibrated else {}
    options |= {"ignore": ["1.mlp"]}
    for format in ("modelopt", "compressed-tensors"):
        quantize_checkpoint(llama, tmp_path / format, format=format, **options)

    modelopt = read_config(tmp_path / "modelopt")["quantization_config"]
    legacy = json.loads((tmp_path / "modelopt" / "hf_quant_config.json").read_text())
    assert ModelOptNvFp4Config.override_quantization_method(modelopt, None) == "modelopt_fp4"
    for written in (modelopt, legacy):
        config = ModelOptNvFp4Config.from_config(written)
        config.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
        assert config.quant_method == ("NVFP4" if calibrated else "W4A16_NVFP4")
        assert config.is_layer_excluded("lm_head")
        assert config.is_layer_excluded("model.layers.1.mlp.gate_up_proj")
        assert not config.is_layer_excluded("model.layers.0.mlp.gate_up_proj")
    written = read_config(tmp_path / "compressed-tensors")["quantization_config"]
    config = compressed_tensors.CompressedTensorsConfig.from_config(written)
    scheme = config.target_scheme_map["Linear"]
    assert config._is_nvfp4_format(scheme["weights"])
    assert (scheme.get("input_activations") is not None) == calibrated
