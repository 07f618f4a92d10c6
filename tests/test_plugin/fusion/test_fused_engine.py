"""Engines with ops that quantise their results, against engines without such fusion.

Norms and attention round where vLLM's do and quantise the values that ``quantize`` would get, so
that nothing changes. A fused MLP quantises float32 values without rounding them to 16 bits.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import launch_counts
from tests.engine import Run, distance, run, started
from tests.modelled.launches import TODAY, launches
from vllm_fp4_plugin.fusion import match_rotary

pytestmark = pytest.mark.slow

PAGE = 16
ROUNDING = 0.05  # moved by one rounding less in each MLP; seen: .016
NORM = "nvfp4_add_rms_norm_quantize/reference (cpu)"


def served(model: Path, **options: Any) -> Run:
    return run(str(model), additional_config={"nvfp4_tc": options})


@pytest.fixture(scope="module")
def fused(modelopt: Path) -> Run:
    return served(modelopt)


def test_norms_change_nothing(modelopt: Path, fused: Run) -> None:
    unfused = served(modelopt, fuse_norm=False)
    for norm, layer in (
        ("input_layernorm", "qkv_proj"),
        ("post_attention_layernorm", "gate_up_proj"),
    ):
        assert f"{norm} ×2: {NORM}, A4 static, quantises for {layer}" in fused.report
        assert f"{norm} ×2: vLLM, 16-bit, switched off (fuse_norm)" in unfused.report
    assert fused.logprobs == unfused.logprobs
    assert fused.generated == unfused.generated


def test_attention_changes_nothing(modelopt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotation is left to vLLM, which may round differently from the plugin: see the next test."""
    monkeypatch.setattr(match_rotary, "rotary_before", lambda *_: ("", None))
    fused, unfused = served(modelopt), served(modelopt, fuse_attention=False)
    said = "attn ×2: nvfp4_paged_attention_fp8_kv/reference (cpu), fp8_e4m3 KV cache, by default; "
    assert f"{said}result quantised for o_proj" in fused.report
    assert f"{said}result in 16 bits: switched off (fuse_attention)" in unfused.report
    assert fused.logprobs == unfused.logprobs
    assert fused.generated == unfused.generated


def test_rotation_changes_little(modelopt: Path, fused: Run) -> None:
    unfused = served(modelopt, fuse_attention=False)
    said = "by default; {}; result"
    assert any(said.format("queries and keys rotated") in line for line in fused.report)
    apart = said.format("rotary_emb apart: switched off (fuse_attention)")
    assert any(apart in line for line in unfused.report)
    moved = distance(fused, unfused)
    print(f"log-probabilities differ by {moved} in the mean")
    assert moved < ROUNDING  # 0 where vLLM rotates as we do


def test_mlps_change_little(modelopt: Path, fused: Run) -> None:
    apart = distance(fused, served(modelopt, fuse_mlp=False))
    print(f"log-probabilities differ by {apart} in the mean")
    assert 0 < apart < ROUNDING


def test_all_together_is_as_close_to_16_bits(bf16: Path, modelopt: Path, fused: Run) -> None:
    exact = run(str(bf16), quantization=None)
    apart = served(modelopt, fuse_mlp=False, fuse_norm=False, fuse_attention=False)
    near, far = distance(fused, exact), distance(apart, exact)
    print(f"from 16 bits {near} handed over, {far} each op alone")
    assert 0 < near < 1.1 * far  # what quantising costs is not more


@pytest.mark.parametrize("tokens", [PAGE + 1, 3 * PAGE + 1], ids=["short", "longer"])
def test_prompts_that_share_pages_which_their_step_fills(modelopt: Path, tokens: int) -> None:
    """The same prompt comes twice in a step: the second request computes only its last token.

    vLLM assigns it the pages of the first request, which are filled in the same step.
    """
    from vllm import SamplingParams, TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=[5 + n * 7 % 200 for n in range(tokens)])
    sampling = SamplingParams(max_tokens=4, temperature=0.0, logprobs=0, ignore_eos=True)
    given = {"enable_prefix_caching": True, "block_size": PAGE, "max_num_seqs": 4}
    said = []
    with started(str(modelopt), **given) as engine:
        for count in (3, 1):
            engine.reset_prefix_cache()
            outputs = engine.generate([prompt] * count, sampling, use_tqdm=False)
            cached = [output.num_cached_tokens for output in outputs]
            assert cached == [0, *[tokens - 1] * (count - 1)]
            said += [[next(iter(each.values())).logprob for each in output.outputs[0].logprobs]
                     for output in outputs]  # fmt: skip
    assert said[0] == pytest.approx(said[-1], abs=ROUNDING)
    assert all(each == said[0] for each in said[1:-1])


def test_launches_of_a_layer(modelopt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode takes seven launches, all of the plugin's kernels; a prefill takes eight."""
    launched = launch_counts.watch(monkeypatch)
    served(modelopt)
    # The list from which the time of a layer is modelled.
    listed = Counter(launch_counts.OPS.get(step.name, step.name) for step in launches(TODAY))
    assert launch_counts.of_a_layer(launched) == listed
