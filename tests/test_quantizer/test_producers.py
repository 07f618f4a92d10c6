"""The producers' own libraries read what is written as we do."""

from pathlib import Path

import pytest
import torch

from nvfp4_kernels.scale_search import quantize_with_rule
from tests.test_quantizer.checkpoints import LINEARS, read_config, read_tensors
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
        # It multiplies in bfloat16, we in float32.
        torch.testing.assert_close(unpacked.float(), expected, rtol=2**-7, atol=0)


def test_compressed_tensors_packs_to_the_same_codes(llama: Path, tmp_path: Path):
    nvfp4 = pytest.importorskip("compressed_tensors.compressors.nvfp4.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    scheme = quantization.preset_name_to_scheme("NVFP4A16", ["Linear"])
    quantize_checkpoint(llama, tmp_path / "dst", format="compressed-tensors")

    before, after = read_tensors(llama), read_tensors(tmp_path / "dst")
    for name in LINEARS:
        state = {
            "weight": before[f"{name}.weight"],
            "weight_scale": after[f"{name}.weight_scale"].float(),
            "weight_global_scale": after[f"{name}.weight_global_scale"],
        }
        # Its rounding function asks to be compiled, which takes seconds and changes nothing.
        with torch.compiler.set_stance("force_eager"):
            packed = nvfp4.NVFP4PackedCompressor.compress(state, scheme)["weight_packed"]
        assert torch.equal(packed, after[f"{name}.weight_packed"])


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
