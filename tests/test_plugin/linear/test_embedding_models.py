"""Embedding and classification models in real engines, against transformers on decoded weights.

The bound is on the distance of two unit vectors; .003 to .005 was seen.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForSequenceClassification

from nvfp4_kernels.formats.nvfp4 import Nvfp4Tensor
from tests import tiny_llama
from tests.catalogue import checkpoint, reference
from tests.catalogue.facts import named
from tests.engine import started
from tests.test_plugin.engine.test_model_families import TEXTS, W4A16, tokens
from tests.test_plugin.engine.test_model_families import weight_only as weight_only_family

pytestmark = pytest.mark.slow

SAME = 0.01
CLASS_SAME = 0.03  # of a probability
PAGED = "attn ×2: nvfp4_paged_attention/reference (cpu), bfloat16 KV cache, by default"
NOT_OURS = "attn ×2: CPU_ATTN (vLLM), bfloat16 KV cache, not CUSTOM: encoder_only attention is not"


def expected(model: Any, *, causal: bool) -> list[Tensor]:
    """Unit vectors: of the last token if ``causal``, else of the mean over all tokens."""
    vectors = []
    for prompt in tokens():
        n = len(prompt)
        mask = None if causal else torch.zeros(1, 1, n, n)
        with torch.inference_mode():
            hidden = model(input_ids=torch.tensor([prompt]), attention_mask=mask)
        rows = hidden.last_hidden_state[0]
        vector = rows[-1] if causal else rows.mean(0)
        vectors.append(vector / vector.norm())
    return vectors


def distance(found: list[Tensor], vectors: list[Tensor]) -> float:
    """Largest distance between two vectors of the same text."""
    return max(float((a - b).norm()) for a, b in zip(found, vectors, strict=True))


@pytest.mark.feature(
    "embeddings",
    "works",
    "`LLM.embed`: matches the transformers model with the decoded weights, causal and "
    "bidirectional",
)
@pytest.mark.parametrize(
    ("family", "causal", "attention"),
    [
        pytest.param("Nemotron 3 Embed (bidirectional)", False, NOT_OURS, id="Nemotron 3 Embed"),
        pytest.param("Qwen 3 (dense)", True, PAGED, id="Qwen 3 Embedding"),
    ],
)
def test_embeddings(family: str, causal: bool, attention: str, tmp_path: Path) -> None:
    path = checkpoint.write(
        weight_only_family(named(family)), tmp_path / "model", reference.even_out
    )
    roundings = reference.decode(path, tmp_path / "decoded")
    model: Any = reference.load(AutoModelForCausalLM, tmp_path / "decoded", roundings).model
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in tokens()]
    convert = {"convert": "embed"} if causal else {}  # what the class's name does not say
    with started(str(path), runner="pooling", **convert) as llm:
        outputs = llm.embed(prompts, use_tqdm=False)
        report = llm.llm_engine.vllm_config.quant_config.startup.report.lines()
        del llm
    found = [torch.tensor(output.outputs.embedding) for output in outputs]
    assert len(found) == len(TEXTS)
    assert distance(found, expected(model, causal=causal)) < SAME
    assert distance(found, expected(model, causal=not causal)) > SAME
    assert f"qkv_proj ×2: {W4A16}" in report
    assert any(line.startswith(attention) for line in report), report
    for leaf in ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        weight = next(m for n, m in model.named_modules() if n.endswith(leaf)).weight.data
        weight.copy_(weight.roll(1, 0))
        assert distance(found, expected(model, causal=causal)) > SAME, leaf
        weight.copy_(weight.roll(-1, 0))


CLASSES = 3


def classifier(model: Path, path: Path) -> tuple[Path, Any]:
    """Checkpoint with a 16-bit classification head, and transformers' model of its values."""
    shutil.copytree(model, path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    torch.manual_seed(0)
    tensors["score.weight"] = (torch.randn(CLASSES, 128) / 8).bfloat16()
    save_file(tensors, file, metadata={"format": "pt"})
    names = {str(i): str(i) for i in range(CLASSES)}
    config = json.loads((path / "config.json").read_text()) | {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": names,
        "label2id": {name: int(i) for i, name in names.items()},
        "pad_token_id": tiny_llama.tokenizer().pad_token_id,
    }
    (path / "config.json").write_text(json.dumps(config))
    plain = LlamaForSequenceClassification(LlamaConfig.from_pretrained(path)).float().eval()
    values = {}
    for name in plain.state_dict():
        values[name] = tensors[name].float()
        if f"{name}_scale" in tensors:
            scales = tensors[f"{name}_scale"], tensors[f"{name}_scale_2"]
            values[name] = Nvfp4Tensor(tensors[name], *scales).dequantize()
    plain.load_state_dict(values)
    return path, plain


@pytest.mark.feature(
    "classification",
    "works",
    "`LLM.classify`: matches the transformers model with the decoded weights",
)
def test_classes(weight_only: Path, tmp_path: Path) -> None:
    path, plain = classifier(weight_only, tmp_path / "model")
    texts = [tiny_llama.TEXT[:n] for n in (9, 30, 70)]
    with started(str(path), runner="pooling") as llm:
        outputs = llm.classify(texts, use_tqdm=False)
        del llm
    tokenizer = tiny_llama.tokenizer()
    for text, output in zip(texts, outputs, strict=True):
        with torch.inference_mode():
            logits = plain(input_ids=torch.tensor([tokenizer.encode(text)])).logits[0]
        found = torch.tensor(output.outputs.probs)
        assert len(found) == CLASSES
        assert (found - logits.softmax(-1)).abs().max() < CLASS_SAME
        assert (found - logits.roll(1).softmax(-1)).abs().max() > 2 * CLASS_SAME
