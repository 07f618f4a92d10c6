"""Norms that all-reduce the results of row-parallel layers, in made-up modules and vLLM's."""

from collections.abc import Callable
from importlib import import_module
from itertools import islice
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import Module, ModuleList
from vllm.model_executor.layers import linear as linear_layers
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.models.interfaces import EagleModelMixin
from vllm.model_executor.models.utils import PPMissingLayer

from tests import fake_flashinfer
from tests.test_plugin.linear.test_linear_layers import checkpoint
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.fusion import all_reduce_norm
from vllm_fp4_plugin.fusion.forward_analysis import (
    ALONE,
    RETURNED,
    Use,
    flow_of,
    flow_of_layers,
    flow_of_parameter,
)
from vllm_fp4_plugin.fusion.match_all_reduce import RESIDUAL
from vllm_fp4_plugin.linear.method import resolve_fusions
from vllm_fp4_plugin.ops import flashinfer_all_reduce
from vllm_fp4_plugin.ops.operands import Unreduced

K, EPS, RANKS = 128, 1e-6, 2
APART = "by an all-reduce before it (flashinfer's op: none on cpu)"

pytestmark = pytest.mark.usefixtures("vllm_config")


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Build layers for the first of two ranks, with vLLM's default dtype."""
    for module in (linear_layers, all_reduce_norm, flashinfer_all_reduce):
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: RANKS)
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


class Mixer(Module):
    ROW: ClassVar[dict[str, Any]] = {}

    def __init__(self, quant: Nvfp4TcConfig, prefix: str) -> None:
        super().__init__()
        self.in_proj = ColumnParallelLinear(
            K, K, bias=False, quant_config=quant, prefix=f"{prefix}.in_proj"
        )
        self.out_proj = RowParallelLinear(
            K, K, bias=False, quant_config=quant, prefix=f"{prefix}.out_proj", **self.ROW
        )

    def forward(self, hidden: Tensor) -> Any:
        inner, _ = self.in_proj(hidden)
        out, _ = self.out_proj(inner)
        return out


class Layer(Module):
    """Decoder layer as in vLLM's models."""

    FIRST: Any = Mixer
    SECOND: Any = Mixer

    def __init__(self, quant: Nvfp4TcConfig, prefix: str) -> None:
        super().__init__()
        self.attention = self.FIRST(quant, f"{prefix}.attention")
        self.mlp = self.SECOND(quant, f"{prefix}.mlp")
        self.first_norm = RMSNorm(K, eps=EPS)
        self.second_norm = RMSNorm(K, eps=EPS)

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> Any:
        if residual is None:
            residual = hidden
            hidden = self.first_norm(hidden)
        else:
            hidden, residual = self.first_norm(hidden, residual)
        hidden = self.attention(hidden=hidden)
        hidden, residual = self.second_norm(hidden, residual)
        hidden = self.mlp(hidden)
        return hidden, residual


class Model(Module, EagleModelMixin):
    LAYER: Any = Layer

    def __init__(self, quant: Nvfp4TcConfig) -> None:
        super().__init__()
        self.quant = quant
        self.start_layer, self.end_layer = 0, 3
        self.layers = ModuleList([self.LAYER(quant, f"model.layers.{i}") for i in range(3)])
        self.norm = RMSNorm(K, eps=EPS)

    def forward(self, positions: Tensor, hidden: Tensor) -> Any:
        residual = None
        noted: list[Tensor] = []
        for index, layer in enumerate(
            islice(self.layers, self.start_layer, self.end_layer), start=self.start_layer
        ):
            hidden, residual = layer(positions, hidden, residual)
            self._maybe_add_hidden_state(noted, index + 1, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden


def model_of(
    layer: Any = Layer, kind: Any = Model, quant: Nvfp4TcConfig | None = None, **parts: Any
) -> Any:
    quant = quant or Nvfp4TcConfig(checkpoint())
    made = type("MadeLayer", (layer,), parts)
    return type("MadeModel", (kind,), {"LAYER": made})(quant)


def said_of(model: Any) -> dict[str, str]:
    """Reasons that the report gives for norms, by layer and norm."""
    resolve_fusions(model)
    records = model.quant.startup.report.layers
    return {r.name.removeprefix("model.layers."): r.reason for r in records if "norm" in r.name}


FIRST = "all-reduce before it: no decoder layer of this rank comes before it"


def test_all_but_the_ends() -> None:
    model = model_of()
    added = f"quantises for in_proj; adds up out_proj's result, {APART}"
    assert said_of(model) == {
        "0.first_norm": f"quantises for in_proj; {FIRST}",
        **dict.fromkeys(
            ["0.second_norm", "1.first_norm", "1.second_norm", "2.first_norm", "2.second_norm"],
            added,
        ),
    }
    for index, layer in enumerate(model.layers):
        assert not layer.attention.out_proj.reduce_results
        assert layer.mlp.out_proj.reduce_results == (index == 2)  # the last norm is vLLM's


def test_one_rank_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (linear_layers, all_reduce_norm):
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 1)
    model = model_of()
    assert set(said_of(model).values()) == {"quantises for in_proj"}
    assert all(layer.mlp.out_proj.reduce_results for layer in model.layers)


