"""Mixtures of experts from the quantising tool: complete for vLLM's models."""

from pathlib import Path
from typing import Any

import pytest

from tests import moe_checkpoints, tiny_llama
from tests.test_quantizer.mixtures import FAMILIES, save_mixture
from vllm_fp4_plugin.commands.verification import verified
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

CALIBRATION: dict[str, Any] = {"seq_len": 64, "calibration_tokens": 512}

# Families whose models vLLM cannot build on a CPU.
OBSTACLES: dict[str, tuple[type[Exception], str]] = {
    "Nemotron-H": (NotImplementedError, "is_act_and_mul=False is supported only for CUDA"),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(tiny_llama.TEXT * 20)
    return file


@pytest.mark.processes
@pytest.mark.parametrize("family", FAMILIES)
def test_complete_for_vllm_s_model(family: str, text: Path, tmp_path: Path) -> None:
    src = save_mixture(tmp_path / "src", FAMILIES[family]())
    quantize_checkpoint(src, tmp_path / "dst", calibrate=text, **CALIBRATION)
    if family in OBSTACLES:
        error, message = OBSTACLES[family]
        with pytest.raises(error, match=message):
            verified(tmp_path / "dst")
        return
    lines = verified(tmp_path / "dst", values=True).lines()
    assert lines[0].startswith(f"{tmp_path / 'dst'}: complete, ")
    assert lines[2] == "values: finite, block scales positive"


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
def test_a_layer_kept_in_16_bits(format: str, tmp_path: Path) -> None:
    src = save_mixture(tmp_path / "src", moe_checkpoints.qwen3())
    quantize_checkpoint(src, tmp_path / "dst", format=format, ignore=["layers.0.mlp.experts"])
    lines = verified(tmp_path / "dst").lines()
    assert lines[1].startswith(f"{format}: 32 NVFP4 layers")
