"""vLLM on CPU with the attention kernel of sm_100: compiled PTX, emulated, over vLLM's cache."""

from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from tests import devices, tiny_llama
from tests.emulator import randomised
from tests.engine import run
from tests.recorded_warmup import recorded

pytestmark = pytest.mark.slow

# Mean difference of log-probabilities on a random network, which amplifies rounding: of the softmax
# weights to bfloat16; with FP8, of the queries and the weights to E4M3. About three times the
# difference seen.
SAME = {"auto": 0.06, "fp8": 0.12}


@pytest.mark.parametrize("kv_cache_dtype", SAME)
def test_serves_as_the_reference_does(
    kv_cache_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill of many tokens is followed by decodes of one token at a time."""
    devices.cutlass_or_skip()
    from nvfp4_kernels.attention import reference

    model = str(tiny_llama.save(tmp_path / "model", head_dim=64))
    arguments: dict[str, Any] = {
        "quantization": None, "attention_backend": "CUSTOM", "kv_cache_dtype": kv_cache_dtype,
        "new_tokens": 4,
    }  # fmt: skip
    expected = run(model, **arguments)

    def not_this(*_: Any) -> NoReturn:
        raise AssertionError("the reference ran")

    monkeypatch.setattr(reference, "paged_attention", not_this)
    with devices.emulated_ops(randomised(1)), recorded() as kernels:
        emulated = run(model, **arguments)
    assert emulated.generated == expected.generated
    apart = np.abs(np.subtract(emulated.logprobs, expected.logprobs)).mean()
    print(f"log-probabilities differ by {apart} on average")
    assert apart < SAME[kv_cache_dtype]
    assert len(kernels.launched) > 1
    assert kernels.launched <= kernels.warmup["attention's"]