# --- norms left alone, and reasons --------------------------------------------------------------


class Scaled(Mixer):
    def forward(self, hidden: Tensor) -> Any:
        inner, _ = self.in_proj(hidden)
        out, _ = self.out_proj(inner)
        return out * 2


class NotReduced(Mixer):
    ROW: ClassVar = {"reduce_results": False}


class Experts(Module):
    def __init__(self, quant: Nvfp4TcConfig, prefix: str) -> None:
        super().__init__()

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * 2


class Multiplying(Layer):
    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> Any:
        hidden, residual = self.first_norm(hidden, residual)
        hidden = self.attention(hidden=hidden) * 0.5
        hidden, residual = self.second_norm(hidden, residual)
        return self.mlp(hidden), residual


class Sandwich(Layer):
    """Layer whose second norm has no residual."""

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> Any:
        hidden, residual = self.first_norm(hidden, residual)
        hidden = self.attention(hidden=hidden)
        hidden = self.second_norm(hidden)
        return self.mlp(hidden), residual


class TwoReaders(Layer):
    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> Any:
        hidden, residual = self.first_norm(hidden, residual)
        attended = self.attention(hidden=hidden)
        hidden, residual = self.second_norm(attended, residual)
        residual = self.gate(attended)
        return self.mlp(hidden), residual


class Parallel(Layer):
    """Layer whose residual may be the input itself, even where a residual is passed."""

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> Any:
        residual = None
        if residual is None:
            residual = hidden
        hidden, residual = self.first_norm(hidden, residual)
        hidden = self.attention(hidden=hidden)
        hidden, residual = self.second_norm(hidden, residual)
        return self.mlp(hidden), residual


class LookingBetween(Model):
    def forward(self, positions: Tensor, hidden: Tensor) -> Any:
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
            hidden = hidden.clamp(-1, 1)
        return self.norm(hidden, residual)


class Skipping(Model):
    def forward(self, positions: Tensor, hidden: Tensor) -> Any:
        residual = None
        for index, layer in enumerate(self.layers):
            if index in (1, 5):
                continue
            hidden, residual = layer(positions, hidden, residual)
        return self.norm(hidden, residual)


class Backwards(Model):
    def forward(self, positions: Tensor, hidden: Tensor) -> Any:
        residual = None
        for layer in self.layers[::-1]:
            hidden, residual = layer(positions, hidden, residual)
        return self.norm(hidden, residual)


class Remembering(Model):
    """Model that reads a layer's result after the next layer has run."""

    def forward(self, positions: Tensor, hidden: Tensor) -> Any:
        residual, before = None, hidden
        for layer in self.layers:
            new, residual = layer(positions, before, residual)
            hidden = before
            before = new
        return self.norm(hidden, residual)


class Twice(Model):
    def forward(self, positions: Tensor, hidden: Tensor) -> Any:
        residual = None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        return self.norm(hidden, residual)


def hooked(model: Any) -> None:
    for layer in model.layers:
        layer.attention.out_proj.register_forward_hook(lambda *_: None)


def replaced(model: Any) -> None:
    for layer in model.layers:
        layer.attention.forward = lambda hidden: hidden


def named_twice(model: Any) -> None:
    for layer in model.layers:
        layer.again = layer.attention.out_proj


def shared(model: Any) -> None:
    model.layers[2].attention = model.layers[1].attention


def changed(change: Callable[[Any], None]) -> Callable[[], Any]:
    def make() -> Any:
        model = model_of()
        change(model)
        return model

    return make


