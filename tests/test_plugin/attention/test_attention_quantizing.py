"""Attention that quantises for the following layer, in made-up modules and in vLLM's own."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.models.gpt_oss import OAIAttention
from vllm.model_executor.models.granite import GraniteAttention
from vllm.model_executor.models.llama import LlamaAttention
from vllm.model_executor.models.qwen2 import Qwen2Attention
from vllm.model_executor.models.qwen3 import Qwen3Attention
from vllm.model_executor.models.qwen3_moe import Qwen3MoeAttention

from nvfp4_kernels.dispatch import KernelTable
from tests.test_plugin.linear.test_linear_layers import K, checkpoint
from vllm_fp4_plugin.attention.impl import PagedAttentionImpl
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.fusion import attention_quantize
from vllm_fp4_plugin.fusion.attention_quantize import QuantizingAttention
from vllm_fp4_plugin.fusion.forward_analysis import Use, flow_of
from vllm_fp4_plugin.linear.method import resolve_fusions
from vllm_fp4_plugin.ops.operands import QuantizedInput

PREFIX = "model.layers.0.self_attn"

pytestmark = pytest.mark.usefixtures("vllm_config")


@pytest.fixture(autouse=True)
def own_layers(vllm_config: Any) -> None:
    """Empty the engine's table of attention layers."""
    vllm_config.compilation_config.static_forward_context = {}


class Block(Module):
    """Attention and an output projection, as in vLLM's models."""

    ATTENTION: Any = Attention

    def __init__(
        self, quant: Nvfp4TcConfig, heads: int = 4, kv_heads: int = 2, head_dim: int = 32
    ) -> None:
        super().__init__()
        self.quant = quant
        self.o_proj = RowParallelLinear(
            heads * head_dim, K, bias=False, quant_config=quant, prefix=f"{PREFIX}.o_proj"
        )
        self.attn = self.ATTENTION(
            heads, head_dim, 0.1, num_kv_heads=kv_heads, quant_config=quant, prefix=f"{PREFIX}.attn"
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = self.o_proj(self.attn(q, k, v))
        return out


class TwoReaders(Block):
    def __init__(self, quant: Nvfp4TcConfig) -> None:
        super().__init__(quant)
        self.gate = torch.nn.Linear(128, 1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended = self.attn(q, k, v)
        if q.requires_grad:
            return self.gate(attended)
        out, _ = self.o_proj(attended)
        return out


class Gated(Block):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        attended = self.attn(q, k, v) * q.sigmoid()
        out, _ = self.o_proj(attended)
        return out


class AnotherKind(Block):
    class ATTENTION(Attention):
        pass


def said_of(block: Any) -> str:
    """Reason that the report gives for the form of attention's result."""
    resolve_fusions(block)
    [record] = [r for r in block.quant.startup.report.layers if r.name == f"{PREFIX}.attn"]
    return record.reason.partition("; ")[2]


def quantizes(block: Any) -> bool:
    return type(block.attn) is QuantizingAttention and block.attn.impl.quantizes


def config(**changes: Any) -> Nvfp4TcConfig:
    return Nvfp4TcConfig(checkpoint(**changes))


def test_it_quantises_for_the_layer_that_it_feeds(vllm_config: Any) -> None:
    block = Block(config())
    assert said_of(block) == "result quantised for o_proj"
    assert quantizes(block)
    assert list(dict(block.named_modules())) == ["", "o_proj", "attn"]
    assert "attn: result quantised for o_proj" in str(vllm_config.additional_config)


def test_what_it_hands_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op gets o_proj's input scale and an NVFP4 buffer; o_proj gets a quantised activation."""
    block = Block(config())
    resolve_fusions(block)
    scale = torch.nn.Parameter(torch.tensor(0.5), requires_grad=False)
    block.o_proj.input_scale = scale
    called: dict[str, Any] = {}

    def op(
        query: Tensor, key: Tensor, value: Tensor, output: Tensor, *_: Any, **given: Any
    ) -> None:
        called.update(given, query=query, key=key, value=value, output=output)

    monkeypatch.setattr(torch.ops.vllm, "unified_attention_with_output", op)
    monkeypatch.setattr(
        "vllm_fp4_plugin.fusion.attention_quantize.unified_attention_with_output", op
    )
    q, k = torch.randn(5, 128).bfloat16(), torch.randn(5, 64).bfloat16()
    found = block.attn(q, k, k)
    assert isinstance(found, QuantizedInput)
    assert (found.shape, found.dtype, found.terms) == ((5, 128), torch.bfloat16, 1)
    assert called["output_scale"] is scale
    assert called["output_block_scale"] is found.scales
    assert called["output"].data_ptr() == found.data.data_ptr()
    assert called["output"].shape == (5, 4, 16)
    assert called["key"].shape == (5, 2, 32)
    with pytest.raises(ValueError, match=r"output_dtype is torch\.float32, must be None"):
        block.attn(q, k, k, output_dtype=torch.float32)


def replaced(module: Module) -> None:
    module.forward = lambda *_: None  # type: ignore[method-assign]


LEFT: dict[str, tuple[Callable[[], Any], str]] = {
    "two readers": (lambda: TwoReaders(config()), "gate and o_proj read it"),
    "D": (lambda: Block(config(), head_dim=16), "D is 16, no multiple of 32"),
    "rows": (
        lambda: Block(config(), heads=3, kv_heads=1),
        "its rows have 96 elements, no multiple of 64",
    ),
    "per token": (lambda: Block(Nvfp4TcConfig()), "it has a scale per token"),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    make, why = LEFT[name]
    block = make()
    assert said_of(block) == f"result in 16 bits: {why}"
    assert not quantizes(block)


@pytest.mark.parametrize("kind", [Gated, AnotherKind])
def test_nothing_is_said_of_what_does_not_feed_it(kind: Any) -> None:
    block = kind(config())
    assert said_of(block) == ""
    assert not quantizes(block)


def named_twice(block: Any) -> None:
    block.other = block.attn


def not_parallel(block: Any) -> None:
    block.o_proj.input_is_parallel = False


def hooked(module: Module) -> None:
    module.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda block: replaced(block), "the forward of this Block was replaced"),
        (lambda block: replaced(block.o_proj), "its forward was replaced"),
        (lambda block: hooked(block.attn), "there are hooks at it"),
        (named_twice, "Block holds it under another name too"),
        (not_parallel, "it is no row-parallel layer of a part each"),
    ],
)
def test_changed_by_others(change: Callable[[Any], None], why: str) -> None:
    block = Block(config())
    change(block)
    assert said_of(block) == f"result in 16 bits: {why}"
    assert not quantizes(block)


