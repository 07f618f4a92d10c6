"""Model with identity layers, as in LLaMA-Pro, and zero token embeddings: online and quantised."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine import dequantized, distance, run
from tests.test_plugin.engine.test_engine import SAME_W4A16
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

pytestmark = pytest.mark.slow

LAYER, GROWN = "model.layers.1.", "model.layers.2."
EMBEDDING = "model.embed_tokens.weight"


def changed(bf16: Path, folder: Path, dtype: torch.dtype, *, grows: bool) -> Path:
    """Model with zero embeddings for two of three tokens, and optionally a layer that adds zero."""
    shutil.copytree(bf16, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[EMBEDDING][::3] = 0.0
    tensors[EMBEDDING][1::3] = -0.0
    if grows:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    for name, tensor in list(tensors.items()) if grows else ():
        if name.startswith(LAYER):
            is_zero = name.endswith(("o_proj.weight", "down_proj.weight"))
            copy = torch.zeros_like(tensor) if is_zero else tensor.clone()
            tensors[name.replace(LAYER, GROWN)] = copy
    stored = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_online_a_layer_of_fp64_that_adds_nothing_changes_nothing(
    bf16: Path, tmp_path: Path
) -> None:
    grown = changed(bf16, tmp_path / "grown", torch.float64, grows=True)
    plain = changed(bf16, tmp_path / "plain", torch.bfloat16, grows=False)
    served = run(str(grown))
    assert served.report[0].startswith("qkv_proj ×3: ")
    # The added layer rounds the residual sum to bfloat16 once more before the last norm.
    assert distance(served, run(str(plain))) < SAME_W4A16


def test_quantised_a_layer_that_adds_nothing_is_served_as_transformers_does(
    bf16: Path, tmp_path: Path
) -> None:
    grown = changed(bf16, tmp_path / "grown", torch.bfloat16, grows=True)
    quantize_checkpoint(grown, tmp_path / "dst")
    served = run(str(tmp_path / "dst"))
    assert distance(served, dequantized(tmp_path / "dst")) < SAME_W4A16
