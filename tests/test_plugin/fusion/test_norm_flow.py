"""Norms and the layers that consume them, in made-up modules and in vLLM's own classes."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

from nvfp4_kernels import Static, add_rms_norm_quantize, gemm, rms_norm_quantize
from nvfp4_kernels.devices import standing_in
from tests.test_kernels.compilation import check_op
from tests.test_plugin.linear.test_linear_layers import (
    TOKENS,
    K,
    checkpoint,
    load,
    quantised_shards,
    tensors_on_disk,
)
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.fusion.forward_analysis import Use, flow_of, flow_of_parameter
from vllm_fp4_plugin.linear.method import resolve_fusions

SCALE, EPS = torch.tensor(0.003), 1e-6
LINEAR = "model.layers.0.mixer.in_proj"

pytestmark = pytest.mark.usefixtures("vllm_config")


def projection(quant: Nvfp4TcConfig | None, name: str = "in_proj", n: int = 48) -> Any:
    prefix = f"model.layers.0.mixer.{name}"
    return ColumnParallelLinear(K, n, bias=False, quant_config=quant, prefix=prefix)


class Mixer(Module):
    def __init__(self, quant: Nvfp4TcConfig) -> None:
        super().__init__()
        self.in_proj = projection(quant)
        self.out_proj = RowParallelLinear(
            48, K, bias=False, quant_config=quant, prefix="model.layers.0.mixer.out_proj"
        )

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        out, _ = self.in_proj(hidden)
        return out


class Block(Module):
    """Decoder layer as in vLLM: the norm gets a residual except in the first layer."""

    MIXER: Any = Mixer

    def __init__(self, quant: Nvfp4TcConfig) -> None:
        super().__init__()
        self.mixer = self.MIXER(quant)
        self.norm = RMSNorm(K, eps=EPS)
        self.quant = quant

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> Any:
        if residual is None:
            residual = hidden
            hidden = self.norm(hidden)
        else:
            hidden, residual = self.norm(hidden, residual)
        return self.mixer(positions=positions, hidden=hidden), residual


@pytest.fixture(autouse=True)
def bfloat16() -> Any:
    """Set bfloat16, in which vLLM builds modules, as the default dtype."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def loaded(block: Any) -> Any:
    torch.manual_seed(5)
    block.norm.weight.data = 1 + torch.randn(K) / 4
    torch.set_default_dtype(torch.float32)
    [shard] = quantised_shards([48], [1.0])
    load(block.mixer.in_proj, tensors_on_disk(shard, SCALE, checkpoint()))
    block.mixer.in_proj.quant_method.process_weights_after_loading(block.mixer.in_proj)
    return block


def said_of(block: Any, name: str = "model.layers.0.norm") -> tuple[str, str]:
    """Kernel and reason that the report gives for the norm; empty if the report has no line."""
    resolve_fusions(block)
    records = [r for r in block.quant.startup.report.layers if r.name == name]
    return (records[0].kernel, records[0].reason) if records else ("", "")


@pytest.mark.parametrize("dims", [(TOKENS,), (2, 3)], ids=["tokens", "batch"])
@pytest.mark.parametrize("terms", [1, 2])
def test_to_the_bit_what_the_ops_say(terms: int, dims: tuple[int, ...], vllm_config: Any) -> None:
    vllm_config.additional_config = {"nvfp4_tc": {"activation_terms": terms}}
    block = loaded(Block(Nvfp4TcConfig(checkpoint())))
    layer, weight = block.mixer.in_proj, block.norm.weight.data
    x, residual = (torch.randn(*dims, K).bfloat16() for _ in range(2))
    product = layer.weight, layer.weight_scale, layer.alpha, [48]
    rows = x.view(-1, K), residual.view(-1, K)

    out, after = block(None, x, None)
    data, scales = rms_norm_quantize(rows[0], weight, EPS, Static(SCALE, terms))
    assert torch.equal(out, gemm(data, scales, *product, terms=terms).view(out.shape))
    assert after is x

    out, after = block(None, x, residual)
    data, scales, total = add_rms_norm_quantize(*rows, weight, EPS, Static(SCALE, terms))
    assert torch.equal(out, gemm(data, scales, *product, terms=terms).view(out.shape))
    assert torch.equal(after, total.view(x.shape))


