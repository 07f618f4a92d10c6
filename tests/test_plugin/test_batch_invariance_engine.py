"""Engines on a CPU with ``VLLM_BATCH_INVARIANT``: a prompt's log-probabilities, to the bit.

One engine answers the same prompts alone, in batches of up to 16, cut into chunks beside others,
and from cached prefixes. Of each request the log-probabilities of five candidates for each of 24
tokens are compared, and once those of the prompt. Activations are in 16 bits: few products of NVFP4
ones of this small model are long enough for their sums to be rounded at all.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import tiny_llama
from tests.engine import started
from tests.test_plugin.test_attention_cache import needs_cpu_build

pytestmark = [pytest.mark.slow, needs_cpu_build]

PREFIX = tiny_llama.TEXT
# The prefix fills whole blocks of the cache; the longest prompts are prefilled in chunks.
PROMPTS = [
    "x",
    "import os",
    PREFIX,
    PREFIX + "\n\nclass Value:\n",
    PREFIX + "\n\nclass Value:\n    def __init__(self, value: int) -> None:\n",
    "def f(a, b):\n    return a + b\n",
]
CHUNK = 48  # tokens of a step: prompts beside one another are cut anywhere

Answer = list[tuple[int, dict[int, float]]]


@pytest.fixture(scope="module")
def engine(weight_only: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_BATCH_INVARIANT", "1")
        with serve(weight_only) as llm:
            yield llm


def serve(model: Path, **engine_args: Any) -> Any:
    settings: dict[str, Any] = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": CHUNK,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
        "max_model_len": 256,
        "num_gpu_blocks_override": 256,
    }
    return started(str(model), **(settings | engine_args))


def answers(llm: Any, prompts: list[str], *, score: bool = False, tokens: int = 24) -> list[Answer]:
    """Tokens of each prompt's continuation, or of the prompt itself, with their candidates."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=1 if score else tokens, logprobs=5, ignore_eos=True,
        prompt_logprobs=0 if score else None,
    )  # fmt: skip
    found = []
    for output in llm.generate(prompts, sampling, use_tqdm=False):
        written, candidates = output.outputs[0].token_ids, output.outputs[0].logprobs
        if score:
            written, candidates = output.prompt_token_ids[1:], output.prompt_logprobs[1:]
        pairs = zip(written, candidates, strict=True)
        found.append([(t, {c: v.logprob for c, v in each.items()}) for t, each in pairs])
    return found


def alone(llm: Any, prompts: list[str], *, score: bool = False) -> list[Answer]:
    found = []
    for prompt in prompts:
        assert llm.reset_prefix_cache()
        found += answers(llm, [prompt], score=score)
    return found


def test_differs_without(weight_only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first test: vLLM remembers its variables while an engine is up."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    with serve(weight_only) as llm:
        expected = alone(llm, PROMPTS)
        assert llm.reset_prefix_cache()
        assert answers(llm, PROMPTS * 2) != expected * 2
        del llm


@pytest.mark.feature(
    "batch invariance",
    "works",
    "`VLLM_BATCH_INVARIANT`: log-probabilities of a prompt and of what follows are the same to the "
    "bit alone, in batches of up to 16, in chunks beside others and from cached prefixes",
)
def test_batch(engine: Any) -> None:
    expected = alone(engine, PROMPTS)
    assert engine.reset_prefix_cache()
    batch = [PROMPTS[i % len(PROMPTS)] for i in range(16)]
    for prompt, found in zip(batch, answers(engine, batch), strict=True):
        assert found == expected[PROMPTS.index(prompt)], prompt
    # Whose prefixes are cached now, in another order and number.
    for prompt, found in zip(PROMPTS[::-1], answers(engine, PROMPTS[::-1]), strict=True):
        assert found == expected[PROMPTS.index(prompt)], prompt


def test_prompt(engine: Any) -> None:
    expected = alone(engine, PROMPTS, score=True)
    assert engine.reset_prefix_cache()
    assert answers(engine, PROMPTS * 2, score=True) == expected * 2
