"""Vision-language models in real engines, given an image.

Vision towers are in 16 bits, the rest in NVFP4.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AutoTokenizer,
    Qwen2VLImageProcessor,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from tests import tiny_llama
from tests.catalogue import checkpoint, nemotron_vl, reference
from tests.catalogue.common import QWEN3_VL_TEXT
from tests.catalogue.family import Family
from tests.engine import started
from tests.test_plugin.engine.test_model_families import (
    BY_NAME,
    QWEN_38,
    SAME,
    W4A16,
    auto_class,
    weight_only,
)

pytestmark = pytest.mark.slow

TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
FIRST = 300  # id that the catalogue's config gives the first of them
SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
PIXELS = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}

QWEN_3_VL_EXPERTS = BY_NAME["Qwen 3 VL (experts, vision)"]
QWEN_3_VL = replace(
    QWEN_3_VL_EXPERTS,
    config={**QWEN_3_VL_EXPERTS.config, "model_type": "qwen3_vl", "text_config": QWEN3_VL_TEXT},
    fields={},
)


def processor() -> Any:
    """Processor of Qwen 3 VL with the byte tokenizer."""
    tokenizer = tiny_llama.tokenizer()
    fillers = [f"<|{number}|>" for number in range(len(tokenizer), FIRST)]
    tokenizer.add_special_tokens({"additional_special_tokens": [*fillers, *TOKENS]})
    settings = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "size": PIXELS}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**settings),
        video_processor=Qwen3VLVideoProcessor(**settings),
        tokenizer=tokenizer,
    )


def qwens_logits(model: Any, _: Path, tokens: Tensor, pixels: Tensor) -> Tensor:
    image = Image.fromarray(pixels.numpy())
    inputs = processor()(text=SHOWN + tiny_llama.TEXT, images=image, return_tensors="pt")
    assert torch.equal(inputs["input_ids"][0], tokens)
    logits: Tensor = model(**inputs).logits[0]
    return logits


def nemotrons_logits(model: Any, path: Path, tokens: Tensor, pixels: Tensor) -> Tensor:
    image = AutoTokenizer.from_pretrained(path, trust_remote_code=True).encode(nemotron_vl.IMAGE)
    embeddings = model.get_input_embeddings()(tokens)
    embeddings[tokens == image[0]] = nemotron_vl.features(path, pixels)
    logits: Tensor = model(inputs_embeds=embeddings[None]).logits[0]
    return logits


@dataclass(frozen=True)
class Case:
    """Model family and image of one test case.

    Attributes:
        family: family whose checkpoint is served.
        lines: prefixes of lines that the engine's report must contain.
        prompt: placeholder of the image in the prompt.
        size: size of the image.
        logits: function that returns the reference's logits, given the decoded model, checkpoint,
            tokens and pixels.
    """

    family: Family
    lines: tuple[str, ...]
    prompt: str = SHOWN
    size: tuple[int, int] = (64, 96)
    logits: Callable[[Any, Path, Tensor, Tensor], Tensor] = qwens_logits


PLAIN = "unquantized (vLLM), 16-bit, ignored"
CASES = {
    "Qwen 3.8": Case(QWEN_38, (f"proj ×1: {PLAIN}", f"in_proj_qkvz ×3: {W4A16}")),
    "Qwen 3 VL": Case(QWEN_3_VL, (f"proj ×1: {PLAIN}", f"qkv_proj ×2: {W4A16}")),
    "Qwen 3 VL, experts": Case(
        QWEN_3_VL_EXPERTS,
        (
            f"proj ×1: {PLAIN}",
            "experts ×2: nvfp4_grouped_silu_mul_gemm_w4a16/reference (cpu), W4A16",
        ),
    ),
    "Nemotron Nano 2 VL": Case(
        BY_NAME["Nemotron Nano 2 VL (Mamba-2 hybrid, vision)"],
        (f"in_proj ×1: {W4A16}", f"qkv_proj ×1: {W4A16}"),
        nemotron_vl.IMAGE,
        (nemotron_vl.SIDE, nemotron_vl.SIDE),
        nemotrons_logits,
    ),
}


@dataclass(frozen=True)
class Shown:
    """Result of an engine for a text after an image.

    Attributes:
        pixels: the image.
        report: report of the engine.
        distance: mean absolute difference between the engine's log-probabilities and the
            reference's for given pixels.
    """

    pixels: Tensor
    report: list[str]
    distance: Callable[[Tensor], float]


def shown(case: Case, tmp_path: Path, **engine_args: Any) -> Shown:
    """Serve the case's model, and send a random image with a text."""
    from vllm import SamplingParams

    family = weight_only(case.family)
    path = checkpoint.write(family, tmp_path / "model", reference.even_out)
    if case.logits is qwens_logits:
        processor().save_pretrained(path)
    roundings = reference.decode(path, tmp_path / "decoded")
    model = reference.load(auto_class(family), tmp_path / "decoded", roundings)
    pixels = torch.randint(0, 256, (*case.size, 3), dtype=torch.uint8)
    image = Image.fromarray(pixels.numpy())
    prompt: Any = {"prompt": case.prompt + tiny_llama.TEXT, "multi_modal_data": {"image": image}}
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    remote = {"trust_remote_code": family.surround is not None}
    with started(str(path), **(remote | engine_args)) as llm:
        [output] = llm.generate(prompt, sampling, use_tqdm=False)
        report = llm.llm_engine.vllm_config.quant_config.startup.report.lines()
        del llm
    pairs = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
    found = torch.tensor([candidates[token].logprob for candidates, token in pairs])
    tokens = torch.tensor(output.prompt_token_ids)

    def distance(pixels: Tensor) -> float:
        with torch.inference_mode():
            scores = case.logits(model, path, tokens, pixels)[:-1].log_softmax(-1)
        return float((found - scores.gather(-1, tokens[1:, None])[:, 0]).abs().mean())

    return Shown(pixels, report, distance)


@pytest.mark.feature(
    "images",
    "works",
    "Qwen 3.8, Qwen 3 VL, Nemotron Nano 2 VL: matches the transformers model with the decoded "
    "weights",
)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_image(case: Case, tmp_path: Path) -> None:
    of = shown(case, tmp_path)
    # .005 to .011 was seen; for Qwen 3 VL .047 if image tokens have the positions of text.
    assert of.distance(of.pixels) < SAME
    assert of.distance(255 - of.pixels) > SAME  # .08 to .26 was seen
    for line in case.lines:
        assert any(each.startswith(line) for each in of.report), (line, of.report)
