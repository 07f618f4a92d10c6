"""Attention that rotates and normalises heads: fused cases, unfused cases, and reasons."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module, ModuleList
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.cohere2_moe import Cohere2MoeAttention
from vllm.model_executor.models.commandr import CohereAttention
from vllm.model_executor.models.exaone4 import Exaone4Attention
from vllm.model_executor.models.exaone_moe import ExaoneMoeAttention
from vllm.model_executor.models.gemma3 import Gemma3Attention
from vllm.model_executor.models.gpt_oss import OAIAttention
from vllm.model_executor.models.granite import GraniteAttention
from vllm.model_executor.models.llama import LlamaAttention
from vllm.model_executor.models.llama4 import Llama4Attention
from vllm.model_executor.models.mixtral import MixtralAttention
from vllm.model_executor.models.qwen2 import Qwen2Attention
from vllm.model_executor.models.qwen3 import Qwen3Attention
from vllm.model_executor.models.qwen3_moe import Qwen3MoeAttention
from vllm.model_executor.models.step3p5 import Step3p5Attention

from nvfp4_kernels import rotary_store
from nvfp4_kernels.dispatch import KernelTable
from tests.test_plugin.linear.test_linear_layers import checkpoint
from vllm_fp4_plugin.attention.errors import UnsupportedAttention
from vllm_fp4_plugin.attention.impl import PagedAttentionImpl
from vllm_fp4_plugin.attention.metadata import PagedAttentionMetadata
from vllm_fp4_plugin.attention.rotation import Rotation, Unrotated
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.fusion import match_rotary
from vllm_fp4_plugin.fusion.forward_analysis import Use, flow_of, flow_of_parameter
from vllm_fp4_plugin.fusion.norm_module import NormOnOurKernel
from vllm_fp4_plugin.linear.method import resolve_fusions

PREFIX, HEADS, KV_HEADS, D, HIDDEN = "model.layers.0.self_attn", 4, 2, 32, 96
ROPE = {"rope_type": "default", "rope_theta": 10000.0}

pytestmark = pytest.mark.usefixtures("vllm_config")


@pytest.fixture(autouse=True)
def own_layers(vllm_config: Any) -> None:
    """Empty the engine's table of attention layers."""
    vllm_config.compilation_config.static_forward_context = {}


class Parts(Module):
    """Submodules of attention."""

    PARTIAL = 1.0

    def __init__(self, quant: Nvfp4TcConfig) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            HIDDEN, D, HEADS, KV_HEADS, bias=False, quant_config=quant, prefix=f"{PREFIX}.qkv_proj"
        )
        self.make_rope()
        self.attn = Attention(
            HEADS, D, 0.1, num_kv_heads=KV_HEADS, quant_config=quant, prefix=f"{PREFIX}.attn"
        )

    def make_rope(self) -> None:
        rope = {**ROPE, "partial_rotary_factor": self.PARTIAL}
        self.rotary_emb = get_rope(D, 64, rope_parameters=rope, dtype=torch.bfloat16)


