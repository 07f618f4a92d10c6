"""Engines with the plugin's attention, compared with engines with vLLM's own attention on CPU.

Four requests of 1 to 130 tokens run at once, from prefill to decode. The measure is the mean
absolute difference of log-probabilities over every prompt token and 24 generated tokens, as long as
both engines choose the same token. Both engines round a result to bfloat16 after float32 sums in
different orders, and vLLM's kernels also round the softmax weights to bfloat16; the bounds are
about three times the differences seen. Random networks amplify the differences, a trained network
does not.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny_llama
from tests.engine import CACHE_BLOCKS, local_engine
from tests.test_plugin.attention.test_attention_cache import needs_avx512, needs_cpu_build, truncate
from vllm_fp4_plugin.attention import cache, impl

pytestmark = [pytest.mark.slow, needs_cpu_build]

SAME_TRAINED = 0.012
SAME_RANDOM = 0.05
WRONG = 0.12
FP8 = 0.05  # of 16 bits, on the trained model

TEXTS = [
    tiny_llama.TEXT,
    "import os",
    "x",
    "class Value:\n    def __init__(self, value: int) -> None:\n        self.value = value\n"
    "        self.others = [value] * 10\n\n",
]


@dataclass(frozen=True)
class Answer:
    """Log-probabilities of a request: of the prompt without its first token, and of the answer."""

    prompt: list[float]
    tokens: list[int]
    written: list[float]
    cached_tokens: int


def serve(model: Path, *, rounds: int = 1, score: bool = True, **engine_args: Any) -> list[Answer]:
    """Start an engine without ``nvfp4-tc``, answer ``TEXTS``, and shut the engine down.

    Args:
        model: checkpoint.
        rounds: number of times that the texts are sent; the last answers count.
        score: whether to request the prompts' log-probabilities too, which keeps vLLM from using
            its prefix cache.
        engine_args: arguments of ``LLM``.
    """
    from vllm import SamplingParams

    settings = {
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "num_gpu_blocks_override": CACHE_BLOCKS,
    }
    # The penalty keeps the text from repeating itself, where every answer would be alike.
    sampling = SamplingParams(
        temperature=0.0, repetition_penalty=1.5, max_tokens=24, ignore_eos=True, logprobs=0,
        prompt_logprobs=0 if score else None,
    )  # fmt: skip
    with local_engine(str(model), **(settings | engine_args)) as llm:
        for _ in range(rounds):
            outputs = llm.generate(TEXTS, sampling, use_tqdm=False)
        del llm
        return [_answer(output) for output in outputs]


def _answer(output: Any) -> Answer:
    def chosen(candidates: Any, tokens: Any) -> list[float]:
        return [c[t].logprob for c, t in zip(candidates, tokens, strict=True)]

    prompt = output.prompt_logprobs
    [completion] = output.outputs
    tokens = list(completion.token_ids)
    return Answer(
        chosen(prompt[1:], output.prompt_token_ids[1:]) if prompt else [],
        tokens,
        chosen(completion.logprobs, tokens),
        output.num_cached_tokens or 0,
    )


def distance(a: list[Answer], b: list[Answer]) -> float:
    apart = []
    for x, y in zip(a, b, strict=True):
        if x.prompt and y.prompt:
            apart += [abs(p - q) for p, q in zip(x.prompt, y.prompt, strict=True)]
        for i, token in enumerate(x.tokens):
            if token != y.tokens[i]:
                break
            apart.append(abs(x.written[i] - y.written[i]))
    assert len(apart) > 40  # they did not part at once
    mean = sum(apart) / len(apart)
    print(f"distance {mean:.5f} over {len(apart)} tokens")
    return mean if math.isfinite(mean) else math.inf


@pytest.fixture(scope="module")
def engine() -> Callable[..., list[Answer]]:
    """Function ``serve``, cached by model and arguments."""
    seen: dict[str, list[Answer]] = {}

    def cached(model: Path, **arguments: Any) -> list[Answer]:
        key = json.dumps([str(model), arguments], sort_keys=True)
        if key not in seen:
            seen[key] = serve(model, **arguments)
        return seen[key]

    return cached


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Small random models of several architectures, by name."""
    directory = tmp_path_factory.mktemp("models")

    def saved(name: str) -> Path:
        path: Path = directory / name
        if not path.exists():
            torch.manual_seed(0)
            network = random_model(name).bfloat16()
            tiny_llama.amplify(network)
            network.save_pretrained(path)
            tiny_llama.tokenizer().save_pretrained(path)
        return path

    return saved


def random_model(name: str) -> Any:
    import transformers

    shape = tiny_llama.config().to_dict()
    kept = "hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim"
    common = {k: shape[k] for k in (*kept.split(), "vocab_size", "max_position_embeddings")}
    common |= {"num_key_value_heads": 2, "tie_word_embeddings": False}
    changes: dict[str, dict[str, Any]] = {
        "Llama": {"num_key_value_heads": 1},
        "Mistral": {"sliding_window": 16},
        "Gemma2": {
            "sliding_window": 16,
            "attn_logit_softcapping": 1.0,
            "query_pre_attn_scalar": 1,
            "tie_word_embeddings": True,
        },
        "GptOss": {
            "sliding_window": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "initial_context_length": 128,
        },
    }
    config = getattr(transformers, f"{name}Config")(**(common | changes[name]))
    network = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter, sinks in network.named_parameters():
        if parameter.endswith(".sinks"):
            sinks.data.normal_(2.0)
    return network


