"""Engine on CPU with the kernels of sm_100: a layer's ops run their compiled PTX, emulated."""

from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from nvfp4_kernels.attention import arguments as attention_arguments
from nvfp4_kernels.attention import reference as attention_reference
from nvfp4_kernels.attention import rotary_op, rotary_reference
from nvfp4_kernels.rotary.store import arguments as store_arguments
from nvfp4_kernels.rotary.store import reference as store_reference
from nvfp4_kernels.runtime import launch_cache
from nvfp4_kernels.runtime.replay import Launch
from tests import devices
from tests.emulator import randomised
from tests.engine import dequantized, distance, run
from tests.recorded_warmup import recorded
from tests.test_plugin.engine.test_engine import SAME_W4A16
from vllm_fp4_plugin.attention import cache

pytestmark = pytest.mark.slow

# Natural log-probability. Kernel and reference add up float32 in different orders, which moves a
# bfloat16 activation by one unit at times; the effect on this model stays below the bound.
SAME = 0.02

RESULTS = {
    "static": "result quantised for down_proj",
    "per-token": "result in 16 bits: down_proj has a scale per token",
}
# Mean difference with queries and softmax weights in FP8 too; about three times the value seen.
SAME_FP8 = 0.06
FEW = 4  # new tokens, each of a step that is emulated


