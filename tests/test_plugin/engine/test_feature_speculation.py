"""Speculative decoding: with the prompt's n-grams, and with a draft model with any kind of weights.

The answers equal those of the engine without speculation. ``test_drafts`` covers EAGLE and heads in
the target's checkpoint.
"""

from pathlib import Path
from typing import Any

import pytest

from tests import tiny_llama
from tests.engine import started
from tests.test_plugin.attention.test_attention_cache import needs_avx512

pytestmark = pytest.mark.slow

TEXTS = [tiny_llama.TEXT, "import os", tiny_llama.TEXT[:40] + "x"]
NEW = 24


def ask(engine: Any) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    outputs = engine.generate(TEXTS, sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(modelopt: Path) -> list[list[int]]:
    with started(str(modelopt)) as engine:
        answers = ask(engine)
        del engine
    return answers


def speculated(target: Path, **config: Any) -> tuple[list[list[int]], int, list[str]]:
    """Answers, number of accepted proposals, and the method classes of a draft's layers."""
    settings = {"num_speculative_tokens": 3, **config}
    with started(str(target), speculative_config=settings, disable_log_stats=False) as engine:
        answers = ask(engine)
        counts = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
        worker = engine.llm_engine.model_executor.driver_worker.worker
        draft = getattr(worker.model_runner.drafter, "model", None)
        layers = [] if draft is None else draft.modules()
        methods = {type(m.quant_method).__name__ for m in layers if hasattr(m, "quant_method")}
        del engine, worker, draft, layers
    return answers, int(counts["vllm:spec_decode_num_accepted_tokens"]), sorted(methods)


@pytest.mark.feature("n-gram speculation", "works", "draft tokens are accepted; identical tokens")
def test_n_grams(modelopt: Path, expected: list[list[int]]) -> None:
    given = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    answers, accepted, _ = speculated(modelopt, **given)
    assert answers == expected
    assert accepted > NEW // 3


# vLLM's attention of a draft in 16 bits takes the target's FP8 cache.
@pytest.mark.parametrize(
    "draft", [pytest.param("bf16", marks=needs_avx512), "weight_only", "modelopt"]
)
@pytest.mark.feature(
    "draft model",
    "works",
    "draft in 16 bits, W4A16 and W4A4; draft tokens are accepted, identical tokens; on a GPU "
    "pass the draft's quantization as for EAGLE",
)
def test_draft_models(
    draft: str, modelopt: Path, expected: list[list[int]], request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(draft)
    answers, accepted, methods = speculated(modelopt, model=str(path))
    assert answers == expected
    assert accepted > len(TEXTS) * NEW // 3
    served = "UnquantizedLinearMethod" if draft == "bf16" else "Nvfp4LinearMethod"
    assert served in methods
    assert len({"UnquantizedLinearMethod", "Nvfp4LinearMethod"} & set(methods)) == 1
