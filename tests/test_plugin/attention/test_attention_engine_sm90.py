"""vLLM on CPU as on sm_90: decodes run compiled PTX, emulated, over vLLM's cache."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import devices, tiny_llama
from tests.emulator import randomised
from tests.engine import run
from tests.recorded_warmup import recorded
from tests.test_plugin.attention.flash_attention import flash_attn_varlen_func

pytestmark = pytest.mark.slow

# Mean difference of log-probabilities on a random network, which amplifies the rounding of softmax
# weights to bfloat16: as for sm_100.
SAME = {"auto": 0.06, "fp8": 0.12}  # FlashAttention rounds queries to E4M3 with an FP8 cache


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_serves_as_the_reference_does(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill is followed by single tokens, each stored by the kernel that attends to it."""
    devices.cutlass_or_skip()
    from vllm.v1.attention.backends import fa_utils

    from vllm_fp4_plugin.attention import hopper

    model = str(tiny_llama.save(tmp_path / "model", head_dim=64))
    arguments: dict[str, Any] = {
        "quantization": None, "attention_backend": "CUSTOM", "kv_cache_dtype": cache,
    }  # fmt: skip
    expected = run(model, **arguments)
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda: 3)
    prefills, decodes = [], []

    def flash(*given: Any, **named: Any) -> None:
        prefills.append(named["max_seqlen_q"])
        flash_attn_varlen_func(*given, **named)

    def decode(*given: Any, **named: Any) -> Any:
        decodes.append(len(given[0]))
        return exact(*given, **named)

    exact = hopper.decode_attention
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", flash, raising=False)
    monkeypatch.setattr(hopper, "decode_attention", decode)
    with devices.emulated_ops(randomised(1), "sm_90"), recorded() as kernels:
        emulated = run(model, **arguments)
    assert emulated.generated == expected.generated
    apart = np.abs(np.subtract(emulated.logprobs, expected.logprobs)).mean()
    print(f"log-probabilities differ by {apart} on average")
    assert apart < SAME[cache]
    assert min(prefills) > 1
    assert len(decodes) > len(prefills)
    assert kernels.launched
    assert kernels.launched <= kernels.warmup["attention's"]