def test_options(vllm_config: Any) -> None:
    vllm_config.additional_config = {"nvfp4_tc": {"fuse_attention": False}}
    assert said_of(Block(config())) == "result in 16 bits: switched off (fuse_attention)"


def test_terms(vllm_config: Any) -> None:
    vllm_config.additional_config = {"nvfp4_tc": {"activation_terms": 2}}
    assert said_of(Block(config())) == "result in 16 bits: its input has 2 terms"


def test_lora(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_config, "lora_config", SimpleNamespace())
    assert said_of(Block(config())) == "result in 16 bits: LoRA is enabled"


def test_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_quantize, "PAGED_KERNELS", KernelTable("none", {}))
    assert said_of(Block(config())) == "result in 16 bits: there is no kernel for it here"


@pytest.mark.parametrize(
    "kind",
    [
        LlamaAttention,
        Qwen2Attention,
        Qwen3Attention,
        Qwen3MoeAttention,
        GraniteAttention,
        OAIAttention,
    ],
)
def test_classes_of_vllm(kind: Any) -> None:
    assert flow_of(kind, "attn", "result").uses == {Use("o_proj", 0)}


def test_memory_is_measured_with_zeros() -> None:
    impl = PagedAttentionImpl(4, 32, 0.1, 2)
    impl.quantizes = True
    data = torch.full((3, 4, 16), 7, dtype=torch.uint8)
    scales = torch.full((1, 2, 32, 16), 7, dtype=torch.uint8).view(torch.float8_e4m3fn)
    x: Any = torch.zeros(1)
    impl.forward(None, x, x, x, x, None, data, torch.ones(()), scales)
    assert not data.any()
    assert not scales.view(torch.uint8).any()
    with pytest.raises(ValueError, match=r"output_scale: .*fuse_attn_quant"):
        impl.forward(None, x, x, x, x, None, data)
