"""Mixtures of experts that the quantising tool made: complete for vLLM's models, and served."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests import moe_checkpoints, tiny_llama
from tests.catalogue import reference
from tests.engine import distance, run
from tests.moe_checkpoints import Moe
from tests.test_quantizer.mixtures import FAMILIES, save_mixture
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint
from vllm_fp4_plugin.verify_command import verified

SAME = 0.03  # W4A16: .011, with gate's scale for up .66
SAME_W4A4 = 0.25  # .11 to .13
CALIBRATION: dict[str, Any] = {"seq_len": 64, "calibration_tokens": 512}

# vLLM builds no model of these on a CPU.
OBSTACLES: dict[str, tuple[type[Exception], str]] = {
    "MiniMax M2": (UnsupportedCheckpoint, "sigmoid with a bias and without groups, which vLLM's"),
    "Nemotron-H": (NotImplementedError, "is_act_and_mul=False is supported only for CUDA"),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(tiny_llama.TEXT * 20)
    return file


@pytest.mark.parametrize("family", FAMILIES)
def test_complete_for_vllm_s_model(family: str, text: Path, tmp_path: Path) -> None:
    src = save_mixture(tmp_path / "src", FAMILIES[family]())
    quantize_checkpoint(src, tmp_path / "dst", calibrate=text, **CALIBRATION)
    if family in OBSTACLES:
        error, message = OBSTACLES[family]
        with pytest.raises(error, match=message):
            verified(tmp_path / "dst")
        return
    lines = verified(tmp_path / "dst", values=True)
    assert lines[0].startswith(f"{tmp_path / 'dst'}: complete, ")
    assert lines[2] == "values: finite, block scales positive"


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
def test_a_layer_kept_in_16_bits(format: str, tmp_path: Path) -> None:
    src = save_mixture(tmp_path / "src", moe_checkpoints.qwen3())
    quantize_checkpoint(src, tmp_path / "dst", format=format, ignore=["layers.0.mlp.experts"])
    lines = verified(tmp_path / "dst")
    assert lines[1].startswith(f"{format}: 32 NVFP4 layers")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "calibrated"),
    [("modelopt", True), ("compressed-tensors", True), ("modelopt", False)],
    ids=["modelopt, W4A4", "compressed-tensors, W4A4", "modelopt, W4A16"],
)
def test_served(format: str, calibrated: bool, text: Path, tmp_path: Path) -> None:
    """An engine says what transformers says of the decoded weights and rounded inputs."""
    src = moe_checkpoints.save_random(tmp_path / "src", moe_checkpoints.qwen3())
    options = {"calibrate": text, **CALIBRATION} if calibrated else {}
    # Attention is not rounded by the reference.
    dst = tmp_path / "dst"
    quantize_checkpoint(src, dst, format=format, ignore=["self_attn"], **options)
    reference.decode(dst, tmp_path / "decoded")
    tensors = load_file(dst / "model.safetensors")
    scales = {}
    for name, tensor in tensors.items():
        if name.endswith(".input_scale"):
            scales[name.removesuffix(".input_scale")] = tensor
        elif name.endswith(".input_global_scale"):
            scales[name.removesuffix(".input_global_scale")] = 1 / tensor.reshape(())
    assert bool(scales) == calibrated

    found = run(str(dst))
    how = "/reference (cpu), W4A4 static" if calibrated else "_w4a16/reference (cpu), W4A16"
    assert f"experts ×2: nvfp4_grouped_silu_mul_gemm{how}" in found.report
    expected = moe_checkpoints.said(Moe(dst, tmp_path / "decoded", scales))
    assert distance(found, expected) < (SAME_W4A4 if calibrated else SAME)
