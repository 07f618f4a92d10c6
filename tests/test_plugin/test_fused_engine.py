"""Engines whose ops hand their results over quantised, beside engines whose ops do not.

Norms and attention round where vLLM's do and quantise what ``quantize`` would be given, so that
nothing changes.
A fused MLP quantises float32 values, and not what they are in 16 bits.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine import Run, distance, run
from tests.modelled.launches import TODAY, launches
from vllm_fp4_plugin import linear_op, norm_op
from vllm_fp4_plugin.attention import impl

pytestmark = pytest.mark.slow

ROUNDING = 0.05  # moved by one rounding less in each MLP; seen: .016
# What ops' kernels are called that the list of launches has under another name.
OPS = dict.fromkeys(("qkv_proj", "o_proj", "down_proj"), "gemm") | {
    "gate_up_proj": "silu_mul_gemm",
    "paged_attention": "paged_attention_quantized",
}
VLLMS = ("rotary_embedding",)
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


def test_attention_changes_nothing(modelopt: Path, fused: Run) -> None:
    unfused = served(modelopt, fuse_attention=False)
    said = "attn ×2: nvfp4_paged_attention_fp8_kv/reference (cpu), fp8_e4m3 KV cache, by default; "
    assert f"{said}result quantised for o_proj" in fused.report
    assert f"{said}result in 16 bits: switched off (fuse_attention)" in unfused.report
    assert fused.logprobs == unfused.logprobs
    assert fused.generated == unfused.generated


def test_mlps_change_little(modelopt: Path, fused: Run) -> None:
    apart = distance(fused, served(modelopt, fuse_mlp=False))
    print(f"log-probabilities differ by {apart} in the mean")
    assert 0 < apart < ROUNDING


def test_launches_of_a_layer(modelopt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the list has them that the time of a layer is modelled from, vLLM's rotation aside."""
    launched: Counter[str] = Counter()

    def counted(target: str) -> Callable[..., Any]:
        launched[target.partition(":")[2]] += 1
        return find(target)

    def counting(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def counted_act(*given: Any, **named: Any) -> Any:
            launched[name] += 1
            return act(*given, **named)

        return counted_act

    find = linear_op.function
    for module in (linear_op, norm_op):
        monkeypatch.setattr(module, "function", counted)
    for name in ("paged_attention", "paged_attention_quantized"):
        monkeypatch.setattr(impl, name, counting(name, getattr(impl, name)))
    store = counting("store", impl.PagedAttentionImpl.store)
    monkeypatch.setattr(impl.PagedAttentionImpl, "store", store)
    run(str(modelopt), attention_backend="CUSTOM")
    layers = launched["silu_mul_gemm"]  # of all steps
    first = launched.pop("rms_norm_quantize")  # of a step's first layer, without a residual
    assert first == layers / 2
    launched["add_rms_norm_quantize"] += first
    listed = Counter(OPS.get(s.name, s.name) for s in launches(TODAY) if s.name not in VLLMS)
    assert {name: count / layers for name, count in launched.items()} == listed