class SelfAttention(Parts):
    """Attention as in vLLM's models."""

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = qkv.split([HEADS * D, KV_HEADS * D, KV_HEADS * D], dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        return self.attn(q, k, v)


class NormedParts(Parts):
    """Submodules of attention that normalises each query and key head before rotation."""

    NORM: Any = RMSNorm

    def __init__(self, quant: Nvfp4TcConfig) -> None:
        super().__init__(quant)
        self.q_norm, self.k_norm = self.NORM(D, eps=1e-6), self.NORM(D, eps=1e-6)


class Normed(NormedParts):
    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = qkv.split([HEADS * D, KV_HEADS * D, KV_HEADS * D], dim=-1)
        q_by_head = q.view(*q.shape[:-1], HEADS, D)
        q_by_head = self.q_norm(q_by_head)
        q = q_by_head.view(q.shape)
        k_by_head = k.view(*k.shape[:-1], KV_HEADS, D)
        k_by_head = self.k_norm(k_by_head)
        k = k_by_head.view(k.shape)
        q, k = self.rotary_emb(positions, q, k)
        return self.attn(q, k, v)


class NormedByOurs(Normed):
    NORM = NormOnOurKernel


class GemmaNormed(Normed):
    NORM = GemmaRMSNorm


class OneNorm(Normed):
    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = qkv.split([HEADS * D, KV_HEADS * D, KV_HEADS * D], dim=-1)
        q = self.q_norm(q.view(-1, HEADS, D)).view(q.shape)
        q, k = self.rotary_emb(positions, q, k)
        return self.attn(q, k, v)


class Scaled(SelfAttention):
    """Attention that scales queries between rotation and attention."""

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = qkv.split([HEADS * D, KV_HEADS * D, KV_HEADS * D], dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        return self.attn(q * 2, k, v)


class Swapped(SelfAttention):
    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = qkv.split([HEADS * D, KV_HEADS * D, KV_HEADS * D], dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        return self.attn(k, q, v)


class OtherPositions(SelfAttention):
    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = qkv.split([HEADS * D, KV_HEADS * D, KV_HEADS * D], dim=-1)
        q, k = self.rotary_emb(positions + 1, q, k)
        return self.attn(q, k, v)


class Sometimes(Parts):
    """Attention that rotates under a condition, as in vLLM's models with unrotated layers."""

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = qkv.split([HEADS * D, KV_HEADS * D, KV_HEADS * D], dim=-1)
        if self.use_rope or self.rotates_all:
            q, k = self.rotary_emb(positions, q, k)
        return self.attn(q, k, v)


class Rotating(Sometimes):
    use_rope, rotates_all = False, True


class NotRotating(Sometimes):
    use_rope, rotates_all = False, False


class OfItsInput(Sometimes):
    rotates_all = False

    @property
    def use_rope(self) -> bool:
        return bool(torch.rand(()) > 0.5)


class TwoCalls(SelfAttention):
    """Attention called in two places, once without the embedding."""

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = qkv.split([HEADS * D, KV_HEADS * D, KV_HEADS * D], dim=-1)
        if len(hidden) > 1:
            return self.attn(q, k, v)
        q, k = self.rotary_emb(positions, q, k)
        return self.attn(q, k, v)


class WithOffsets(SelfAttention):
    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = qkv.split([HEADS * D, KV_HEADS * D, KV_HEADS * D], dim=-1)
        q, k = self.rotary_emb(positions, q, k, 3)
        return self.attn(q, k, v)


class ByName(SelfAttention):
    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = qkv.split([HEADS * D, KV_HEADS * D, KV_HEADS * D], dim=-1)
        q, k = self.rotary_emb(positions=positions, query=q, key=k)
        return self.attn(q, k, v)


class OtherPositionsAtTimes(SelfAttention):
    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = qkv.split([HEADS * D, KV_HEADS * D, KV_HEADS * D], dim=-1)
        if len(hidden) > 1:
            positions = hidden
        q, k = self.rotary_emb(positions, q, k)
        return self.attn(q, k, v)


class NormedAtTimes(NormedParts):
    """Attention that normalises heads under a condition."""

    use_norm = True

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = qkv.split([HEADS * D, KV_HEADS * D, KV_HEADS * D], dim=-1)
        if self.use_norm:
            q = self.q_norm(q.view(-1, HEADS, D)).view(q.shape)
            k = self.k_norm(k.view(-1, KV_HEADS, D)).view(k.shape)
        q, k = self.rotary_emb(positions, q, k)
        return self.attn(q, k, v)


class NeverNormed(NormedAtTimes):
    use_norm = False


class NormedByInput(NormedParts):
    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = qkv.split([HEADS * D, KV_HEADS * D, KV_HEADS * D], dim=-1)
        if len(hidden) > 1:
            q = self.q_norm(q.view(-1, HEADS, D)).view(q.shape)
            k = self.k_norm(k.view(-1, KV_HEADS, D)).view(k.shape)
        q, k = self.rotary_emb(positions, q, k)
        return self.attn(q, k, v)


class Quarter(SelfAttention):
    PARTIAL = 0.25


class Block(Module):
    """Decoder layer around attention."""

    KIND: Any = SelfAttention

    def __init__(self, quant: Nvfp4TcConfig) -> None:
        super().__init__()
        self.self_attn = self.KIND(quant)
        self.quant = quant

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        return self.self_attn(positions=positions, hidden=hidden)


class Moved(Block):
    """Decoder layer that changes the positions."""

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        positions = positions + 1
        return self.self_attn(positions=positions, hidden=hidden)


class Stack(Module):
    """Model around a decoder layer."""

    def __init__(self, quant: Nvfp4TcConfig) -> None:
        super().__init__()
        self.layers = ModuleList([block_of(quant) for _ in range(1)])
        self.quant = quant

    @property
    def self_attn(self) -> Any:
        return self.layers[0].self_attn

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden = tokens
        for layer in self.layers:
            hidden = layer(positions, hidden)
        return hidden


def block_of(quant: Nvfp4TcConfig) -> Any:
    return type("Block", (Block,), {"__module__": __name__})(quant)


class Shifted(Stack):
    """Model that changes the positions for all layers."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden = tokens
        positions = positions + 2
        for layer in self.layers:
            hidden = layer(positions, hidden)
        return hidden


class Renamed(Stack):
    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden, places = tokens, self.shift(positions)
        for layer in self.layers:
            hidden = layer(places, hidden)
        return hidden


class Enumerated(Stack):
    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden = tokens
        if positions.ndim > 1 or positions is None:
            raise ValueError
        for _, layer in enumerate(self.layers[0:1]):
            hidden = layer(hidden=hidden, positions=positions)
        return hidden


class ByIndex(Stack):
    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        hidden = tokens
        for i in range(1):
            layer = self.layers[i]
            hidden = layer(positions, hidden)
        return hidden


class ByIndexShifted(Stack):
    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.layers[0](positions + 1, tokens)


class Wrapper(Module):
    """Model around another model; ``OuterWrapper`` skips the model in between."""

    KIND: Any = Stack

    def __init__(self, quant: Nvfp4TcConfig) -> None:
        super().__init__()
        self.model = self.KIND(quant)
        self.quant = quant

    @property
    def self_attn(self) -> Any:
        return self.model.self_attn

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.model(tokens, positions)


class WrapperThatShifts(Wrapper):
    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.model(tokens, positions - 1)


class NamedWrapper(Wrapper):
    """Wrapper that gathers the arguments in a dictionary first."""

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        given = {"tokens": tokens, "positions": positions}
        if self.training:
            given.update({"tokens": tokens + 1})
        model = self.model
        return model(**given)


class NamedWrapperThatShifts(Wrapper):
    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        given = {"tokens": tokens, "positions": positions}
        given["positions"] = self.shift(tokens)
        return self.model(**given)


class NamedWrapperThatUpdates(Wrapper):
    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        given = {"tokens": tokens, "positions": positions}
        given.update(self.others(tokens))
        return self.model(**given)


class OuterWrapper(Wrapper):
    KIND = Wrapper

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.model.model(tokens, positions=positions)


def block(kind: Any = SelfAttention, around: Any = Block) -> Any:
    made = type(around.__name__, (around,), {"KIND": kind, "__module__": __name__})
    return made(Nvfp4TcConfig(checkpoint()))


def said_of(block: Any) -> str:
    """Reason that the report gives for rotation."""
    resolve_fusions(block)
    [record] = [r for r in block.quant.startup.report.layers if r.name == f"{PREFIX}.attn"]
    return record.reason.partition("; ")[2]


def test_it_rotates_for_the_embedding(vllm_config: Any) -> None:
    found = block()
    rotary = found.self_attn.rotary_emb
    assert said_of(found) == "queries and keys rotated"
    assert type(found.self_attn.rotary_emb) is Unrotated
    assert found.self_attn.rotary_emb.rotary is rotary
    assert found.self_attn.attn.impl.rotation == Rotation(rotary, None, None)
    assert "attn: queries and keys rotated" in str(vllm_config.additional_config)


@pytest.mark.parametrize("kind", [Normed, NormedByOurs])
def test_norms_of_heads_too(kind: Any) -> None:
    found = block(kind)
    own = found.self_attn
    q_norm, k_norm = own.q_norm, own.k_norm
    assert said_of(found) == "queries and keys normalised, rotated"
    assert own.attn.impl.rotation.q_norm is q_norm
    assert own.attn.impl.rotation.k_norm is k_norm
    # A reload of the checkpoint finds the norms by name.
    assert own.q_norm is q_norm
    assert own.k_norm is k_norm
    weights = dict(found.named_parameters())
    assert weights["self_attn.q_norm.weight"] is q_norm.weight
    assert weights["self_attn.k_norm.weight"] is k_norm.weight
    x = torch.randn(3, HEADS, D)
    assert own.q_norm(x) is x


@pytest.mark.parametrize(
    ("kind", "why"),
    [(GemmaNormed, ""), (OneNorm, ", norms of heads apart: there are not two")],
)
def test_norms_that_stay(kind: Any, why: str) -> None:
    found = block(kind)
    norm = found.self_attn.q_norm
    assert said_of(found) == f"queries and keys rotated{why}"
    assert found.self_attn.q_norm is norm


def test_what_the_op_is_called_with() -> None:
    """Results are bit-identical to vLLM's modules and the cache write, in eager mode."""
    own = block(Normed).self_attn
    norms = [torch.randn(D).bfloat16() for _ in range(2)]
    for norm, weight in zip((own.q_norm, own.k_norm), norms, strict=True):
        norm.weight.data = weight
    rotation = Rotation(own.rotary_emb, own.q_norm, own.k_norm)
    q, k, v = (torch.randn(3, heads, D).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))
    positions, slots = torch.tensor([3, 9, 0]), torch.tensor([17, -1, 2])
    pages = [torch.zeros(2, KV_HEADS, 16, 2 * D).bfloat16() for _ in range(2)]
    found = rotation.store(q, k, v, pages[0], slots, positions, (None, None))
    expected = rotary_store(
        q, k, v, positions, own.rotary_emb.cos_sin_cache, pages[1], slots, q_norm=norms[0],
        k_norm=norms[1], eps=1e-6,
    )  # fmt: skip
    assert torch.equal(found, expected)
    assert torch.equal(*pages)
    assert pages[0].any()


def replaced(module: Module) -> None:
    module.forward = lambda *_: None  # type: ignore[method-assign]


def hooked(module: Module) -> None:
    module.register_forward_hook(lambda *_: None)


def shares_keys(found: Any) -> None:
    found.self_attn.attn.impl.kv_sharing_target_layer_name = "another"


LEFT: dict[str, tuple[Any, Any, str]] = {
    "swapped": (Swapped, Block, "it is called with them in another order"),
    "positions": (
        OtherPositions, Block,
        "OtherPositions is not seen to hand its positions on to rotary_emb",
    ),
    "positions at times": (
        OtherPositionsAtTimes, Block,
        "OtherPositionsAtTimes is not seen to hand its positions on to rotary_emb",
    ),
    "moved": (SelfAttention, Moved, "Moved is not seen to hand its positions on to self_attn"),
    "in two places": (TwoCalls, Block, "attn is called with something else too"),
    "offsets": (
        WithOffsets, Block, "it is called with more than positions, queries and keys"
    ),
    "a quarter": (Quarter, Block, "it rotates 8 elements of heads of 32"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_left_alone(name: str) -> None:
    kind, around, why = LEFT[name]
    found = block(kind, around)
    rotary = found.self_attn.rotary_emb
    assert said_of(found) == f"rotary_emb apart: {why}"
    assert found.self_attn.rotary_emb is rotary
    assert found.self_attn.attn.impl.rotation is None


def test_what_is_read_in_between() -> None:
    found = block(Scaled)
    said = "rotary_emb apart: Scaled.forward uses rotary_emb's result elsewhere than in a layer ("
    assert said_of(found).startswith(said)
    assert found.self_attn.attn.impl.rotation is None


@pytest.mark.parametrize("kind", [Rotating, ByName])
def test_layers_that_the_model_rotates(kind: Any) -> None:
    found = block(kind)
    assert said_of(found) == "queries and keys rotated"
    assert type(found.self_attn.rotary_emb) is Unrotated


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (NotRotating, "NotRotating calls no layer with rotary_emb's result"),
        (OfItsInput, "OfItsInput.forward has rotary_emb's result in q on some paths alone ("),
    ],
)
def test_layers_that_the_model_does_not_always_rotate(kind: Any, why: str) -> None:
    found = block(kind)
    rotary = found.self_attn.rotary_emb
    assert said_of(found).startswith(f"rotary_emb apart: {why}")
    assert found.self_attn.rotary_emb is rotary
    assert found.self_attn.attn.impl.rotation is None


def test_heads_that_a_flag_normalises() -> None:
    assert said_of(block(NormedAtTimes)) == "queries and keys normalised, rotated"


@pytest.mark.parametrize("kind", [NeverNormed, NormedByInput])
def test_heads_that_are_not_always_normalised(kind: Any) -> None:
    found = block(kind)
    assert said_of(found) == "queries and keys rotated"
    assert found.self_attn.attn.impl.rotation.q_norm is None
    x = torch.randn(3, HEADS, D)
    assert found.self_attn.q_norm(x) is not x


def model(kind: Any) -> Any:
    return kind(Nvfp4TcConfig(checkpoint()))


@pytest.mark.parametrize("kind", [Stack, Enumerated, ByIndex, Wrapper, NamedWrapper, OuterWrapper])
def test_models_that_hand_positions_to_their_layers(kind: Any) -> None:
    assert said_of(model(kind)) == "queries and keys rotated"


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Shifted, "Shifted.forward may change its positions (positions = positions + 2)"),
        (ByIndexShifted, "ByIndexShifted.forward may change its positions (positions + 1)"),
        (
            NamedWrapperThatShifts,
            "NamedWrapperThatShifts.forward may change its positions (given['positions'])",
        ),
        (
            NamedWrapperThatUpdates,
            "NamedWrapperThatUpdates.forward may change its positions (given.update)",
        ),
        (Renamed, "Renamed is not seen to hand its positions on to Block"),
        (
            WrapperThatShifts,
            "WrapperThatShifts.forward may change its positions (positions - 1)",
        ),
    ],
)
def test_models_that_change_positions(kind: Any, why: str) -> None:
    found = model(kind)
    assert said_of(found) == f"rotary_emb apart: {why}"
    assert found.self_attn.attn.impl.rotation is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda found: replaced(found.self_attn), "the forward of this SelfAttention was replaced"),
        (lambda found: replaced(found.self_attn.rotary_emb), "its forward was replaced"),
        (lambda found: hooked(found.self_attn.rotary_emb), "there are hooks at it"),
        (shares_keys, "its keys are another layer's"),
    ],
)
def test_changed_by_others(change: Callable[[Any], None], why: str) -> None:
    found = block()
    own = found.self_attn
    own._modules["rotary_emb"] = type(own.rotary_emb)(D, D, 64, 1e4, True, torch.bfloat16)
    change(found)
    assert said_of(found) == f"rotary_emb apart: {why}"


