"""vLLM on CPU with the kernels of a GPU: experts run their compiled PTX, emulated."""

from pathlib import Path

import numpy as np
import pytest

from tests import devices, moe_checkpoints, moe_reference
from tests.emulator import randomised
from tests.engine import distance, run
from tests.recorded_warmup import Kernels, recorded
from vllm_fp4_plugin.kind import Kind

pytestmark = pytest.mark.slow

SAME = 0.02  # kernels and references, which add up in different orders
SAME_16_BIT = 0.03  # and transformers, of weights alone in 4 bits
CONFIG = moe_checkpoints.qwen3(num_hidden_layers=1)
GROUPED = "experts ×1: nvfp4_grouped_silu_mul_gemm"


def check_compiled(kernels: Kernels, *names: str) -> None:
    """Check that what ran was compiled while the server started, kernels of these names too."""
    made, parts = kernels.warmup["linear layers'"], ("Gemm", "Moe")
    launched = {k for k in kernels.launched if any(p in type(k).__name__ for p in parts)}
    assert launched <= made
    assert set(names) < {type(kernel).__name__ for kernel in launched}


@pytest.mark.arch("sm_100")
def test_blackwell_serves_as_the_references_do(tmp_path: Path) -> None:
    """Prefill of many tokens, then decode of one at a time."""
    devices.cutlass_or_skip()
    model = moe_checkpoints.write(tmp_path, CONFIG, {"experts": Kind.NVFP4})
    reference = run(str(model.path), attention_backend="CPU_ATTN")
    with devices.emulated_ops(randomised(1)), recorded() as kernels:
        emulated = run(str(model.path), attention_backend="CPU_ATTN")
    check_compiled(kernels, "MoeTopkRouteQuantizeSm100", "MoeCombine")
    assert f"{GROUPED}/block_scaled (sm_100), W4A4 static" in emulated.report
    assert emulated.generated == reference.generated
    apart = np.abs(np.subtract(emulated.logprobs, reference.logprobs)).max()
    print(f"apart {apart}")
    assert apart < SAME


@pytest.mark.arch("sm_100")
def test_blackwell_in_terms(tmp_path: Path) -> None:
    """Activations that a checkpoint leaves in 16 bits are sums of three terms."""
    devices.cutlass_or_skip()
    model = moe_checkpoints.write(tmp_path, CONFIG, {"experts": Kind.NVFP4_A16})
    with devices.emulated_ops(randomised(1)), recorded() as kernels:
        emulated = run(str(model.path), attention_backend="CPU_ATTN")
    check_compiled(kernels, "MoeTopkRouteQuantizeSm100", "MoeQuantizeSm100", "MoeCombine")
    why = "sm_100 has no W4A16 kernel; 3 terms lose less than bfloat16"
    assert f"{GROUPED}/block_scaled (sm_100), W4A4×3 per-token, {why}" in emulated.report
    assert distance(emulated, moe_reference.said(model)) < SAME_16_BIT


@pytest.mark.arch("sm_90")
def test_hopper(tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    model = moe_checkpoints.write(tmp_path, CONFIG, {"experts": Kind.NVFP4_A16})
    with devices.emulated_ops(randomised(1), "sm_90"), recorded() as kernels:
        emulated = run(str(model.path), attention_backend="CPU_ATTN")
    check_compiled(kernels, "MoeTopkRouteGather", "MoeCombine")
    assert f"{GROUPED}_w4a16/wgmma (sm_90), W4A16" in emulated.report
    assert distance(emulated, moe_reference.said(model)) < SAME_16_BIT