def test_compiled_is_the_same() -> None:
    block = loaded(Block(Nvfp4TcConfig(checkpoint())))
    x, residual = (torch.randn(TOKENS, K).bfloat16() for _ in range(2))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for given in (None, residual):
        for found, expected in zip(compiled(x, x, given), block(x, x, given), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_opcheck(adds: bool, per_token: bool) -> None:
    torch.set_default_dtype(torch.float32)
    name = f"{'add_' * adds}rms_norm_quantize{'_per_token' * per_token}"
    x, residual = (torch.randn(TOKENS, K).bfloat16() for _ in range(2))
    rows = (x, residual) if adds else (x,)
    scale = () if per_token else (SCALE,)
    target = "nvfp4_kernels.quantize.rms_norm.reference:rms_norm_quantize"
    check_op(
        getattr(torch.ops.nvfp4_tc, name).default, (*rows, torch.ones(K), EPS, *scale, 2, target)
    )


def test_a_scale_per_token(vllm_config: Any) -> None:
    kernel, reason = said_of(Block(Nvfp4TcConfig()))
    assert kernel == "nvfp4_add_rms_norm_quantize_per_token/reference (cpu)"
    assert reason == "quantises for in_proj"


# --- norms left alone, and reasons --------------------------------------------------------------


class TwoReaders(Mixer):
    def __init__(self, quant: Nvfp4TcConfig) -> None:
        super().__init__(quant)
        self.gate = projection(quant, "gate")

    def forward(self, positions: Tensor, hidden: Tensor) -> Any:
        return self.in_proj(hidden)[0] * self.gate(hidden)[0]


class Reading(Mixer):
    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        return self.in_proj(hidden * 2)[0]


class Elsewhere(Mixer):
    """Mixer in which the norm feeds out_proj, and in_proj gets out_proj's result."""

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        return self.in_proj(self.out_proj(hidden)[0])[0]


class Unnamed(Mixer):
    def forward(self, positions: Tensor, *rest: Tensor) -> Tensor:
        return self.in_proj(rest[0])[0]


def block_of(mixer: Any) -> Callable[[], Any]:
    kind = type("Made", (Block,), {"MIXER": mixer})
    return lambda: kind(Nvfp4TcConfig(checkpoint()))


class Parallel(Block):
    """Block in which attention and the MLP read the same norm."""

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> Any:
        normed = self.norm(hidden)
        return self.mixer(positions=positions, hidden=normed) + self.other(normed)


class Escaping(Block):
    """Block that also adds the norm's result to the layer's result."""

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> Any:
        normed = self.norm(hidden)
        return self.mixer(positions=positions, hidden=normed) + normed


class EscapingFirst(Block):
    """Block that uses the norm's result otherwise before the layer reads it."""

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> Any:
        normed = self.norm(hidden)
        other = normed * 2
        out = self.mixer(positions=positions, hidden=normed)
        return out + other


class OfAnotherClass(Block):
    def __init__(self, quant: Nvfp4TcConfig) -> None:
        super().__init__(quant)
        self.norm = GemmaRMSNorm(K, eps=EPS)


def changed(change: Callable[[Any], None]) -> Callable[[], Any]:
    def block() -> Any:
        made = Block(Nvfp4TcConfig(checkpoint()))
        change(made)
        return made

    return block


LEFT_ALONE: dict[str, tuple[Callable[[], Any], str]] = {
    "two readers": (block_of(TwoReaders), "gate and in_proj read it"),
    "computed with": (block_of(Reading), "Reading.forward uses its input hidden elsewhere than"),
    "no such parameter": (block_of(Unnamed), "Unnamed.forward takes no parameter hidden"),
    "two modules": (
        lambda: Parallel(Nvfp4TcConfig(checkpoint())), "mixer and other read it"
    ),
    "escapes": (
        lambda: Escaping(Nvfp4TcConfig(checkpoint())),
        "Escaping.forward uses norm's result elsewhere than in a layer (test_norm_flow.py:",
    ),
    "escapes first": (
        lambda: EscapingFirst(Nvfp4TcConfig(checkpoint())),
        "EscapingFirst.forward uses norm's result elsewhere than in a layer (test_norm_flow.py:",
    ),
    "class": (
        lambda: OfAnotherClass(Nvfp4TcConfig(checkpoint())),
        "it is GemmaRMSNorm, not our RMSNorm",
    ),
    "variance": (
        changed(lambda b: setattr(b.norm, "variance_size_override", 32)),
        "its variance is of 32 elements of 96",
    ),
    "no weight": (changed(lambda b: setattr(b.norm, "has_weight", False)), "its weight is missing"),
    "float16": (
        changed(lambda b: setattr(b.norm.weight, "data", b.norm.weight.data.half())),
        "its weight is torch.float16",
    ),
    "other name": (changed(lambda b: b.add_module("again", b.norm)), "Block holds it under"),
    "forward": (
        changed(lambda b: setattr(b.mixer, "forward", lambda **_: None)),
        "the forward of this Mixer was replaced",
    ),
    "hooks": (
        changed(lambda b: b.mixer.register_forward_hook(lambda *_: None)),
        "there are hooks at this Mixer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name: str) -> None:
    make, expected = LEFT_ALONE[name]
    block = make()
    kernel, reason = said_of(block)
    assert kernel == "vLLM"
    assert reason.startswith(expected)
    assert getattr(block.norm, "feeding", None) is None


def test_a_layer_that_the_norm_does_not_feed() -> None:
    block = block_of(Elsewhere)()
    assert said_of(block) == (
        "nvfp4_add_rms_norm_quantize/reference (cpu)",
        "quantises for out_proj",
    )
    assert block.norm.feeding.layer is block.mixer.out_proj


@pytest.mark.parametrize("given", [{"fuse_norm": False}, {}], ids=["switched off", "all-reduce"])
def test_switched_off(given: dict[str, Any], vllm_config: Any) -> None:
    Block(Nvfp4TcConfig(checkpoint()))  # has our class put in the place of vLLM's
    vllm_config.additional_config = {"nvfp4_tc": given}
    if not given:
        vllm_config.compilation_config.pass_config.fuse_allreduce_rms = True
    kernel, reason = said_of(Block(Nvfp4TcConfig(checkpoint())))
    vllm_config.compilation_config.pass_config.fuse_allreduce_rms = False
    expected = "switched off (fuse_norm)" if given else "vLLM fuses it with an all-reduce"
    assert (kernel, reason) == ("vLLM", expected)


def test_switched_off_from_the_start(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report names norms of vLLM's class too, which no earlier model replaced by ours."""
    monkeypatch.delitem(op_registry_oot, "RMSNorm", raising=False)
    vllm_config.additional_config = {"nvfp4_tc": {"fuse_norm": False}}
    block = Block(Nvfp4TcConfig(checkpoint()))
    assert type(block.norm) is RMSNorm
    assert said_of(block) == ("vLLM", "switched off (fuse_norm)")


def test_weights_alone() -> None:
    """Layers with 16-bit activations need no quantising norm, and the report has no line."""
    assert said_of(Block(Nvfp4TcConfig(checkpoint(weight_only=True)))) == ("", "")


def test_on_blackwell_the_kernels_are_warmed_up() -> None:
    with standing_in("cpu", "sm_100"):
        block = Block(Nvfp4TcConfig(checkpoint()))
        resolve_fusions(block)
    norm = block.quant.startup.products["model.layers.0.norm"]
    assert (norm.dtype, norm.weight_dtype, norm.k, norm.terms) == ("bfloat16", "bfloat16", K, 1)
    assert not norm.per_token


# --- vLLM's own classes -------------------------------------------------------------------------

FED = {  # by the decoder layer's class; what its norms feed, of those that feed one layer alone
    "llama:LlamaDecoderLayer": {
        "input_layernorm": "self_attn.qkv_proj", "post_attention_layernorm": "mlp.gate_up_proj",
    },
    "qwen2:Qwen2DecoderLayer": {
        "input_layernorm": "self_attn.qkv_proj", "post_attention_layernorm": "mlp.gate_up_proj",
    },
    "qwen3:Qwen3DecoderLayer": {
        "input_layernorm": "self_attn.qkv_proj", "post_attention_layernorm": "mlp.gate_up_proj",
    },
    "qwen3_moe:Qwen3MoeDecoderLayer": {"input_layernorm": "self_attn.qkv_proj"},
    "mixtral:MixtralDecoderLayer": {"input_layernorm": "self_attn.qkv_proj"},
    "glm4_moe:Glm4MoeDecoderLayer": {"input_layernorm": "self_attn.qkv_proj"},
    "granite:GraniteDecoderLayer": {
        "input_layernorm": "self_attn.qkv_proj", "post_attention_layernorm": "mlp.gate_up_proj",
    },
}  # fmt: skip
PARTS = {
    "llama:LlamaDecoderLayer": ("LlamaAttention", "LlamaMLP"),
    "qwen2:Qwen2DecoderLayer": ("Qwen2Attention", "Qwen2MLP"),
    "qwen3:Qwen3DecoderLayer": ("Qwen3Attention", "Qwen3MLP"),
    "qwen3_moe:Qwen3MoeDecoderLayer": ("Qwen3MoeAttention", "Qwen3MoeSparseMoeBlock"),
    "mixtral:MixtralDecoderLayer": ("MixtralAttention", "MixtralMoE"),
    "glm4_moe:Glm4MoeDecoderLayer": ("Glm4MoeAttention", "Glm4MoE"),
    "granite:GraniteDecoderLayer": ("GraniteAttention", "GraniteMLP"),
}


@pytest.mark.parametrize("name", FED)
def test_what_vllms_norms_feed(name: str) -> None:
    module, _, kind = name.partition(":")
    models = import_module(f"vllm.model_executor.models.{module}")
    attention, mlp = PARTS[name]
    fed = {}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        [use] = flow_of(getattr(models, kind), norm, "norm", as_input=True).uses
        called = attention if use.attribute == "self_attn" else mlp
        flow = flow_of_parameter(getattr(models, called), use.parameter)
        if not flow.escape and len(flow.uses) == 1:
            [inside] = flow.uses
            fed[norm] = f"{use.attribute}.{inside.attribute}"
            assert inside == Use(inside.attribute, 0)
    assert fed == FED[name]
