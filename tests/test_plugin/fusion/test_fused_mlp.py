"""Fusion of MLPs, decided by the complete module that owns the projection."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fusion import fused_act_quant
from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.models.minicpm import MiniCPMMLP
from vllm.model_executor.models.qwen2_moe import Qwen2MoeMLP

from nvfp4_kernels.devices import standing_in
from nvfp4_kernels.formats.nvfp4 import global_scale_of, quantize_weight, row_global_scales
from tests.test_plugin.linear.test_linear_layers import (
    BF16_ROUNDING,
    INTERMEDIATE,
    TOKENS,
    K,
    Mlp,
    checkpoint,
    expected_output,
    finish,
    load,
    tensors_on_disk,
)
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.fusion.gate_up import FusedSiluAndMul, GateUp, owner_unsupported_reason
from vllm_fp4_plugin.linear.method import resolve_fusions

# The gate product, its SiLU and the product with up are each rounded to bfloat16.
MLP_ROUNDING = {"rtol": 2.0**-6, "atol": 2e-3}

pytestmark = pytest.mark.usefixtures("vllm_config")


@pytest.fixture
def quant() -> Nvfp4TcConfig:
    return Nvfp4TcConfig(checkpoint())


def unsupported_reason(owner: Any) -> str | None:
    return owner_unsupported_reason(owner, owner.gate_up_proj)


class Scaling(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        gate_up, _ = self.gate_up_proj(x)
        return self.act_fn(gate_up * 0.5)


def test_an_mlp_that_allows_it(quant: Nvfp4TcConfig) -> None:
    assert unsupported_reason(Mlp(quant, SiluAndMul)) is None


MLPS: dict[str, Callable[[Nvfp4TcConfig], Module]] = {
    "Llama": lambda c: LlamaMLP(K, INTERMEDIATE, "silu", c, prefix="mlp"),
    "MiniCPM": lambda c: MiniCPMMLP(K, INTERMEDIATE, "silu", 0.0, c, prefix="mlp"),
    "shared expert": lambda c: Qwen2MoeMLP(
        K, INTERMEDIATE, "silu", c, reduce_results=False, expert_gate=torch.nn.Identity(),
        prefix="mlp.shared_expert",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MLPS)
def test_mlps_of_vllm(name: str, quant: Nvfp4TcConfig) -> None:
    mlp: Any = MLPS[name](quant)
    for _ in range(2):
        resolve_fusions(mlp)
        assert mlp.gate_up_proj.quant_method.plan.gate_up


def test_one_class_two_activations(quant: Nvfp4TcConfig) -> None:
    """MiniCPM's class serves SiLU and FATReLU: the module's own activation decides."""
    mlp = MiniCPMMLP(K, INTERMEDIATE, "fatrelu", 0.1, quant, prefix="mlp")
    expected = "not fused: MiniCPMMLP.act_fn is FatreluAndMul, not our SiluAndMul"
    assert unsupported_reason(mlp) == expected


def test_the_reason_is_in_the_report(quant: Nvfp4TcConfig) -> None:
    with standing_in("cpu", "sm_90"):
        mlp = torch.nn.Sequential(Scaling(quant, SiluAndMul))
        [planned] = quant.startup.products.values()
        resolve_fusions(mlp)
        resolve_fusions(mlp)
    record = quant.startup.report.layers[-1]
    assert record.kernel == "nvfp4_gemm_w4a16/wgmma (sm_90)"
    start = "not fused: Scaling.forward uses gate_up_proj's result elsewhere than in a layer"
    assert f"{start} (test_fused_mlp.py:" in record.reason
    [product] = quant.startup.products.values()
    assert planned.layer.gate_up
    assert not product.layer.gate_up


@pytest.mark.parametrize("online", [False, True], ids=["checkpoint", "quantised at load"])
def test_a_layer_that_must_not_fuse_returns_its_product(online: bool, quant: Nvfp4TcConfig) -> None:
    torch.manual_seed(1)
    x = torch.randn(TOKENS, K, dtype=torch.bfloat16)
    input_scale = global_scale_of(x)
    mlp = Scaling(Nvfp4TcConfig() if online else quant, SiluAndMul)
    layer: Any = mlp.gate_up_proj
    weights = [torch.randn(INTERMEDIATE, K).bfloat16() for _ in range(2)]
    shards = [quantize_weight(weight) for weight in weights]
    for shard_id, (weight, shard) in enumerate(zip(weights, shards, strict=True)):
        if online:
            layer.weight.weight_loader(layer.weight, weight, shard_id)
        else:
            load(layer, tensors_on_disk(shard, input_scale, checkpoint()), shard_id)
    finish(layer)
    expected = expected_output(x, shards, row_global_scales(x) if online else input_scale)
    torch.testing.assert_close(layer(x)[0].double(), expected, **BF16_ROUNDING)
    gate, up = (expected * 0.5).chunk(2, dim=-1)
    out = mlp(x).double()
    torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up, **MLP_ROUNDING)


def test_modules_that_were_changed(quant: Nvfp4TcConfig) -> None:
    def mlp() -> Any:
        return Mlp(quant, SiluAndMul)

    replaced = mlp()
    replaced.forward = lambda x: replaced.gate_up_proj(x)[0] * 2
    assert unsupported_reason(replaced) == "not fused: the forward of this Mlp was replaced"

    twice = mlp()
    twice.all = torch.nn.ModuleList([twice.gate_up_proj])
    assert unsupported_reason(twice) == "not fused: Mlp holds it under another name too"

    for hooked in ("gate_up_proj", "act_fn"):
        for register in ("register_forward_hook", "register_forward_pre_hook"):
            watched = mlp()
            getattr(getattr(watched, hooked), register)(lambda *_: None)
            assert (
                unsupported_reason(watched)
                == "not fused: Mlp has hooks at its projection or activation"
            )

    other = mlp()
    unknown = "not fused: the module that calls it is not known"
    assert owner_unsupported_reason(other, mlp().gate_up_proj) == unknown
    assert owner_unsupported_reason(None, other.gate_up_proj) == unknown


def test_handover_calls_the_activation(
    monkeypatch: pytest.MonkeyPatch, quant: Nvfp4TcConfig
) -> None:
    """The helper checks only the activation's class, whatever the next layer accepts."""
    producers = fused_act_quant._FUSED_ACT_QUANT
    assert producers
    assert all(activation is not FusedSiluAndMul for activation, _ in producers)
    activation = Mlp(quant, SiluAndMul).act_fn
    assert type(activation) is FusedSiluAndMul
    monkeypatch.setattr(activation, "forward", lambda given: ("called with", given))
    promise = GateUp(torch.ones(1), None, 1, "", None, 1, None, 0)
    for _, key in producers:
        monkeypatch.setattr(fused_act_quant, "get_input_quant_key", lambda _, key=key: key)
        out = fused_act_quant.maybe_fused_act_quant(activation, promise, torch.nn.Identity())
        assert out == ("called with", promise)