def of_16_bits() -> Any:
    """Model with o_proj in 16 bits."""
    quant = Nvfp4TcConfig(checkpoint())
    made = model_of(quant=quant)
    for layer in made.layers:
        layer.attention.out_proj.quant_method = linear_layers.UnquantizedLinearMethod()
    return made


LEFT_ALONE: dict[str, tuple[Callable[[], Any], str, str]] = {
    "computed with": (
        lambda: model_of(FIRST=Scaled), "1.second_norm",
        "Scaled.forward uses out_proj's result elsewhere than in a layer",
    ),
    "not reduced": (
        lambda: model_of(FIRST=NotReduced), "1.second_norm",
        "out_proj's result is not to be added up",
    ),
    "experts": (
        lambda: model_of(SECOND=Experts), "1.first_norm",
        "mlp (Experts) returns no row-parallel layer's result",
    ),
    "not ours": (of_16_bits, "1.second_norm", "out_proj is UnquantizedLinearMethod's"),
    "multiplied": (
        lambda: model_of(Multiplying), "1.second_norm",
        "MadeLayer.forward uses attention's result elsewhere than in a layer",
    ),
    "no residual": (
        lambda: model_of(Sandwich), "1.second_norm", "the norm is called without a residual"
    ),
    "two readers": (lambda: model_of(TwoReaders), "1.second_norm", "gate read it"),
    "residual": (lambda: model_of(Parallel), "1.first_norm", "what comes before it is not known"),
    "between": (
        lambda: model_of(kind=LookingBetween), "1.first_norm",
        "MadeModel.forward uses layers's result elsewhere",
    ),
    "skips": (
        lambda: model_of(kind=Skipping), "1.first_norm", "MadeModel.forward goes through layers in"
    ),
    "backwards": (
        lambda: model_of(kind=Backwards), "1.first_norm",
        "MadeModel.forward uses layers otherwise than by calling it",
    ),
    "remembers": (
        lambda: model_of(kind=Remembering), "1.first_norm", "MadeModel.forward uses layers's"
    ),
    "twice": (
        lambda: model_of(kind=Twice), "1.first_norm", "MadeModel.forward goes through layers in"
    ),
    "hooks": (changed(hooked), "1.second_norm", "there are hooks at this RowParallelLinear"),
    "forward": (changed(replaced), "1.second_norm", "the forward of this Mixer was replaced"),
    "other name": (
        changed(named_twice), "1.second_norm",
        "this RowParallelLinear has another place in the model too",
    ),
    "shared": (
        changed(shared), "1.second_norm", "this Mixer has another place in the model too"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_left_alone(name: str) -> None:
    make, norm, expected = LEFT_ALONE[name]
    model = make()
    said = said_of(model)[norm]
    print(said)
    assert said.startswith(f"quantises for in_proj; all-reduce before it: {expected}")
    layers = model.layers
    bound = layers[1].attention if norm == "1.second_norm" else layers[0].mlp
    if name not in ("experts", "not reduced"):
        assert bound.out_proj.reduce_results


def test_scales_per_token() -> None:
    model = model_of(quant=Nvfp4TcConfig())
    assert said_of(model)["1.second_norm"] == (
        "quantises for in_proj; all-reduce before it: a scale per token"
    )
    assert model.layers[1].attention.out_proj.reduce_results


@pytest.mark.parametrize("off", ["fuse_norm", "LoRA"])
def test_switched_off(off: str, vllm_config: Any) -> None:
    model_of()  # has our norm put in the place of vLLM's
    if off == "LoRA":
        vllm_config.lora_config = SimpleNamespace()
    else:
        vllm_config.additional_config = {"nvfp4_tc": {"fuse_norm": False}}
    model = model_of()
    said = set(said_of(model).values())
    vllm_config.lora_config = None
    assert said == {"LoRA is enabled" if off == "LoRA" else "switched off (fuse_norm)"}
    assert all(layer.attention.out_proj.reduce_results for layer in model.layers)


@pytest.mark.parametrize(("method", "reads"), [("eagle3", True), ("ngram", False)])
def test_speculation(method: str, reads: bool, vllm_config: Any) -> None:
    """Eagle drafts read hidden states between layers; norms within a layer are unaffected."""
    vllm_config.speculative_config = SimpleNamespace(method=method, draft_model_config=None)
    said = said_of(model_of())
    vllm_config.speculative_config = None
    between = "all-reduce before it: a draft model reads what is between layers"
    assert said["1.second_norm"].endswith(APART)
    assert said["1.first_norm"].endswith(between if reads else APART)


def test_stages_of_a_pipeline() -> None:
    """Inputs and outputs of a pipeline stage are complete sums."""
    model = model_of()
    model.start_layer = 1
    model.layers[0] = PPMissingLayer()
    said = said_of(model)
    assert said["1.first_norm"] == f"quantises for in_proj; {FIRST}"
    assert said["2.first_norm"].endswith(APART)
    assert model.layers[2].mlp.out_proj.reduce_results


def test_vllms_pass_fuses_what_we_do_not(vllm_config: Any) -> None:
    passes = vllm_config.compilation_config.pass_config
    passes.fuse_allreduce_rms = True
    said, dense = said_of(model_of(SECOND=Experts)), said_of(model_of())
    passes.fuse_allreduce_rms = False
    assert [name for name, reason in dense.items() if reason.startswith("vLLM")] == ["0.first_norm"]
    vllms = "vLLM fuses it with an all-reduce"
    assert said["0.first_norm"] == f"{vllms}: no decoder layer of this rank comes before it"
    assert said["1.first_norm"] == f"{vllms}: mlp (Experts) returns no row-parallel layer's result"


def test_what_is_bound_is_in_the_hash(vllm_config: Any) -> None:
    hashes = set()
    for make in (model_of, changed(hooked), lambda: model_of(kind=Skipping)):
        vllm_config.additional_config = {}
        said_of(make())
        hashes.add(vllm_config.compute_hash())
    assert len(hashes) == 3


def test_what_is_handed_over() -> None:
    model = model_of()
    resolve_fusions(model)
    [first, *_] = model.layers
    layer, norm = first.attention.out_proj, first.second_norm
    assert norm.feeding.reduction == all_reduce_norm.Reduction(0, 0, layer)
    for index, each in enumerate(("alpha", "weight_scale", "input_scale")):
        setattr(layer, each, torch.nn.Parameter(torch.tensor(float(index)), requires_grad=False))
    part = torch.ones(2, K)
    with pytest.raises(TypeError, match=r"attention\.out_proj: its result was to be added up"):
        norm(Unreduced(part, layer.prefix))  # without a residual
    with pytest.raises(TypeError, match=r"attention\.out_proj: its result was to be added up"):
        model.norm(Unreduced(part, layer.prefix), part)


# --- flashinfer's op, up to how many tokens -----------------------------------------------------


@pytest.fixture
def flashinfer(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> fake_flashinfer.Comm:
    passes = type(vllm_config.compilation_config.pass_config)
    sizes = {2: K * 2 * 50, 4: None}
    monkeypatch.setattr(passes, "flashinfer_max_size", lambda _, ranks: sizes[ranks])
    monkeypatch.setattr(flashinfer_all_reduce, "widest", lambda _: K)
    return fake_flashinfer.install(monkeypatch, lambda x: x, 1000)


def limit(vllm_config: Any, **changes: Any) -> tuple[int, str]:
    given: dict[str, Any] = {"arch": "sm_100", "terms": 1, "eps": EPS, "k": K, "weight": "bfloat16"}
    given |= changes
    weight = torch.ones(given["k"], dtype=getattr(torch, given["weight"]))
    norm = SimpleNamespace(weight=weight, variance_epsilon=given["eps"], hidden_size=given["k"])
    return flashinfer_all_reduce.most_tokens(
        vllm_config, given["arch"], given["terms"], norm, torch.bfloat16
    )


@pytest.mark.usefixtures("flashinfer")
def test_what_flashinfer_takes(vllm_config: Any) -> None:
    assert limit(vllm_config) == (50, "")
    for changes, why in (
        ({"arch": "sm_90"}, "none on sm_90"),
        ({"terms": 3}, "none for 3 terms"),
        ({"weight": "float32"}, "none for weights of torch.float32"),
        ({"eps": 1e-8}, "none for an eps of 1e-08"),
        ({"k": 96}, "none for rows of 96, no multiple of 64"),
    ):
        assert limit(vllm_config, **changes) == (0, why)


@pytest.mark.usefixtures("flashinfer")
def test_ranks_that_flashinfer_does_not_serve(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_all_reduce, "get_tensor_model_parallel_world_size", lambda: 4)
    assert limit(vllm_config) == (0, "none for 4 ranks")


def test_no_flashinfer(
    vllm_config: Any, flashinfer: fake_flashinfer.Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = flashinfer_all_reduce._wrapper()
    monkeypatch.setattr(module, "flashinfer_comm", None)
    assert limit(vllm_config) == (0, "not installed")


def test_the_workspace_is_as_wide_as_a_wider_draft(vllm_config: Any) -> None:
    hidden = vllm_config.model_config.get_hidden_size()
    assert flashinfer_all_reduce.widest(vllm_config) == hidden
    draft = SimpleNamespace(get_hidden_size=lambda: 2 * hidden)
    vllm_config.speculative_config = SimpleNamespace(draft_model_config=draft)
    found = flashinfer_all_reduce.widest(vllm_config)
    vllm_config.speculative_config = None
    assert found == 2 * hidden


# --- vLLM's own classes -------------------------------------------------------------------------

NOTED = Use("_maybe_add_hidden_state", 2)
ATTENTION = {"self_attn": "post_attention_layernorm"}
DENSE = ATTENTION | {"mlp": RETURNED}
# For each module: decoder layer, norms that its parts feed, model, and uses of layers' results.
CLASSES: dict[str, tuple[str, dict[str, str], str, set[Use]]] = {
    "llama": ("LlamaDecoderLayer", DENSE, "LlamaModel", {NOTED}),
    "qwen2": ("Qwen2DecoderLayer", DENSE, "Qwen2Model", {NOTED}),
    "qwen3": ("Qwen3DecoderLayer", DENSE, "Qwen3Model", {NOTED}),
    "nemotron": ("NemotronDecoderLayer", DENSE, "NemotronModel", set()),
    "glm4_moe": ("Glm4MoeDecoderLayer", DENSE, "Glm4MoeModel", set()),
    "qwen3_moe": ("Qwen3MoeDecoderLayer", DENSE, "Qwen3MoeModel", {NOTED}),
    "mixtral": ("MixtralDecoderLayer", ATTENTION, "MixtralModel", set()),
    "minimax_m2": ("MiniMaxM2DecoderLayer", ATTENTION, "MiniMaxM2Model", {NOTED}),
}


@pytest.mark.parametrize("name", CLASSES)
def test_vllms_classes(name: str) -> None:
    layer, feeds, model, rest = CLASSES[name]
    models = import_module(f"vllm.model_executor.models.{name}")
    kind = getattr(models, layer)
    for part, reader in feeds.items():
        flow = flow_of(kind, part, "result", as_input=True, may_return=True)
        assert flow.uses == {Use(reader, 0)}
        assert reader not in flow.alone
    given = flow_of_parameter(kind, 1, frozenset({RESIDUAL}))
    assert given.uses == {Use("input_layernorm", 0)}
    assert not given.alone
    without = flow_of_parameter(kind, 1)
    assert without.escape or without.uses != given.uses  # the residual is the first layer's input
    flow = flow_of_layers(getattr(models, model), "layers", "pair")
    assert flow.uses == {Use("layers", 1)} | rest


ROWS = {
    "llama:LlamaMLP": "down_proj", "llama:LlamaAttention": "o_proj",
    "qwen2:Qwen2MLP": "down_proj", "qwen2:Qwen2Attention": "o_proj",
    "qwen3:Qwen3Attention": "o_proj", "qwen3_moe:Qwen3MoeAttention": "o_proj",
    "mixtral:MixtralAttention": "o_proj", "glm4_moe:Glm4MoeMLP": "down_proj",
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_vllms_classes_return_what_they_add_up(name: str) -> None:
    module, _, kind = name.partition(":")
    owner = getattr(import_module(f"vllm.model_executor.models.{module}"), kind)
    flow = flow_of(owner, ROWS[name], "pair", may_return=True)
    assert flow.uses == {Use(RETURNED, ALONE)}
    assert flow_of(owner, ROWS[name], "pair").escape


def test_models_that_do_more_between_layers() -> None:
    granite = import_module("vllm.model_executor.models.granite")
    flow = flow_of(granite.GraniteDecoderLayer, "mlp", "result", as_input=True, may_return=True)
    assert "hidden_states = residual + hidden_states *" in flow.escape
    deepseek = import_module("vllm.model_executor.models.deepseek_v2")
    escape = flow_of_layers(deepseek.DeepseekV2Model, "layers", "pair").escape
    assert "uses layers's result elsewhere" in escape
