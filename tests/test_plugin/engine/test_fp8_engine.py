"""Engines with FP8 activations on a CPU: near the 16-bit run, with every fusion and option.

Distances are mean absolute differences of log-probabilities.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import limits, preloaded
from tests.engine import Run, distance, run, started
from tests.test_plugin.engine.test_feature_lora import QUANTISED as QUANTISED_LORA
from tests.test_plugin.engine.test_feature_lora import adapter, apart, decoded, served

pytestmark = pytest.mark.slow

SAME = 0.04  # one rounding more or less; FP8 steps are an eighth as wide as NVFP4's
QUANTISED = 0.1  # from the 16-bit model; seen: .028 per token, .038 static, .079 of W4A4
WHY = "activation is fp8"
GEMM, PAIR = "nvfp4_gemm_w4a8/reference (cpu)", "nvfp4_silu_mul_gemm_w4a8/reference (cpu)"
NORM = "nvfp4_add_rms_norm_quantize_w4a8/reference (cpu)"

__all__ = ["adapter", "decoded", "served"]


def fp8(**options: Any) -> dict[str, Any]:
    return {"additional_config": {"nvfp4_tc": {"activation": "fp8", **options}}}


@pytest.fixture(scope="module")
def static(modelopt: Path) -> Run:
    return run(str(modelopt), **fp8())


@pytest.fixture(scope="module")
def exact(bf16: Path) -> Run:
    return run(str(bf16), quantization=None)


def test_calibrated_layers(modelopt: Path, static: Run, exact: Run) -> None:
    """FP8 activations are nearer to 16 bits than the NVFP4 that the checkpoint asks for."""
    four = run(str(modelopt))
    near, far = distance(static, exact), distance(four, exact)
    print(f"from 16 bits: W4A8 {near}, W4A4 {far}")
    assert 0 < near < far < QUANTISED
    lines = [line for line in static.report if "_proj ×" in line or "norm ×" in line]
    assert lines == [
        f"qkv_proj ×2: {GEMM}, W4A8 static, {WHY}",
        f"o_proj ×2: {GEMM}, W4A8 static, {WHY}; quantises its input itself: attention writes no "
        "FP8",
        f"gate_up_proj ×2: {PAIR}, W4A8 static, {WHY}; result quantised for down_proj",
        f"down_proj ×2: {GEMM}, W4A8 static, {WHY}",
        f"input_layernorm ×2: {NORM}, A8 static, quantises for qkv_proj",
        f"post_attention_layernorm ×2: {NORM}, A8 static, quantises for gate_up_proj",
    ]


def test_16_bits(modelopt: Path, weight_only: Path) -> None:
    """Activations stay as they are, on request, as of a checkpoint of weights alone."""
    requested = {"additional_config": {"nvfp4_tc": {"activation": "16-bit"}}}
    settings = {"kv_cache_dtype": "bfloat16", "new_tokens": 2}
    served = run(str(modelopt), **requested, **settings)
    assert served.logprobs == run(str(weight_only), **settings).logprobs
    why = "W4A16, activation is 16-bit"
    assert f"down_proj ×2: nvfp4_gemm_w4a16/reference (cpu), {why}" in served.report


def test_fused_norms_change_nothing(modelopt: Path, static: Run) -> None:
    apart = run(str(modelopt), **fp8(fuse_norm=False))
    assert apart.logprobs == static.logprobs
    assert apart.generated == static.generated


def test_fused_mlps_change_little(modelopt: Path, static: Run) -> None:
    moved = distance(run(str(modelopt), **fp8(fuse_mlp=False)), static)
    print(f"log-probabilities differ by {moved} in the mean")
    assert 0 < moved < SAME


@pytest.mark.parametrize("which", ["weight_only", "bf16"])
def test_a_scale_per_token(which: str, exact: Run, request: pytest.FixtureRequest) -> None:
    """Weights are quantised on disk, or at load."""
    served = run(str(request.getfixturevalue(which)), **fp8())
    away = distance(served, exact)
    print(f"from 16 bits {away}")
    assert 0 < away < QUANTISED
    reason = f"{WHY}; result in 16 bits: down_proj has a scale per token"
    assert f"gate_up_proj ×2: {PAIR}, W4A8 per-token, {reason}" in served.report
    norm = NORM.replace("quantize_", "quantize_per_token_")
    assert f"input_layernorm ×2: {norm}, A8 per-token, quantises for qkv_proj" in served.report


@pytest.mark.parametrize("which", ["modelopt", "weight_only"])
def test_compiled(which: str, request: pytest.FixtureRequest) -> None:
    model = str(request.getfixturevalue(which))
    eager, compiled = (run(model, enforce_eager=eager, **fp8()) for eager in (True, False))
    away = distance(eager, compiled)
    print(f"log-probabilities differ by {away} in the mean")
    assert away < SAME
    assert eager.report == compiled.report


def test_prefixes_from_the_cache(modelopt: Path) -> None:
    """The same prompt comes twice: the second request computes only its last token."""
    from vllm import SamplingParams, TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=[5 + n * 7 % 200 for n in range(33)])
    sampling = SamplingParams(max_tokens=4, temperature=0.0, logprobs=0, ignore_eos=True)
    given = {"enable_prefix_caching": True, "block_size": 16}
    with started(str(modelopt), **given, **fp8()) as engine:
        first, second = (engine.generate([prompt], sampling, use_tqdm=False)[0] for _ in range(2))
    assert second.num_cached_tokens == 32
    chosen = [
        [next(iter(each.values())).logprob for each in output.outputs[0].logprobs]
        for output in (first, second)
    ]
    assert chosen[0] == pytest.approx(chosen[1], abs=SAME)


def test_adapters(modelopt: Path, bf16: Path, served: Callable[..., Any]) -> None:
    """An adapter reads 16-bit inputs, so nothing before the layer quantises for it."""
    found, exact = served(modelopt, **fp8()), served(bf16, quantization=None)
    assert apart(found.adapted, exact.adapted) < QUANTISED_LORA
    assert apart(found.plain, exact.plain) < QUANTISED_LORA
    assert f"qkv_proj ×2: {GEMM}, W4A8 static, {WHY}" in found.report
    assert any("not fused: LoRA is enabled" in line for line in found.report)
    assert "input_layernorm ×2: vLLM, 16-bit, LoRA is enabled" in found.report


@pytest.mark.thorough
def test_two_ranks(modelopt: Path, static: Run) -> None:
    """Factors of rows are divided as the rows are; norms do not all-reduce for FP8."""
    arguments = [str(modelopt), json.dumps({"tensor_parallel_size": 2} | fp8())]
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        preloaded.command("tests.ranks", *arguments), env=environment,
        capture_output=True, text=True, check=False, timeout=limits.PROCESS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    first, second = json.loads(line)
    assert first == second
    moved = distance(Run(first["logprobs"], [], []), static)
    print(f"log-probabilities differ by {moved} in the mean")
    assert moved < SAME
    assert first["generated"] == static.generated
    norms = [line for line in first["report"] if line.startswith("post_attention_layernorm")]
    assert norms == [
        f"post_attention_layernorm ×2: {NORM}, A8 static, quantises for gate_up_proj; "
        "all-reduce before it: its kernel writes NVFP4 alone"
    ]
