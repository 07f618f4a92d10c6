"""Request features on an engine with prefix caching and chunked prefill.

The reference is an engine with neither feature. Both engines round the same sums to bfloat16, so
that log-probabilities differ only where float32 sums were added in another order; with 4-bit
activations such a difference may move a value to the next E2M1 step. Only beams were seen to
differ, because a beam is scored again from its start.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import tiny_llama
from tests.engine import Run, distance, started

pytestmark = pytest.mark.slow

SAME = 0.02  # mean |Δ log-probability|
PIECE = 16  # tokens of a step, and of a block
LONG, SHORT = tiny_llama.TEXT, tiny_llama.TEXT[:12]
TEXTS = [LONG, SHORT, LONG[:40] + "x"]


class Engines(NamedTuple):
    """Two engines in one process: one plain, one with prefix caching and ``PIECE``-token chunks."""

    plain: Any
    featured: Any


@pytest.fixture(scope="module")
def engines(modelopt: Path) -> Iterator[Engines]:
    forms = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
    features = forms | {
        "enable_prefix_caching": True, "max_num_batched_tokens": PIECE, "block_size": PIECE,
        "max_num_seqs": 4,
    }  # fmt: skip
    with (
        started(str(modelopt), **forms) as plain,
        started(str(modelopt), **features) as featured,
    ):
        yield Engines(plain, featured)
        del plain, featured


def sampling(**changes: Any) -> Any:
    from vllm import SamplingParams

    given = {"temperature": 0.0, "max_tokens": 12, "logprobs": 0, "ignore_eos": True}
    return SamplingParams(**(given | changes))


def ask(engine: Any, texts: list[str] = TEXTS, **changes: Any) -> list[Any]:
    """Outputs of an engine for ``texts``, with sampling parameters changed by ``changes``."""
    outputs: list[Any] = engine.generate(texts, sampling(**changes), use_tqdm=False)
    return outputs


def said(output: Any, number: int = 0) -> Run:
    """Tokens of a completion, with their log-probabilities."""
    completion = output.outputs[number]
    tokens = list(completion.token_ids)
    scored = zip(completion.logprobs, tokens, strict=True)
    return Run([candidates[token].logprob for candidates, token in scored], tokens, [])


def assert_same(found: list[Run], expected: list[Run]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.generated == other.generated
        assert distance(one, other) < SAME


@pytest.mark.feature(
    "prefix caching",
    "works",
    "second request hits the prefix cache (whole blocks); identical tokens",
)
def test_prefix_caching(engines: Engines) -> None:
    expected = [said(output) for output in ask(engines.plain)]
    engines.featured.reset_prefix_cache()
    ask(engines.featured)
    again = ask(engines.featured)
    assert [output.num_cached_tokens for output in again] == [64, 0, 32]
    assert_same([said(output) for output in again], expected)


@pytest.mark.feature(
    "chunked prefill", "works", "prompt prefilled in chunks of 16 tokens; identical tokens"
)
def test_chunked_prefill(engines: Engines) -> None:
    engines.featured.reset_prefix_cache()
    outputs = ask(engines.featured, [LONG])
    assert outputs[0].num_cached_tokens == 0
    config = engines.featured.llm_engine.vllm_config.scheduler_config
    assert config.max_num_batched_tokens == PIECE < len(outputs[0].prompt_token_ids)
    assert_same([said(outputs[0])], [said(ask(engines.plain, [LONG])[0])])


@pytest.mark.feature(
    "n > 1",
    "works",
    "n = 3 gives the samples of three single requests with consecutive seeds; identical tokens",
)
def test_several_samples(engines: Engines) -> None:
    text = "def"  # three of which are one piece, see test_seeds_with_chunked_prefill
    [output] = ask(engines.featured, [text], n=3, seed=7, temperature=1.0)
    alone = [ask(engines.plain, [text], seed=7 + i, temperature=1.0)[0] for i in range(3)]
    expected = [said(each) for each in alone]
    assert_same([said(output, number) for number in range(3)], expected)
    assert len({tuple(each.generated) for each in expected}) == 3


@pytest.mark.feature(
    "beam search",
    "works",
    "three beams: identical tokens; each score sums the model's log-probabilities, best beam first",
)
def test_beam_search(engines: Engines) -> None:
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=3, max_tokens=6)
    found, expected = (
        engine.beam_search([{"prompt": SHORT}], params, use_tqdm=False)[0].sequences
        for engine in (engines.featured, engines.plain)
    )
    assert [beam.tokens for beam in found] == [beam.tokens for beam in expected]
    scores = [beam.cum_logprob for beam in found]
    assert scores == sorted(scores, reverse=True)
    greedy = sum(said(ask(engines.plain, [SHORT], max_tokens=6)[0]).logprobs)
    assert scores[0] > greedy - 6 * SAME  # it may only be better
    for beam in found:
        [whole] = ask(engines.plain, [{"prompt_token_ids": beam.tokens}], prompt_logprobs=0)
        tail = zip(whole.prompt_logprobs[-6:], beam.tokens[-6:], strict=True)
        scored = sum(candidates[token].logprob for candidates, token in tail)
        assert beam.cum_logprob == pytest.approx(scored, abs=6 * SAME)


@pytest.mark.feature(
    "prompt log-probabilities",
    "works",
    "`prompt_logprobs` of every token of a chunked prompt match",
)
def test_prompt_log_probabilities(engines: Engines) -> None:
    def of(engine: Any) -> list[list[float]]:
        outputs = ask(engine, max_tokens=1, prompt_logprobs=2)
        return [
            [candidates[token].logprob for candidates, token in scored]
            for scored in (
                zip(o.prompt_logprobs[1:], o.prompt_token_ids[1:], strict=True) for o in outputs
            )
        ]

    for found, expected in zip(of(engines.featured), of(engines.plain), strict=True):
        assert distance(Run(found, [], []), Run(expected, [], [])) < SAME


FORMS = {
    "regex": "[0-9]{4}-[a-z]{3}",
    "choice": ["alpha", "beta"],
    "json": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.feature(
    "structured output", "works", "regex, choice and JSON schema: valid output, identical tokens"
)
def test_structured_output(form: str, engines: Engines) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    params = StructuredOutputsParams(**{form: FORMS[form]})
    asked = {"structured_outputs": params, "ignore_eos": False}
    found, expected = (
        ask(engine, [SHORT], max_tokens=24, **asked) for engine in (engines.featured, engines.plain)
    )
    assert found[0].outputs[0].finish_reason == "stop"
    text = found[0].outputs[0].text
    if form == "json":
        assert json.loads(text)["a"] in (1, 2)
    else:
        assert text in ("alpha", "beta") or (len(text) == 8 and text[4] == "-")
    assert_same([said(found[0])], [said(expected[0])])


@pytest.mark.feature(
    "several engines",
    "works",
    "two engines in one process, called in turn; the outputs of each are unchanged",
)
def test_several_engines(engines: Engines, weight_only: Path) -> None:
    first = [said(output) for output in ask(engines.plain)]
    with started(str(weight_only)) as other:
        own = [said(output) for output in ask(other)]
        assert [said(output) for output in ask(engines.plain)] == first
        assert [said(output) for output in ask(other)] == own
        del other
    assert own != first


@pytest.mark.feature(
    "seeds with chunked prefill",
    "not in vLLM on a CPU",
    "a seeded request with a chunked prompt ends the engine, with unquantised models too: "
    "torch's generator on a CPU has no offset to rewind",
)
def test_seeds_with_chunked_prefill(bf16: Path) -> None:
    settings = {"max_num_batched_tokens": PIECE, "quantization": None}
    with (
        started(str(bf16), **settings) as engine,
        pytest.raises(RuntimeError, match="CPU Generator does not use offset"),
    ):
        ask(engine, [LONG], seed=7, temperature=1.0)
    del engine