def test_options(vllm_config: Any) -> None:
    vllm_config.additional_config = {"nvfp4_tc": {"fuse_attention": False}}
    assert said_of(block()) == "rotary_emb apart: switched off (fuse_attention)"


@pytest.mark.parametrize(
    ("rope", "name"),
    [
        ({"rope_type": "dynamic", "alpha": 2.0}, "DynamicNTKAlphaRotaryEmbedding"),
        ({"mrope_section": [8, 4, 4]}, "MRotaryEmbedding"),
    ],
)
def test_embeddings_of_other_classes(rope: dict[str, Any], name: str) -> None:
    class Other(SelfAttention):
        def make_rope(self) -> None:
            self.rotary_emb = get_rope(D, 64, rope_parameters=ROPE | rope, dtype=torch.bfloat16)

    assert said_of(block(Other)) == f"rotary_emb apart: there is no kernel for {name}"


def test_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match_rotary, "KERNELS", KernelTable("none", {}))
    assert said_of(block()) == "rotary_emb apart: there is no kernel for it here"


@pytest.mark.parametrize(
    "kind",
    [
        LlamaAttention, MixtralAttention, OAIAttention, Qwen2Attention,
        Qwen3Attention, Qwen3MoeAttention, Gemma3Attention,
    ],
)  # fmt: skip
def test_classes_of_vllm(kind: Any) -> None:
    for which, place in (("pair", 0), ("second", 1)):
        assert flow_of(kind, "rotary_emb", which, as_input=True).uses == {Use("attn", place)}
    assert Use("rotary_emb", 0) in flow_of_parameter(kind, "positions").uses


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        (GraniteAttention, ("use_rope",)),
        (Exaone4Attention, ("sliding_window", "apply_rope_all_layers")),
        (ExaoneMoeAttention, ("use_rope",)),
        (Cohere2MoeAttention, ("force_rope", "sliding_window")),
        (CohereAttention, ("v1", "sliding_window")),
        (Step3p5Attention, ("use_rope",)),
    ],
)
def test_classes_of_vllm_that_rotate_some_layers(kind: Any, flags: tuple[str, ...]) -> None:
    """A flag of the layer decides whether to rotate; the class alone is undecided."""
    asked = "rotary_emb", "pair", True
    assert "on some paths alone" in flow_of(kind, *asked).escape
    module = kind.__new__(kind)
    Module.__init__(module)
    for on in (True, False):
        for flag in flags:
            setattr(module, flag, on)
        flow = flow_of(module, *asked)
        expected = {Use("attn", 0)} if on else set()
        assert flow.uses == expected
        assert not flow.called_otherwise


@pytest.mark.parametrize("kind", [Qwen3Attention, Qwen3MoeAttention])
def test_norms_of_vllms_classes(kind: Any) -> None:
    for name, place in (("q_norm", 1), ("k_norm", 2)):
        flow = flow_of(kind, name, "result", as_input=True, as_tensor=True)
        assert flow.uses == {Use("rotary_emb", place)}


def test_llama_4_reads_queries_in_between() -> None:
    assert flow_of(Llama4Attention, "rotary_emb", "pair", as_input=True).escape


def test_positions_of_several_dimensions() -> None:
    impl = PagedAttentionImpl(HEADS, D, 0.1, KV_HEADS)
    impl.rotation = Rotation(None, None, None)
    x: Any = torch.zeros(1)
    metadata = PagedAttentionMetadata([], x, x, torch.zeros(3, 1))
    with pytest.raises(UnsupportedAttention, match=r"positions: have shape .3, 1., must be"):
        impl.forward(None, x, x, x, x, metadata, x)
