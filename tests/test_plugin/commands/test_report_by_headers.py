"""Reports of checkpoints whose experts are stacked, from headers alone."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_fp4_plugin.commands.report_by_headers import headers_report
from vllm_fp4_plugin.options import Options

PARENTS = ["model.layers.0.mlp.experts", "model.layers.0.moe"]


def write(folder: Path, parent: str, *, input_scales: bool) -> Path:
    algorithm = "NVFP4" if input_scales else "W4A16_NVFP4"
    quantization = {"quant_method": "modelopt", "quant_algo": algorithm}
    config = {"architectures": ["ItsForCausalLM"], "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, rows in (("gate_up_proj", 64), ("down_proj", 32)):
        tensors |= {
            f"{parent}.{name}.weight": torch.zeros(4, rows, 16, dtype=torch.uint8),
            f"{parent}.{name}.weight_scale": torch.ones(4, rows, 2).to(torch.float8_e4m3fn),
            f"{parent}.{name}.weight_scale_2": torch.ones(4),
        }
        if input_scales:
            tensors[f"{parent}.{name}.input_scale"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("parent", PARENTS)
@pytest.mark.parametrize(("input_scales", "said"), [(True, "W4A4"), (False, "W4A16")])
def test_arithmetic_is_what_the_tensors_say(
    input_scales: bool, said: str, parent: str, tmp_path: Path
) -> None:
    report = headers_report(write(tmp_path, parent, input_scales=input_scales), Options())
    [record] = report.layers
    assert record.name == f"{parent.removesuffix('.experts')}.experts"
    assert record.elements == 4 * (64 + 32) * 32
    assert record.arithmetic.startswith(said)


def test_terms_reach_stacked_experts(tmp_path: Path) -> None:
    path = write(tmp_path, PARENTS[0], input_scales=False)
    found = headers_report(path, Options(activation_terms=(("*experts*", 2),)))
    [record] = found.layers
    assert record.arithmetic.startswith("W4A4×2")


@pytest.mark.parametrize("ties", [True, False, None])
@pytest.mark.parametrize("section", [True, False], ids=["text_config", "top"])
def test_a_tied_head_is_the_embeddings_weights(
    section: bool, ties: bool | None, tmp_path: Path
) -> None:
    path = write(tmp_path, PARENTS[0], input_scales=True)
    file = path / "config.json"
    fields: dict[str, object] = {"vocab_size": 48}
    if ties is not None:
        fields["tie_word_embeddings"] = ties
    added = {"text_config": fields} if section else fields
    file.write_text(json.dumps(json.loads(file.read_text()) | added))
    embedding = torch.zeros(48, 32, dtype=torch.bfloat16)
    save_file({"model.embed_tokens.weight": embedding}, path / "embedding.safetensors")
    heads = [r for r in headers_report(path, Options()).layers if r.name == "lm_head"]
    assert [(r.kernel, r.reason) for r in heads] == [
        ("unquantized (vLLM)", "bfloat16 weights of model.embed_tokens (tie_word_embeddings)")
    ] * (ties is True)
