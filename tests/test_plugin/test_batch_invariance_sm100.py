"""An engine with ``VLLM_BATCH_INVARIANT`` on sm_100's kernels, emulated: layers and attention.

Other ops run on vLLM's CPU kernels, as in ``test_batch_invariance_engine``.
"""

from pathlib import Path

import pytest

from tests import devices
from tests.emulator import randomised
from tests.recorded_warmup import recorded
from tests.test_plugin.attention.test_attention_cache import needs_cpu_build
from tests.test_plugin.engine.test_batch_invariance_engine import answers, serve

pytestmark = [pytest.mark.slow, needs_cpu_build]

TOKENS = 2
# The longer prompt is chunked after 48 tokens when alone, and after 39 beside the other one.
PROMPTS = ["import os", "def f(a, b):\n    return a + b\n\n\n" * 2]


def test_batch(modelopt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with devices.emulated_ops(randomised(1)), recorded() as kernels, serve(modelopt) as llm:
        expected = [answers(llm, [prompt], tokens=TOKENS) for prompt in PROMPTS]
        assert llm.reset_prefix_cache()
        found = answers(llm, PROMPTS, tokens=TOKENS)
        assert [[each] for each in found] == expected
        assert [[each] for each in answers(llm, PROMPTS[::-1], tokens=TOKENS)][::-1] == expected
        quantization = llm.llm_engine.vllm_config.quant_config
        report = "\n".join(quantization.startup.report.lines())
        del llm
    assert "nvfp4_gemm/block_scaled (sm_100, batch-invariant)" in report
    assert "nvfp4_paged_attention_fp8_kv/FmhaSm100 (sm_100, batch-invariant)" in report
    assert kernels.launched <= set().union(*kernels.warmup.values())
