"""FP8 layers of vLLM with the kernels of sm_90 on the emulator, against references on a CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import devices
from tests.emulator import EAGER
from tests.test_plugin.fusion.test_fp8_norms import loaded as loaded_block
from tests.test_plugin.linear.test_fp8_layers import mlp_of
from tests.test_plugin.linear.test_linear_layers import K

TOKENS = 5


@pytest.mark.parametrize("weight_only", [False, True], ids=["static", "per token"])
@pytest.mark.parametrize("which", ["norm", "mlp"])
def test_kernels_are_as_near_as_rounding(which: str, weight_only: bool, vllm_config: Any) -> None:
    devices.cutlass_or_skip()
    vllm_config.additional_config = {"nvfp4_tc": {"activation": "fp8"}}
    x = torch.randn(TOKENS, K).bfloat16()

    def results() -> list[Tensor]:
        with torch.random.fork_rng():
            if which == "mlp":
                return [mlp_of(weight_only=weight_only)[0](x)]
            torch.set_default_dtype(torch.bfloat16)  # which loading a block changes
            block = loaded_block(weight_only)
            return [*block(None, x, x), block(None, x, None)[0]]

    expected = results()
    with devices.emulated_ops(EAGER, "sm_90"):
        found = results()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6 * float(other.std()))
