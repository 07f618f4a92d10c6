"""Models that embed texts in real engines, against transformers' models of their decoded weights.

Bound on the distance of two unit vectors: .003 to .005 was seen.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.catalogue import checkpoint, reference
from tests.catalogue.facts import named
from tests.engine import started
from tests.test_plugin.test_model_families import TEXTS, W4A16, tokens, weight_only

pytestmark = pytest.mark.slow

SAME = 0.01
PAGED = "attn ×2: nvfp4_paged_attention/reference (cpu), bfloat16 KV cache, by default"
NOT_OURS = "attn ×2: CPU_ATTN (vLLM), bfloat16 KV cache, not CUSTOM: encoder_only attention is not"


def expected(model: Any, *, causal: bool) -> list[Tensor]:
    """Unit vectors: of the last token, or of the mean of tokens that all see each other."""
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
    """Largest distance of a text's vectors."""
    return max(float((a - b).norm()) for a, b in zip(found, vectors, strict=True))


@pytest.mark.parametrize(
    ("family", "causal", "attention"),
    [
        pytest.param("Nemotron 3 Embed (bidirectional)", False, NOT_OURS, id="Nemotron 3 Embed"),
        pytest.param("Qwen 3 (dense)", True, PAGED, id="Qwen 3 Embedding"),
    ],
)
def test_embeddings(family: str, causal: bool, attention: str, tmp_path: Path) -> None:
    path = checkpoint.write(weight_only(named(family)), tmp_path / "model", reference.even_out)
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
