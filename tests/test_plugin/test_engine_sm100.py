"""vLLM on CPU with the kernels of sm_100: every linear layer runs its compiled PTX, emulated."""

from pathlib import Path

import numpy as np
import pytest

from tests import devices
from tests.emulator import randomised
from tests.engine import dequantized, distance, run
from tests.recorded_warmup import recorded
from tests.test_plugin.test_engine import SAME_W4A16

pytestmark = pytest.mark.slow

# Natural log-probability. Kernel and reference add up float32 in different orders, which moves a
# bfloat16 activation by one unit at times; what that does to this model stays below.
SAME = 0.02

RESULTS = {
    "static": "result quantised for down_proj",
    "per-token": "result in 16 bits: down_proj has a scale per token",
}


@pytest.mark.parametrize("kind", ["static", "per-token"])
def test_serves_as_the_references_do(kind: str, modelopt: Path, bf16: Path) -> None:
    """Prefill of many tokens, then decode of one at a time, from quantising to the MLP's output."""
    devices.cutlass_or_skip()
    model = str(modelopt if kind == "static" else bf16)
    # Attention has its own test, test_attention_engine_sm100; without AVX-512 vLLM's has no FP8.
    arguments = {"attention_backend": "CPU_ATTN", "kv_cache_dtype": "bfloat16"}
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
    """Activations that a checkpoint leaves in 16 bits are sums of three terms, as exact as those.

    Against transformers on weights that we dequantised ourselves.
    """
    devices.cutlass_or_skip()
    with devices.emulated_ops(randomised(1)), recorded() as kernels:
        emulated = run(str(weight_only), attention_backend="CPU_ATTN")
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
