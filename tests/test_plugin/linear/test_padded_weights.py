"""Linear layers of vLLM on sm_100, for K not a multiple of 32: weights are padded once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import MergedColumnParallelLinear

from tests import devices
from tests.emulator import randomised
from tests.test_plugin.linear.test_linear_layers import (
    BF16_ROUNDING,
    GAINS,
    INPUT_SCALE,
    checkpoint,
    finish,
    load,
    quantised_shards,
    tensors_on_disk,
)
from vllm_fp4_plugin.config import Nvfp4TcConfig

pytestmark = pytest.mark.slow

K, TOKENS = 80, 5
ROWS = [64, 64]
PREFIX = "model.layers.0.mlp.gate_up_proj"


class Mlp(torch.nn.Module):
    """Gate and up projections, with an activation that may fuse with them."""

    def __init__(self, config: Nvfp4TcConfig, activation: Callable[[], Any]) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            K, ROWS, bias=False, quant_config=config, prefix=PREFIX
        )
        self.act_fn = activation()

    def forward(self, x: Tensor) -> Tensor:
        gate_up, _ = self.gate_up_proj(x)
        out: Tensor = self.act_fn(gate_up)
        return out


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("fused", [False, True], ids=["gemm", "silu_mul_gemm"])
def test_only_activations_are_padded_per_call(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()
    torch.manual_seed(1)
    x = torch.randn(TOKENS, K, dtype=torch.bfloat16)
    shards = quantised_shards(ROWS, GAINS[:2], K)
    rows: list[int] = []
    functional_pad = functional.pad

    def pad(t: Tensor, *args: Any) -> Tensor:
        rows.append(t.shape[-2])
        return functional_pad(t, *args)

    def loaded() -> tuple[Mlp, Any]:
        quant = checkpoint()
        mlp = Mlp(Nvfp4TcConfig(quant), SiluAndMul if fused else torch.nn.Identity)
        layer: Any = mlp.gate_up_proj
        for number, shard in enumerate(shards):
            load(layer, tensors_on_disk(shard, INPUT_SCALE, quant), number)
        finish(layer)
        return mlp, layer

    reference, blocked = loaded()
    expected = reference(x)
    with devices.emulated_ops(randomised(1)):
        mlp, layer = loaded()
        monkeypatch.setattr(functional, "pad", pad)
        out = mlp(x)
    assert rows == [TOKENS]
    torch.testing.assert_close(out, expected, **BF16_ROUNDING)
    assert layer.weight.shape[-1] == 48  # 96 elements
    assert blocked.weight.shape[-1] == 40
    values = layer.quant_method.dequantize_weight(layer)
    assert torch.equal(values, blocked.quant_method.dequantize_weight(blocked))
    [record] = layer.quant_method.startup.report.layers
    op = "silu_mul_gemm" if fused else "gemm"
    assert record.kernel == f"nvfp4_{op}/block_scaled (sm_100)"
    assert record.weight_bytes == sum(p.numel() * p.element_size() for p in layer.parameters())
