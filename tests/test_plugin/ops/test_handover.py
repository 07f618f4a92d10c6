"""Activations passed on as NVFP4, from a fused MLP's gate and up projection to down."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.models.qwen2_moe import Qwen2MoeMLP

from nvfp4_kernels import Static, gemm, quantize, silu_mul_gemm
from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.devices import standing_in
from tests.test_plugin.fusion.test_result_flow import ALONE
from tests.test_plugin.linear.test_linear_layers import (
    INTERMEDIATE,
    TOKENS,
    K,
    checkpoint,
    load,
    quantised_shards,
    tensors_on_disk,
)
from tests.vllm_classes import classes_with
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.fusion.forward_analysis import flow_of
from vllm_fp4_plugin.fusion.gate_up import PROJECTION
from vllm_fp4_plugin.linear.method import resolve_fusions
from vllm_fp4_plugin.ops import linear as linear_op
from vllm_fp4_plugin.ops.operands import QuantizedInput

pytestmark = pytest.mark.usefixtures("vllm_config")

SCALE, DOWN_SCALE = torch.tensor(0.003), torch.tensor(0.02)


class Whole(torch.nn.Module):
    """Gated MLP as in vLLM's models."""

    def __init__(self, config: Nvfp4TcConfig, down: Nvfp4TcConfig | None = None) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            K, [INTERMEDIATE] * 2, bias=False, quant_config=config, prefix="model.mlp.gate_up_proj"
        )
        self.act_fn = SiluAndMul()
        self.down_proj = RowParallelLinear(
            INTERMEDIATE, K, bias=False, quant_config=down or config, prefix="model.mlp.down_proj"
        )

    def forward(self, x: Tensor) -> Tensor:
        gate_up, _ = self.gate_up_proj(x)
        out, _ = self.down_proj(self.act_fn(gate_up))
        return out


def loaded(mlp: Any, weight_only: bool = False) -> Any:
    """MLP with random weights, loaded in vLLM's order."""
    torch.manual_seed(3)
    quant = checkpoint(weight_only=weight_only)
    for number, shard in enumerate(quantised_shards([INTERMEDIATE] * 2, [1.0, 8.0])):
        load(mlp.gate_up_proj, tensors_on_disk(shard, SCALE, quant), number)
    [shard] = quantised_shards([K], [1.0], INTERMEDIATE)
    load(mlp.down_proj, tensors_on_disk(shard, DOWN_SCALE, checkpoint()))
    for layer in (mlp.gate_up_proj, mlp.down_proj):
        layer.quant_method.process_weights_after_loading(layer)
    return mlp


@pytest.fixture
def kernels_called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that the ops call, in order."""
    names: list[str] = []
    find = linear_op.load_target

    def noted(target: str) -> Callable[..., Any]:
        names.append(target.partition(":")[2])
        return find(target)

    monkeypatch.setattr(linear_op, "load_target", noted)
    return names


@pytest.mark.parametrize("dims", [(TOKENS,), (2, 3)], ids=["tokens", "batch"])
@pytest.mark.parametrize("terms", [1, 2])
def test_nothing_is_quantised_twice(
    terms: int, dims: tuple[int, ...], kernels_called: list[str], vllm_config: Any
) -> None:
    """Results are bit-identical to the library's ops called one after the other."""
    vllm_config.additional_config = {"nvfp4_tc": {"activation_terms": terms}}
    mlp = loaded(Whole(Nvfp4TcConfig(checkpoint())))
    x = torch.randn(*dims, K).bfloat16()
    kernels_called.clear()
    out = mlp(x)
    assert kernels_called == ["quantize", "silu_mul_gemm", "gemm"]
    pair, down = mlp.gate_up_proj, mlp.down_proj
    hidden = silu_mul_gemm(
        *quantize(x.view(-1, K), Static(SCALE, terms=terms)),
        pair.weight[0], pair.weight_scale[0], pair.weight[1], pair.weight_scale[1],
        pair.alpha, terms=terms, output=Static(down.input_scale, terms),
    )  # fmt: skip
    expected = gemm(*hidden, down.weight, down.weight_scale, down.alpha, [K], terms=terms)
    assert out.shape == x.shape
    assert torch.equal(out.view(-1, K), expected)


def test_weights_alone_before_it(kernels_called: list[str]) -> None:
    """Gate and up have 16-bit activations; their result is nevertheless quantised for down."""
    before = Nvfp4TcConfig(checkpoint(weight_only=True))
    mlp = loaded(Whole(before, Nvfp4TcConfig(checkpoint())), weight_only=True)
    kernels_called.clear()
    mlp(torch.randn(TOKENS, K).bfloat16())
    assert kernels_called == ["silu_mul_gemm", "gemm"]


def test_compiled_is_the_same() -> None:
    mlp = loaded(Whole(Nvfp4TcConfig(checkpoint())))
    x = torch.randn(TOKENS, K).bfloat16()
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), mlp(x))


def said_of(mlp: Any) -> str:
    resolve_fusions(mlp)
    [record] = [r for r in mlp.config.startup.report.layers if r.name.endswith(PROJECTION)]
    return str(record.reason)


def planned(down: Callable[[Any], Any] | None = None, **config: Any) -> Any:
    """MLP that is built but not loaded; ``down`` builds the last layer."""
    quant = Nvfp4TcConfig(checkpoint(**config))
    mlp: Any = Whole(quant)
    mlp.__dict__["config"] = quant
    if down is not None:
        mlp.down_proj = down(quant)
    return mlp