OURS = {"attention_backend": "CUSTOM"}
VLLMS = {"attention_backend": "CPU_ATTN"}


def test_requests_of_mixed_length(bf16: Path, engine: Callable[..., list[Answer]]) -> None:
    assert distance(engine(bf16, **OURS), engine(bf16, **VLLMS)) < SAME_TRAINED


def test_chunked_prefill(bf16: Path, engine: Callable[..., list[Answer]]) -> None:
    """Prompts come in chunks of at most 16 tokens, batched with requests that already decode."""
    chunked = engine(bf16, max_num_batched_tokens=16, block_size=16, **OURS)
    assert distance(chunked, engine(bf16, **VLLMS)) < SAME_TRAINED


def test_prefix_caching(bf16: Path, engine: Callable[..., list[Answer]]) -> None:
    """The second round of requests takes whole pages of keys from the prefix cache."""
    arguments: dict[str, Any] = {"enable_prefix_caching": True, "block_size": 16, **OURS}
    again = engine(bf16, rounds=2, score=False, **arguments)
    assert [answer.cached_tokens for answer in again] == [64, 0, 0, 112]
    assert distance(again, engine(bf16, **VLLMS)) < SAME_TRAINED


def test_cache_by_token(
    bf16: Path, engine: Callable[..., list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine runs with another supported cache layout; ``test_attention_steps`` tests more."""
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LBNHC")
    assert distance(serve(bf16, **OURS), engine(bf16, **OURS)) == 0


def test_compiled(bf16: Path, engine: Callable[..., list[Answer]]) -> None:
    """The engine is compiled; ``test_engine`` has tensor parallelism, 16-bit and FP8 caches."""
    compiled = engine(bf16, enforce_eager=False, **OURS)
    assert distance(compiled, engine(bf16, **OURS)) < SAME_TRAINED


def test_float16(bf16: Path, engine: Callable[..., list[Answer]]) -> None:
    ours, vllms = (engine(bf16, dtype="float16", **which) for which in (OURS, VLLMS))
    assert distance(ours, vllms) < SAME_TRAINED


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GptOss"])
def test_architectures(
    name: str, models: Callable[[str], Path], engine: Callable[..., list[Answer]]
) -> None:
    """Cases: multi-query attention; sliding windows; a soft cap; sinks, windows and experts."""
    model = models(name)
    assert distance(engine(model, **OURS), engine(model, **VLLMS)) < SAME_RANDOM


@pytest.mark.parametrize(
    ("name", "option"), [("Mistral", "window"), ("Gemma2", "soft_cap"), ("GptOss", "sinks")]
)
def test_ignored_option_is_noticed(
    name: str,
    option: str,
    models: Callable[[str], Path],
    engine: Callable[..., list[Answer]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutant: the op does not get the model's option."""
    right = engine(models(name), **VLLMS)
    exact = impl.paged_attention
    monkeypatch.setattr(
        impl, "paged_attention", lambda *a, **named: exact(*a, **(named | {option: None}))
    )
    assert distance(serve(models(name), **OURS), right) > WRONG


def test_wrong_slots_are_noticed(
    bf16: Path, engine: Callable[..., list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant: every key is written one slot too far."""
    exact = cache.write

    def shifted(k: Any, v: Any, kv: Any, slots: Any, *scales: Any) -> None:
        exact(k, v, kv, slots + 1, *scales)

    monkeypatch.setattr(cache, "write", shifted)
    assert distance(serve(bf16, **OURS), engine(bf16, **VLLMS)) > WRONG


def test_fp8_is_close_to_16_bits(bf16: Path, engine: Callable[..., list[Answer]]) -> None:
    fp8 = engine(bf16, kv_cache_dtype="fp8", **OURS)
    assert 0 < distance(fp8, engine(bf16, **OURS)) < FP8


@needs_avx512
def test_fp8_differs_from_vllms_by_its_rounding(
    bf16: Path, engine: Callable[..., list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Truncated mantissas, as in vLLM's CPU attention, make the plugin give vLLM's answer.

    ``test_attention_cache`` shows the truncation by itself.
    """
    vllms = engine(bf16, kv_cache_dtype="fp8", **VLLMS)
    nearest = distance(engine(bf16, kv_cache_dtype="fp8", **OURS), vllms)
    monkeypatch.setattr(cache, "quantize", truncate)
    cut = distance(serve(bf16, kv_cache_dtype="fp8", **OURS), vllms)
    assert cut < SAME_TRAINED < 2 * SAME_TRAINED < nearest


def test_what_is_not_supported_stops_the_engine(bf16: Path) -> None:
    with pytest.raises(
        ValueError,
        match="CUSTOM, which cannot serve a layer: kv-cache-dtype is fp8_e5m2, must be one of "
        "auto, bfloat16, float16, fp8, fp8_e4m3; serve with --attention-backend CPU_ATTN",
    ):
        serve(bf16, kv_cache_dtype="fp8_e5m2", **OURS)
