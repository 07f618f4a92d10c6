"""Models that see, in real engines, given an image: towers in 16 bits, the rest in NVFP4."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    Qwen2VLImageProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from tests import tiny_llama
from tests.catalogue import checkpoint, reference
from tests.catalogue.common import QWEN3_VL_TEXT
from tests.catalogue.family import Family
from tests.engine import started
from tests.test_plugin.test_model_families import BY_NAME, QWEN_38, SAME, W4A16, weight_only

pytestmark = pytest.mark.slow

TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
FIRST = 300  # id that the catalogue's config gives the first of them
TEXT = f"<|vision_start|><|image_pad|><|vision_end|>{tiny_llama.TEXT}"
PIXELS = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}

QWEN_3_VL_EXPERTS = BY_NAME["Qwen 3 VL (experts, vision)"]
QWEN_3_VL = replace(
    QWEN_3_VL_EXPERTS,
    config={**QWEN_3_VL_EXPERTS.config, "model_type": "qwen3_vl", "text_config": QWEN3_VL_TEXT},
    fields={},
)


def processor() -> Any:
    """Qwen's, with the tokenizer of bytes."""
    tokenizer = tiny_llama.tokenizer()
    fillers = [f"<|{number}|>" for number in range(len(tokenizer), FIRST)]
    tokenizer.add_special_tokens({"additional_special_tokens": [*fillers, *TOKENS]})
    settings = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "size": PIXELS}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**settings),
        video_processor=Qwen3VLVideoProcessor(**settings),
        tokenizer=tokenizer,
    )


@dataclass(frozen=True)
class Case:
    """Family to show an image.

    Attributes:
        family: whose checkpoint.
        lines: beginnings of lines that the engine's report must have.
    """

    family: Family
    lines: tuple[str, ...]


PLAIN = "unquantized (vLLM), 16-bit, ignored"
CASES = {
    "Qwen 3.8": Case(QWEN_38, (f"proj ×1: {PLAIN}", f"in_proj_qkvz ×3: {W4A16}")),
    "Qwen 3 VL": Case(QWEN_3_VL, (f"proj ×1: {PLAIN}", f"qkv_proj ×2: {W4A16}")),
    "Qwen 3 VL, experts": Case(
        QWEN_3_VL_EXPERTS, (f"proj ×1: {PLAIN}", "experts ×2: nvfp4_experts/reference (cpu), W4A16")
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_image(case: Case, tmp_path: Path) -> None:
    from vllm import SamplingParams

    path = checkpoint.write(weight_only(case.family), tmp_path / "model", reference.even_out)
    processor().save_pretrained(path)
    roundings = reference.decode(path, tmp_path / "decoded")
    model = reference.load(AutoModelForImageTextToText, tmp_path / "decoded", roundings)
    pixels = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    prompt: Any = {"prompt": TEXT, "multi_modal_data": {"image": Image.fromarray(pixels)}}
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with started(str(path)) as llm:
        [output] = llm.generate(prompt, sampling, use_tqdm=False)
        report = llm.llm_engine.vllm_config.quant_config.startup.report.lines()
        del llm
    tokens = output.prompt_token_ids
    pairs = zip(output.prompt_logprobs[1:], tokens[1:], strict=True)
    found = torch.tensor([candidates[token].logprob for candidates, token in pairs])

    def distance(pixels: Any) -> float:
        inputs = processor()(text=TEXT, images=Image.fromarray(pixels), return_tensors="pt")
        assert inputs["input_ids"][0].tolist() == tokens
        with torch.inference_mode():
            scores = model(**inputs).logits[0, :-1].log_softmax(-1)
        expected = scores.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
        return float((found - expected).abs().mean())

    # .005 to .008 was seen; of Qwen 3 VL .047 where image tokens have the positions of text.
    assert distance(pixels) < SAME
    assert distance(255 - pixels) > SAME  # .10 to .21 was seen
    for line in case.lines:
        assert any(each.startswith(line) for each in report), (line, report)