def replicated(quant: Any) -> Any:
    return ReplicatedLinear(INTERMEDIATE, K, bias=False, quant_config=quant, prefix="m.down_proj")


def gathering(quant: Any) -> Any:
    return RowParallelLinear(
        INTERMEDIATE, K, bias=False, quant_config=quant, prefix="m.down_proj",
        input_is_parallel=False,
    )  # fmt: skip


def hooked(quant: Any) -> Any:
    layer = RowParallelLinear(INTERMEDIATE, K, bias=False, quant_config=quant, prefix="m.down_proj")
    layer.register_forward_pre_hook(lambda *_: None)
    return layer


def replaced(quant: Any) -> Any:
    layer: Any = RowParallelLinear(INTERMEDIATE, K, bias=False, quant_config=quant, prefix="m.d")
    layer.forward = lambda x: (x * 2, None)
    return layer


def online(quant: Any) -> Any:
    return RowParallelLinear(
        INTERMEDIATE, K, bias=False, quant_config=Nvfp4TcConfig(), prefix="m.down_proj"
    )


def unquantised(quant: Any) -> Any:
    return RowParallelLinear(INTERMEDIATE, K, bias=False, prefix="m.down_proj")


NOT_A_PART = "not a row-parallel layer of a part each"
REPORTS: dict[str, tuple[Callable[[Any], Any] | None, str]] = {
    "static": (None, "result quantised for down_proj"),
    "per token": (online, "result in 16 bits: down_proj has a scale per token"),
    "replicated": (replicated, f"Whole.down_proj is ReplicatedLinear, {NOT_A_PART}"),
    "splits its input": (gathering, f"Whole.down_proj is RowParallelLinear, {NOT_A_PART}"),
    "hooks": (hooked, "result in 16 bits: Whole.down_proj has hooks"),
    "forward": (replaced, "result in 16 bits: the forward of Whole.down_proj was replaced"),
    "unquantised": (unquantised, ""),
}


@pytest.mark.parametrize("name", REPORTS)
def test_what_the_report_says(name: str) -> None:
    down, expected = REPORTS[name]
    mlp = planned(down)
    assert said_of(mlp).endswith(expected)
    assert bool(mlp.gate_up_proj.quant_method.plan.out_terms) == (name == "static")


def test_on_hopper_nothing_is_said() -> None:
    with standing_in("cpu", "sm_90"):
        assert said_of(planned(weight_only=True)) == ""


def test_on_blackwell_the_kernel_is_warmed_up() -> None:
    with standing_in("cpu", "sm_100"):
        mlp = planned()
        assert "result quantised" in said_of(mlp)
    products = mlp.config.startup.products
    assert {name: each.layer.out_terms for name, each in products.items()} == {
        "model.mlp.gate_up_proj": 1,
        "model.mlp.down_proj": 0,
    }


def test_what_is_bound_is_in_the_hash(vllm_config: Any) -> None:
    hashes = set()
    for down in (None, hooked):
        vllm_config.additional_config = {}
        said_of(planned(down))
        hashes.add(vllm_config.compute_hash())
    assert len(hashes) == 2


def test_a_layer_of_16_bits_refuses_it() -> None:
    mlp = planned(weight_only=True)
    given = QuantizedInput(
        torch.zeros(3, INTERMEDIATE // 2, dtype=torch.uint8), torch.zeros(()), None,
        (3, INTERMEDIATE), torch.bfloat16, 1,
    )  # fmt: skip
    with pytest.raises(InvalidArgument, match=r"input is NVFP4 of 1 terms \(3, 176\), must be"):
        mlp.down_proj(given)
    with pytest.raises(AttributeError, match=r"asked it for 'contiguous'; serve with .*fuse_mlp"):
        given.contiguous()


# --- vLLM's own classes -------------------------------------------------------------------------

MLPS: dict[str, Callable[[Any], Any]] = {
    "Llama": lambda c: LlamaMLP(K, INTERMEDIATE, "silu", c, prefix="mlp"),
    "shared expert": lambda c: Qwen2MoeMLP(
        K, INTERMEDIATE, "silu", c, reduce_results=False, expert_gate=torch.nn.Identity(),
        prefix="mlp.shared_expert",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MLPS)
def test_mlps_of_vllm(name: str) -> None:
    mlp = MLPS[name](Nvfp4TcConfig(checkpoint()))
    resolve_fusions(mlp)
    assert mlp.gate_up_proj.quant_method.plan.out_terms == 1


OTHERS = {  # of the layers that are not called down_proj
    "exaone:ExaoneGatedMLP": "c_proj",
    "internlm2:InternLM2MLP": "w2",
    "qwen2_5_vl:Qwen2_5_VisionMLP": "Qwen2_5_VisionMLP.__init__ does more than make it",
    "models/kimi_k3/nvidia/model:KimiMLP": "KimiMLP.forward uses act_fn's result elsewhere",
}


def test_where_vllms_classes_take_their_activation() -> None:
    """Every new class, and every class with a changed verdict, must be read and listed above."""
    taken = {}
    for name, owner in classes_with(f"self.{PROJECTION}("):
        for activation in flow_of(
            owner, PROJECTION, "result" if name in ALONE else "pair"
        ).consumers:
            flow = flow_of(owner, activation, "result")
            taken[name] = flow.escape or " ".join(flow.consumers)
    assert len(taken) > 50
    others = {name: said for name, said in taken.items() if said != "down_proj"}
    assert others.keys() == OTHERS.keys()
    assert all(others[name].startswith(said) for name, said in OTHERS.items())
