"""Engines on a CPU with ``VLLM_BATCH_INVARIANT``: log-probabilities of a prompt, bit for bit.

One engine answers the same prompts alone, in batches of up to 16, in chunks batched with others,
and from cached prefixes. The tests compare the log-probabilities of five candidates for each of 24
generated tokens, and in one test those of the prompt's tokens. Activations are in 16 bits or FP8:
in this small model, few products of NVFP4 activations are long enough for their sums to be rounded
at all.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.invariant_engine import PROMPTS, alone, answers, serve
from tests.test_plugin.attention.test_attention_cache import needs_cpu_build

pytestmark = [pytest.mark.slow, needs_cpu_build]


@pytest.fixture(scope="module", params=["16-bit", "fp8"])
def engine(weight_only: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    option = {"nvfp4_tc": {"activation": request.param}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_BATCH_INVARIANT", "1")
        with serve(weight_only, additional_config=option) as llm:
            yield llm


def test_differs_without(weight_only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers differ without the option. Runs first, because an engine keeps vLLM's variables."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    with serve(weight_only) as llm:
        expected = alone(llm, PROMPTS)
        assert llm.reset_prefix_cache()
        differs = answers(llm, PROMPTS * 2) != expected * 2
        del llm
    if not differs:
        pytest.skip("this CPU's products of a token come to the same in any batch of these")


@pytest.mark.feature(
    "batch invariance",
    "works",
    "`VLLM_BATCH_INVARIANT=1`: log-probabilities of prompt and output are bit-identical alone, "
    "in batches of up to 16, under chunked prefill beside other requests and from cached "
    "prefixes",
)
def test_batch(engine: Any) -> None:
    expected = alone(engine, PROMPTS)
    assert engine.reset_prefix_cache()
    batch = [PROMPTS[i % len(PROMPTS)] for i in range(16)]
    for prompt, found in zip(batch, answers(engine, batch), strict=True):
        assert found == expected[PROMPTS.index(prompt)], prompt
    # The prompts' prefixes are cached now; they come in another order and number.
    for prompt, found in zip(PROMPTS[::-1], answers(engine, PROMPTS[::-1]), strict=True):
        assert found == expected[PROMPTS.index(prompt)], prompt


def test_prompt(engine: Any) -> None:
    expected = alone(engine, PROMPTS, score=True)
    assert engine.reset_prefix_cache()
    assert answers(engine, PROMPTS * 2, score=True) == expected * 2