def test_a_whole_layer(modelopt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer takes 7 launches (8 in a prefill), all emulated: none by vLLM, none by a reference.

    A prefill of many tokens is followed by single-token decodes over an FP8 cache; most launches
    are repeated from the launch cache.
    """
    devices.cutlass_or_skip()
    reference = run(str(modelopt), new_tokens=FEW)

    def not_this(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a reference or an op of vLLM's ran")

    monkeypatch.setattr(attention_reference, "paged_attention", not_this)
    monkeypatch.setattr(store_reference, "rotary_store", not_this)
    monkeypatch.setattr(rotary_reference, "rotary_attention", not_this)
    monkeypatch.setattr(RotaryEmbedding, "forward", not_this)
    monkeypatch.setattr(cache, "write", not_this)
    # Skip the checks that read tensor contents, as on a GPU: they would bypass the launch cache.
    for module in (attention_arguments, rotary_op, store_arguments):
        monkeypatch.setattr(module, "reads_contents", lambda _: False)
    repeated: set[str] = set()
    start = Launch.start

    def note(launch: Launch, *given: Any) -> None:
        repeated.add(type(launch.kernel).__name__)
        start(launch, *given)

    monkeypatch.setattr(Launch, "start", note)
    with (
        devices.emulated_ops(randomised(1)),
        recorded() as kernels,
        launch_cache.suspended(False),
    ):
        emulated = run(str(modelopt), new_tokens=FEW)
    attention = "queries and keys rotated; result quantised for o_proj"
    norm = "nvfp4_add_rms_norm_quantize/RmsNormQuantizeSm100 (sm_100), A4 static, quantises for"
    assert [line for line in emulated.report if "A4" in line or "attn" in line] == [
        "qkv_proj ×2: nvfp4_gemm/block_scaled (sm_100), W4A4 static",
        "o_proj ×2: nvfp4_gemm/block_scaled (sm_100), W4A4 static",
        "attn ×2: nvfp4_paged_attention_fp8_kv/FmhaSm100 (sm_100), fp8_e4m3 KV cache, by default; "
        + attention,
        "gate_up_proj ×2: nvfp4_silu_mul_gemm/block_scaled (sm_100), W4A4 static, "
        "result quantised for down_proj",
        "down_proj ×2: nvfp4_gemm/block_scaled (sm_100), W4A4 static",
        f"input_layernorm ×2: {norm} qkv_proj",
        f"post_attention_layernorm ×2: {norm} gate_up_proj",
    ]
    assert emulated.generated == reference.generated
    apart = distance(emulated, reference)
    print(f"log-probabilities differ by {apart} in the mean")
    assert apart < SAME_FP8
    made = kernels.warmup["linear layers'"] | kernels.warmup["attention's"]
    names = {type(kernel).__name__ for kernel in kernels.launched}
    assert names == {"BlockScaledGemm", "FmhaSm100", "RmsNormQuantizeSm100", "RotaryStore"}
    assert kernels.launched <= made
    assert repeated == names


@pytest.mark.parametrize("kind", ["static", "per-token"])
def test_serves_as_the_references_do(kind: str, modelopt: Path, bf16: Path) -> None:
    """A prefill is followed by single-token decodes, from quantising to the MLP's output."""
    devices.cutlass_or_skip()
    model = str(modelopt if kind == "static" else bf16)
    # test_attention_engine_sm100 covers attention; without AVX-512, vLLM's attention has no FP8.
    arguments: dict[str, Any] = {
        "attention_backend": "CPU_ATTN", "kv_cache_dtype": "bfloat16", "new_tokens": FEW
    }  # fmt: skip
    reference = run(model, **arguments)
    with devices.emulated_ops(randomised(1)), recorded() as kernels:
        emulated = run(model, **arguments)
    assert [line for line in emulated.report if "W4A4" in line] == [
        f"qkv_proj ×2: nvfp4_gemm/block_scaled (sm_100), W4A4 {kind}",
        f"o_proj ×2: nvfp4_gemm/block_scaled (sm_100), W4A4 {kind}",
        f"gate_up_proj ×2: nvfp4_silu_mul_gemm/block_scaled (sm_100), W4A4 {kind}, {RESULTS[kind]}",
        f"down_proj ×2: nvfp4_gemm/block_scaled (sm_100), W4A4 {kind}",
    ]
    assert emulated.generated == reference.generated
    apart = np.abs(np.subtract(emulated.logprobs, reference.logprobs)).max()
    print(f"log-probabilities differ by {apart} at most")
    assert apart < SAME
    made, launched = kernels.warmup["linear layers'"], kernels.launched
    print(f"launched {len(launched)} of {len(made)} kernels of the warmup")
    assert len(launched) > 4
    assert launched <= made


def test_weight_only_says_what_the_dequantised_model_says(weight_only: Path) -> None:
    """Activations that a checkpoint leaves in 16 bits become three-term sums, which are as exact.

    The reference is transformers' model with weights that the tests dequantise by themselves.
    """
    devices.cutlass_or_skip()
    with devices.emulated_ops(randomised(1)), recorded() as kernels:
        emulated = run(str(weight_only), attention_backend="CPU_ATTN", new_tokens=FEW)
    why = "sm_100 has no W4A16 kernel; 3 terms lose less than bfloat16"
    assert [line for line in emulated.report if "W4A" in line] == [
        f"qkv_proj ×2: nvfp4_gemm/block_scaled (sm_100), W4A4×3 per-token, {why}",
        f"o_proj ×2: nvfp4_gemm/block_scaled (sm_100), W4A4×3 per-token, {why}",
        f"gate_up_proj ×2: nvfp4_silu_mul_gemm/block_scaled (sm_100), W4A4×3 per-token, {why}; "
        f"{RESULTS['per-token']}",
        f"down_proj ×2: nvfp4_gemm/block_scaled (sm_100), W4A4×3 per-token, {why}",
    ]
    apart = distance(emulated, dequantized(weight_only))
    print(f"log-probabilities differ by {apart} in the mean")
    assert apart < SAME_W4A16
    made, launched = kernels.warmup["linear layers'"], kernels.launched
    layouts = [(type(k).__name__, k.tile if hasattr(k, "output") else k) for k in launched]
    counts = {(name, holder.terms.count) for name, holder in layouts}
    kinds = "BlockScaledGemm", "QuantizeSm100", "RmsNormQuantizeSm100"
    assert counts == {(kind, 3) for kind in kinds}
    assert len(launched) > 4
    assert launched <= made
