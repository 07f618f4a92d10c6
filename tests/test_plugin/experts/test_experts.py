"""Experts on CPU: arithmetic against an oracle, one token at a time, and checks of loading."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType

from nvfp4_kernels.activation import SILU, Activation
from nvfp4_kernels.devices import standing_in
from nvfp4_kernels.formats.nvfp4 import (
    Nvfp4Tensor,
    quantize_activation,
    quantize_weight,
    to_blocked,
)
from vllm_fp4_plugin.arithmetic.requested_terms import RequestedTerms
from vllm_fp4_plugin.experts.ledger import ExpertLedger
from vllm_fp4_plugin.experts.method import Nvfp4ExpertsMethod
from vllm_fp4_plugin.experts.op import experts
from vllm_fp4_plugin.experts.plan import make_plan
from vllm_fp4_plugin.experts.weights import StoredExperts, kernel_experts
from vllm_fp4_plugin.formats import FORMATS, CheckpointConfig, UnsupportedCheckpoint
from vllm_fp4_plugin.options import Options
from vllm_fp4_plugin.startup import Startup

E, H, INNER, K = 4, 64, 48, 2
F32 = torch.float32  # the default is bfloat16 where vLLM is configured


class Model:
    """Random experts: the tensors of a checkpoint, and an oracle for the result."""

    def __init__(
        self, *, weight_only: bool, gated: bool = True, inner: int = INNER, biased: bool = False
    ) -> None:
        torch.manual_seed(3)
        self.weight_only = weight_only
        self.shards = ("gate_proj", "up_proj") if gated else ("up_proj",)
        shapes = dict.fromkeys(self.shards, (inner, H)) | {"down_proj": (H, inner)}
        self.weights = {
            (expert, name): quantize_weight(torch.randn(shape, dtype=F32) * (1 + expert) * gain)
            for expert in range(E)
            for gain, (name, shape) in enumerate(shapes.items(), start=1)
        }
        self.biases = {
            (expert, name): (torch.randn(shape[0], dtype=F32) * biased).bfloat16()
            for expert in range(E)
            for name, shape in shapes.items()
        }
        steps = {name: 0.5 if name == "down_proj" else 0.002 for name in shapes}
        self.scales = {
            (expert, name): torch.tensor(steps[name] * (1 + expert), dtype=F32)
            for expert, name in self.weights
        }

    def held(self, rows: slice = slice(None)) -> StoredExperts:
        """Experts that a rank holds, as stored in a checkpoint."""
        chosen = range(E)[rows]

        def stack(part: str, name: str) -> Tensor:
            names = self.shards if part == "w13" else ("down_proj",)
            each = [[getattr(self.weights[e, n], name) for n in names] for e in chosen]
            tensors = torch.stack([torch.stack(of_one) for of_one in each])
            return tensors if part == "w13" else tensors.squeeze(1)

        w2_input = torch.stack([self.scales[e, "down_proj"] for e in chosen])
        return StoredExperts(
            stack("w13", "data"), stack("w13", "scales"), stack("w13", "global_scale"),
            stack("w2", "data"), stack("w2", "scales"), stack("w2", "global_scale"),
            None if self.weight_only else self.w13_input, None if self.weight_only else w2_input,
        )  # fmt: skip

    @property
    def w13_input(self) -> Tensor:
        return torch.stack([self.scales[e, n] for e in range(E) for n in self.shards]).amax()

    def says(self, x: Tensor, expert: int, activation: Callable[..., Tensor]) -> Tensor:
        """Result of one expert for one token ``(H,)``, in float64."""
        rounded = self._round(x, self.w13_input)
        projected = [self._project(rounded, expert, name) for name in self.shards]
        hidden = activation(*projected).float()
        hidden = self._round(hidden, self.scales[expert, "down_proj"])
        if self.weight_only:
            hidden = hidden.to(x.dtype).double()
        return self._project(hidden, expert, "down_proj")

    def _project(self, x: Tensor, expert: int, name: str) -> Tensor:
        return self._value(expert, name) @ x + self.biases[expert, name].double()

    def _value(self, expert: int, name: str) -> Tensor:
        return self.weights[expert, name].dequantize().double()

    def _round(self, x: Tensor, scale: Tensor) -> Tensor:
        if self.weight_only:
            return x.double()
        return Nvfp4Tensor(*quantize_activation(x[None], scale), scale).dequantize()[0].double()

    def oracle(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        activation: Callable[..., Tensor],
        *,
        weight_on_input: bool = False,
    ) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float64)
        for token, slots in enumerate(ids.tolist()):
            for slot, expert in enumerate(slots):
                if not 0 <= expert < E:
                    continue
                factor = weights[token, slot]
                if weight_on_input:
                    weighted = (x[token].float() * factor).to(x.dtype)
                    out[token] += self.says(weighted, expert, activation)
                else:
                    out[token] += self.says(x[token], expert, activation) * factor.double()
        return out


def mixture(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    expert_map: Tensor | None,
    held: StoredExperts,
    activation: Activation,
    *,
    weight_on_input: bool,
    per_token: bool = False,
) -> Tensor:
    """Output of a layer that holds the experts ``held``."""
    gated = held.w13.shape[1] == 2
    inputs = "16-bit" if held.w13_input is None else "per-token" if per_token else "static"
    plan = make_plan(activation, gated=gated, inputs=inputs, requested=None)  # type: ignore[arg-type]
    sizes = [x.shape[1], held.w13.shape[2], len(held.w13), E]
    return experts(
        x, weights, ids, expert_map, *kernel_experts(held, plan), sizes, plan.targets,
        inputs != "16-bit", plan.terms, *activation, weight_on_input,
    )  # fmt: skip


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + torch.exp(-gate)) * up


def batch(tokens: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(5)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(max(tokens, 1))]).int()
    return torch.randn(tokens, H).bfloat16(), torch.rand(tokens, K, dtype=F32), ids[:tokens]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Check equality up to one rounding to bfloat16 and, in W4A4, a few 4-bit rounding flips."""
    off = (actual.double() - expected).norm() / expected.norm()
    assert off < 0.004, off


@pytest.mark.parametrize("weight_only", [True, False], ids=["W4A16", "W4A4"])
class TestMixture:
    def test_any_routing(self, weight_only: bool) -> None:
        """Routing has padding, unknown ids and duplicates; weights of empty slots are ignored."""
        model = Model(weight_only=weight_only)
        x, weights, ids = batch()
        ids[0], ids[1], ids[2] = torch.tensor([[-1, -1], [E, 1], [2, 2]])
        weights[0], weights[1, 0] = torch.nan, torch.inf
        out = mixture(x, weights, ids, None, model.held(), SILU, weight_on_input=False)
        assert out.dtype == x.dtype
        assert_same(out, model.oracle(x, weights, ids, silu_mul))
        assert not out[0].any()

    @pytest.mark.parametrize("tokens", [0, 1])
    def test_nothing_routed(self, tokens: int, weight_only: bool) -> None:
        x, weights, ids = batch(tokens)
        ids.fill_(-1)
        held = Model(weight_only=weight_only).held()
        out = mixture(x, weights, ids, None, held, SILU, weight_on_input=False)
        assert torch.equal(out, torch.zeros_like(x))

    def test_weight_on_input(self, weight_only: bool) -> None:
        model = Model(weight_only=weight_only)
        x, weights, ids = batch()
        ids = ids[:, :1]
        args = (x, weights[:, :1], ids)
        out = mixture(*args, None, model.held(), SILU, weight_on_input=True)
        assert_same(out, model.oracle(*args, silu_mul, weight_on_input=True))

    def test_experts_on_two_ranks(self, weight_only: bool) -> None:
        """Experts alternate between two ranks, whose partial sums add up to the full sums."""
        model = Model(weight_only=weight_only)
        x, weights, ids = batch()
        ids[4] = -1
        parts = torch.zeros(x.shape, dtype=F32)
        for rank in range(2):
            places = torch.full((E,), -1, dtype=torch.int32)
            places[rank::2] = torch.arange(E // 2, dtype=torch.int32)
            held = model.held(slice(rank, None, 2))
            parts += mixture(x, weights, ids, places, held, SILU, weight_on_input=False).float()
        assert_same(parts, model.oracle(x, weights, ids, silu_mul))

    def test_a_token_is_alone(self, weight_only: bool) -> None:
        """NaN in one token's row does not affect other rows."""
        held = Model(weight_only=weight_only).held()
        x, weights, ids = batch()
        clean = mixture(x, weights, ids, None, held, SILU, weight_on_input=False)
        x[3] = torch.nan
        dirty = mixture(x, weights, ids, None, held, SILU, weight_on_input=False)
        assert torch.equal(clean[torch.arange(9) != 3], dirty[torch.arange(9) != 3])
        assert dirty[3].isnan().all()


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "silu": silu_mul,
    "gelu": lambda g, u: g * 0.5 * (1 + torch.erf(g / 2**0.5)) * u,
    "gelu_tanh": lambda g, u: (
        0.5 * g * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3))) * u
    ),
    "swigluoai_uninterleave": lambda g, u: (
        g.clamp(max=7) / (1 + torch.exp(-1.702 * g.clamp(max=7))) * (u.clamp(-7, 7) + 1)
    ),
    "situ": lambda g, u: 4 * torch.tanh(g / 4) / (1 + torch.exp(-g)) * 25 * torch.tanh(u / 25),
    "swiglustep": lambda g, u: (g / (1 + torch.exp(-g))).clamp(max=7) * u.clamp(-7, 7),
    "silu_no_mul": lambda u: u / (1 + torch.exp(-u)),
    "gelu_no_mul": lambda u: u * 0.5 * (1 + torch.erf(u / 2**0.5)),
    "gelu_tanh_no_mul": lambda u: (
        0.5 * u * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (u + 0.044715 * u**3)))
    ),
    "relu2_no_mul": lambda u: u.clamp(min=0) ** 2,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_activations(name: str) -> None:
    gated = not name.endswith("_no_mul")
    model = Model(weight_only=True, gated=gated)
    x, weights, ids = batch()
    parameters = {"situ": (25.0, 4.0), "swiglustep": (7.0,)}
    parameters["swigluoai_uninterleave"] = (7.0, 1.702, 1.0)
    activation = Activation(name.removesuffix("_no_mul"), *parameters.get(name, ()))
    out = mixture(x, weights, ids, None, model.held(), activation, weight_on_input=False)
    assert_same(out, model.oracle(x, weights, ids, FORMULAS[name]))


def test_an_inner_size_is_padded_for_blackwell() -> None:
    """Size 48 becomes 64: zero rows in gate and up, and as many zero columns in down."""
    stored = Model(weight_only=False).held()
    with standing_in("cpu", "sm_100"):
        plan = make_plan(SILU, gated=True, inputs="static", requested=None)
    held = kernel_experts(stored, plan)
    assert torch.equal(held.w13, pad(stored.w13, (0, 0, 0, 16)))
    assert torch.equal(held.w2, pad(stored.w2, (0, 8)))
    for scale, whole, by in (
        (held.w13_scale, stored.w13_scale, (0, 0, 0, 16)),
        (held.w2_scale, stored.w2_scale, (0, 1)),
    ):
        padded = pad(whole.view(torch.uint8), by).view(whole.dtype)
        assert torch.equal(scale.view(torch.uint8), to_blocked(padded).view(torch.uint8))


# --- the method ---------------------------------------------------------------------------------


class Layer(nn.Module):
    """Stand-in for vLLM's layer of routed experts, on one of several ranks."""

    def __init__(self, *, tp: int = 1, ep: int = 1, rank: int = 0, **config: Any) -> None:
        super().__init__()
        self.ckpt_gate_proj_name, self.ckpt_up_proj_name = "gate_proj", "up_proj"
        self.ckpt_down_proj_name = "down_proj"
        self.activation = MoEActivation.SILU
        self.swiglu_limit = self.swiglu_alpha = self.swiglu_beta = None
        self.apply_router_weight_on_input = self.use_grouped_topk = False
        self.scoring_func, self.renormalize, self.routed_scaling_factor = "softmax", True, 1.0
        self.num_expert_group = self.topk_group = None
        self.expert_map_manager = SimpleNamespace(num_fused_shared_experts=0)
        self.custom_routing_function = self.e_score_correction_bias = None
        # The division is vLLM's: the first ranks have one expert more where ranks do not divide
        # them.
        local = E // ep + (rank < E % ep)
        first = rank * (E // ep) + min(rank, E % ep) if ep > 1 else 0
        self.expert_map = None
        if ep > 1:
            self.expert_map = torch.full((E,), -1, dtype=torch.int32)
            self.expert_map[first : first + local] = torch.arange(local, dtype=torch.int32)
        settings = {
            "num_experts": E,
            "experts_per_token": K,
            "routing_method": RoutingMethodType.Custom,  # tests choose the experts
            "router_logits_dtype": None,
            "in_dtype": torch.bfloat16,
            "num_local_experts": local,
            "activation": self.activation,
            "is_act_and_mul": True,
            "has_bias": False,
            "is_lora_enabled": False,
            "hidden_dim": H,
            "hidden_dim_unpadded": None,
            "intermediate_size": INNER * tp,
            "intermediate_size_per_partition": INNER,
            "moe_parallel_config": SimpleNamespace(
                enable_eplb=False, use_all2all_kernels=False, all2all_backend="none", dp_size=1
            ),
        }
        split = {"tp_size": tp, "tp_rank": rank if tp > 1 else 0}
        split |= {"ep_size": ep, "ep_rank": rank if ep > 1 else 0}
        self.moe_config = SimpleNamespace(**(settings | split | config))
        self.first, self.local = first, local

    def _map_global_expert_id_to_local_expert_id(self, expert: int) -> int:
        return expert - self.first if self.first <= expert < self.first + self.local else -1


Build = Callable[..., tuple[Nvfp4ExpertsMethod, Layer]]
PREFIX = "model.layers.0.mlp.experts"


def built(
    layer: Layer | None = None,
    *,
    format: str = "modelopt",
    weight_only: bool = False,
    terms: RequestedTerms | None = None,
    options: Options = Options(),  # noqa: B008  frozen
) -> tuple[Nvfp4ExpertsMethod, Layer]:
    """Layer of experts and its method, built under vLLM's config."""
    layer = layer or Layer()
    checkpoint = CheckpointConfig(FORMATS[format], weight_only)  # type: ignore[index]
    startup = Startup()
    startup.pending.add(PREFIX)
    method = Nvfp4ExpertsMethod(
        startup, options, layer, PREFIX, checkpoint, weight_only=weight_only, terms=terms
    )
    config = layer.moe_config
    method.create_weights(
        layer,
        config.num_local_experts,
        config.hidden_dim,
        config.intermediate_size_per_partition,
        torch.bfloat16,
        global_num_experts=E,
        weight_loader=None,
    )
    return method, layer


@pytest.fixture
def build(vllm_config: Any) -> Build:
    return built


def load(
    layer: Layer,
    model: Model,
    format: str = "modelopt",
    change: Callable[[str, Tensor], Tensor | None] = lambda name, tensor: tensor,
) -> None:
    """Load every tensor of every expert into a layer, as vLLM does; ``change`` may drop tensors."""
    chosen = FORMATS[format]  # type: ignore[index]
    names = chosen.names
    shards = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for (expert, projection), weight in model.weights.items():
        scalars = [weight.global_scale, model.scales[expert, projection]]
        if chosen.reciprocal:
            scalars = [scalar.reciprocal().view(1) for scalar in scalars]
        tensors = {
            names.weight: weight.data,
            names.block_scale: weight.scales,
            names.weight_global: scalars[0],
            names.input_global: scalars[1],
        }
        for name, tensor in tensors.items():
            if model.weight_only and name == names.input_global:
                continue
            changed = change(f"{expert}.{projection}.{name}", tensor)
            if changed is None:
                continue
            shard = shards[projection]
            whole = f"w{'2' if shard == 'w2' else '13'}_{name}"
            param = getattr(layer, whole)
            came = param.weight_loader(param, changed, f"{PREFIX}.{whole}", shard, expert, True)
            assert came in (True, False)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("weight_only", [True, False], ids=["W4A16", "W4A4"])
def test_what_is_loaded_is_what_is_served(format: str, weight_only: bool, build: Build) -> None:
    model = Model(weight_only=weight_only)
    method, layer = build(format=format, weight_only=weight_only)
    load(layer, model, format)
    method.process_weights_after_loading(layer)
    method.process_weights_after_loading(layer)  # vLLM may ask twice
    assert not method.startup.pending
    for held, expected in zip(
        method.held(layer), kernel_experts(model.held(), method.plan), strict=True
    ):
        if expected is None:
            assert held is None
        elif expected.dtype == torch.float32:
            torch.testing.assert_close(held.data, expected)
        else:
            assert torch.equal(held.view(torch.uint8), expected.view(torch.uint8))
    x, weights, ids = batch()
    out = method.apply(layer, x, weights, ids, None, None)
    assert_same(out, model.oracle(x, weights, ids, silu_mul))


def test_the_router_s_weight_comes_first_where_the_layer_says_so(build: Build) -> None:
    model, layer = Model(weight_only=True), Layer()
    layer.apply_router_weight_on_input = True
    method, _ = build(layer, weight_only=True)
    load(layer, model)
    method.process_weights_after_loading(layer)
    x, weights, ids = (each[:, :1] if each.dtype != torch.bfloat16 else each for each in batch())
    out = method.apply(layer, x, weights, ids, None, None)
    assert_same(out, model.oracle(x, weights, ids, silu_mul, weight_on_input=True))


@pytest.mark.parametrize(("count", "off"), [(1, 0.2), (2, 0.02), (3, 0.004)])
def test_sums_of_terms(count: int, off: float, build: Build) -> None:
    """Inputs of both products are NVFP4 terms with a scale per token, not 16-bit values."""
    model = Model(weight_only=True)
    method, layer = build(weight_only=True, terms=RequestedTerms(count, "given"))
    times = f"×{count}" if count > 1 else ""
    assert (method.plan.arithmetic, method.plan.reason) == (
        f"W4A4{times} per-token",
        "given; experts chosen by vLLM: routing method Custom",
    )
    load(layer, model)
    method.process_weights_after_loading(layer)
    x, weights, ids = batch()
    expected = model.oracle(x, weights, ids, silu_mul)
    seen = (method.apply(layer, x, weights, ids, None, None).double() - expected).norm()
    assert off / 10 < seen / expected.norm() < off


@pytest.mark.parametrize(
    ("parallel", "held"), [("tp", [E, E]), ("ep", [2, 2]), ("ep", [2, 1, 1])], ids=str
)
def test_ranks_add_up(parallel: str, held: list[int], build: Build) -> None:
    """Input scales cover the experts of all ranks; ranks need not divide the number of experts."""
    model = Model(weight_only=False, inner=2 * INNER if parallel == "tp" else INNER)
    x, weights, ids = batch()
    parts = torch.zeros(x.shape, dtype=F32)
    for rank, count in enumerate(held):
        method, layer = build(Layer(**{parallel: len(held)}, rank=rank))
        load(layer, model)
        method.process_weights_after_loading(layer)
        assert layer.w13_input == model.w13_input
        assert len(layer.w13_weight) == count
        parts += method.apply(layer, x, weights, ids, None, None).float()
    assert_same(parts, model.oracle(x, weights, ids, silu_mul))


def test_alternating_rows_of_gate_and_up(build: Build) -> None:
    """Rows of gate and up alternate, as in gpt-oss, with biases, on two ranks."""
    model = Model(weight_only=False, inner=2 * INNER, biased=True)
    for expert in range(E):  # of gate and up together there is one scale
        gate, up = model.weights[expert, "gate_proj"], model.weights[expert, "up_proj"]
        model.weights[expert, "up_proj"] = replace(up, global_scale=gate.global_scale)
    x, weights, ids = batch()
    parts = torch.zeros(x.shape, dtype=F32)
    for rank in range(2):
        oai = MoEActivation.SWIGLUOAI
        method, layer = build(Layer(tp=2, rank=rank, activation=oai, has_bias=True))
        load_alternating(layer, model)
        method.process_weights_after_loading(layer)
        parts += method.apply(layer, x, weights, ids, None, None).float()
    assert_same(parts, model.oracle(x, weights, ids, FORMULAS["swigluoai_uninterleave"]))


def load_biases(layer: Layer, model: Model) -> None:
    """Load the bias of every projection of every expert into a layer."""
    for (expert, projection), bias in model.biases.items():
        shard = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[projection]
        part = "w2_bias" if shard == "w2" else "w13_bias"
        param = getattr(layer, part)
        param.weight_loader(param, bias, f"{PREFIX}.{part}", shard, expert, True)


@pytest.mark.parametrize("parallel", ["tp", "ep"])
def test_biases_add_up_over_ranks(parallel: str, build: Build) -> None:
    """Tensor-parallel ranks add down's bias once, although each rank has a part of every expert."""
    inner = 2 * INNER if parallel == "tp" else INNER
    model = Model(weight_only=False, inner=inner, biased=True)
    x, weights, ids = batch()
    parts = torch.zeros(x.shape, dtype=F32)
    for rank in range(2):
        method, layer = build(Layer(**{parallel: 2}, rank=rank, has_bias=True))
        load(layer, model)
        load_biases(layer, model)
        method.process_weights_after_loading(layer)
        parts += method.apply(layer, x, weights, ids, None, None).float()
    assert_same(parts, model.oracle(x, weights, ids, silu_mul))
    unbiased = Model(weight_only=False, inner=inner).oracle(x, weights, ids, silu_mul)
    assert (parts - unbiased).abs().max() > 0.1


def test_biases_that_do_not_fit(build: Build) -> None:
    model = Model(weight_only=False, biased=True)
    method, layer = build(Layer(has_bias=True))
    load(layer, model)
    with pytest.raises(UnsupportedCheckpoint, match=r"0\.gate_proj\.bias and 11 more: not in the"):
        method.process_weights_after_loading(layer)
    bias = layer.w2_bias
    for wrong, message in (
        (torch.ones(48), r"0\.down_proj\.bias: shape is \(48,\), must be \(64,\)"),
        (torch.ones(64, dtype=torch.uint8), r"0\.down_proj\.bias: dtype is uint8, must be a float"),
    ):
        with pytest.raises(UnsupportedCheckpoint, match=message):
            bias.weight_loader(bias, wrong, f"{PREFIX}.w2_bias", "w2", 0, True)


def load_alternating(layer: Layer, model: Model) -> None:
    """Load gpt-oss's tensors into a layer as vLLM passes them, expert by expert."""
    names = FORMATS["modelopt"].names
    for expert in range(E):
        gate, up, down = (model.weights[expert, f"{of}_proj"] for of in ("gate", "up", "down"))
        joined = {
            names.weight: torch.stack([gate.data, up.data], 1).flatten(0, 1),
            names.block_scale: torch.stack(
                [gate.scales.view(torch.uint8), up.scales.view(torch.uint8)], 1
            )
            .flatten(0, 1)
            .view(torch.float8_e4m3fn),
            names.weight_global: gate.global_scale,
            names.input_global: model.scales[expert, "gate_proj"],
        }
        alone = {
            names.weight: down.data,
            names.block_scale: down.scales,
            names.weight_global: down.global_scale,
            names.input_global: model.scales[expert, "down_proj"],
        }
        if hasattr(layer, "w2_bias"):
            gate_bias, up_bias, down_bias = (
                model.biases[expert, f"{of}_proj"] for of in ("gate", "up", "down")
            )
            joined["bias"] = torch.stack([gate_bias, up_bias], 1).flatten()
            alone["bias"] = down_bias
        for part, tensors in (("w13", joined), ("w2", alone)):
            for name, tensor in tensors.items():
                param = getattr(layer, f"{part}_{name}")
                whole = f"{PREFIX}.{part}_{name}"
                assert param.weight_loader(param, tensor, whole, f"gpt_oss_{part}", expert, True)


def load_stacked(layer: Layer, model: Model, *, filled: bool = False) -> None:
    """Load Llama 4's stacks into a layer as vLLM does; ``filled``: scales bypass the loader."""
    names = FORMATS["modelopt"].names
    shards = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    mine = range(layer.first, layer.first + layer.local)

    def give(whole: str, tensor: Tensor, shard: str, expert: int) -> None:
        param = getattr(layer, whole)
        param.weight_loader(param, tensor, f"{PREFIX}.{whole}", shard, expert)

    def of(projection: str, part: str) -> Tensor:
        return torch.stack([getattr(model.weights[e, projection], part) for e in range(E)])

    for projection, shard in shards.items():
        part = "w2" if shard == "w2" else "w13"
        give(f"{part}_{names.weight}", of(projection, "data")[list(mine)], shard, layer.first)
    for part, shard, projections in (
        ("w13", "w1", ("gate_proj", "up_proj")),
        ("w2", "w2", ("down_proj",)),
    ):
        scales = torch.cat(
            [of(projection, "scales").view(torch.uint8) for projection in projections], 1
        )
        give(f"{part}_{names.block_scale}", scales.view(torch.float8_e4m3fn), shard, 0)
        numbers = {
            names.weight_global: of(projections[0], "global_scale"),
            names.input_global: torch.stack([model.scales[e, projections[0]] for e in range(E)]),
        }
        for name, tensor in numbers.items():
            if filled:
                getattr(layer, f"{part}_{name}").data.fill_(tensor[0].item())
            else:
                give(f"{part}_{name}", tensor, shard, 0)


@pytest.mark.parametrize("ranks", [{}, {"ep": 2, "rank": 1}, {"tp": 2, "rank": 1}], ids=str)
def test_stacks_are_taken_apart(ranks: dict[str, int], build: Build) -> None:
    """Stacked and single tensors give the same layer; in a stack, up has gate's global scale."""
    model = Model(weight_only=False, inner=2 * INNER if "tp" in ranks else INNER)
    for expert in range(E):
        gate = model.weights[expert, "gate_proj"].global_scale
        up = model.weights[expert, "up_proj"]
        model.weights[expert, "up_proj"] = Nvfp4Tensor(up.data, up.scales, gate)
        model.scales[expert, "up_proj"] = model.scales[expert, "gate_proj"]
    held = []
    for how in (load, load_stacked):
        method, layer = build(Layer(**ranks))
        how(layer, model)
        method.process_weights_after_loading(layer)
        held.append([each for each in method.held(layer) if each is not None])
    for one, other in zip(*held, strict=True):
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def test_numbers_that_a_model_fills(build: Build) -> None:
    model = Model(weight_only=False)
    method, layer = build()
    load_stacked(layer, model, filled=True)
    missing = list(method.ledger.missing())
    assert f"{PREFIX}.0.down_proj.weight_scale_2" in missing
    assert len(missing) == 2 * 3 * E
    method.ledger.note_filled(lambda parameter: parameter is not layer.w2_input_scale)
    assert len(list(method.ledger.missing())) == E
    method.ledger.note_filled(lambda parameter: True)
    method.process_weights_after_loading(layer)
    assert layer.w13_input == model.scales[0, "gate_proj"]


def test_dynamo_sees_one_op(build: Build) -> None:
    method, layer = build()
    load(layer, Model(weight_only=False))
    method.process_weights_after_loading(layer)
    compiled = torch.compile(
        lambda *args: method.apply(layer, *args, None, None), fullgraph=True, backend="eager"
    )
    args = batch()
    assert torch.equal(compiled(*args), method.apply(layer, *args, None, None))


def drop(name: str) -> Callable[[str, Tensor], Tensor | None]:
    return lambda each, tensor: None if each == name else tensor


def replaced(name: str, by: Callable[[Tensor], Tensor]) -> Callable[[str, Tensor], Tensor]:
    return lambda each, tensor: by(tensor) if each == name else tensor


@pytest.mark.parametrize(
    "name",
    [
        "3.up_proj.weight", "0.down_proj.weight_scale", "1.gate_proj.weight_scale_2",
        "2.down_proj.input_scale",
    ],
)  # fmt: skip
@pytest.mark.parametrize("ep", [1, 2])
def test_a_missing_tensor_is_named_on_every_rank(name: str, ep: int, build: Build) -> None:
    for rank in range(ep):
        method, layer = build(Layer(ep=ep, rank=rank))
        load(layer, Model(weight_only=False), change=drop(name))
        assert list(method.ledger.missing()) == [f"{PREFIX}.{name}"]
        with pytest.raises(UnsupportedCheckpoint, match=rf"{PREFIX}\.{name}: not in the check"):
            method.process_weights_after_loading(layer)


def test_weights_that_vllm_does_not_read(build: Build, vllm_config: Any) -> None:
    """Weights of other ranks' experts are skipped by vLLM's filter; their scales are loaded."""
    vllm_config.parallel_config.enable_ep_weight_filter = True
    try:
        for rank in range(2):
            method, layer = build(Layer(ep=2, rank=rank))
            load(layer, Model(weight_only=False), change=drop("3.up_proj.weight"))
            missing = [f"{PREFIX}.3.up_proj.weight"] if rank == 1 else []
            assert list(method.ledger.missing()) == missing
    finally:
        vllm_config.parallel_config.enable_ep_weight_filter = False


def test_a_reload_that_comes_without_saying_so(build: Build) -> None:
    """A tensor after a complete load starts another load, which must be complete too."""
    method, layer = build()
    load(layer, Model(weight_only=False))
    method.ledger.check_complete()
    load(layer, Model(weight_only=False), change=drop("2.up_proj.weight"))
    assert list(method.ledger.missing()) == [f"{PREFIX}.2.up_proj.weight"]


def test_experts_in_the_order_of_a_rank(vllm_config: Any) -> None:
    layer = Layer(ep=2, rank=1)
    rows = {2: 1, 3: 0}
    layer._map_global_expert_id_to_local_expert_id = lambda e: rows.get(e, -1)  # type: ignore
    assert ExpertLedger(layer, PREFIX).local_experts == [3, 2]


@pytest.mark.parametrize(
    ("name", "by", "message"),
    [
        (
            "1.up_proj.weight",
            lambda t: t.bfloat16(),
            r"1\.up_proj\.weight: dtype is bfloat16",
        ),
        (
            "1.up_proj.weight",
            lambda t: t.view(torch.float8_e4m3fn),
            r"1\.up_proj\.weight: dtype is float8_e4m3fn",
        ),
        ("1.up_proj.weight", lambda t: t[:-1], r"shape is \(47, 32\), must be \(48, 32\)"),
        ("2.down_proj.weight_scale", lambda t: t[:, :2], r"is \(64, 2\), must be \(64, 3\)"),
        ("0.gate_proj.input_scale", lambda t: t.expand(2), r"shape is \(2,\), must be one number"),
        (
            "0.gate_proj.weight",
            lambda t: t.expand(3, *t.shape),
            r"shape is \(3, 48, 32\), must be \(48, 32\)",
        ),
        ("0.gate_proj.weight_scale_2", lambda t: -t, r"experts\.0\.gate_proj\.weight_scale_2:"),
        (
            "3.down_proj.weight_scale",
            lambda t: torch.full_like(t.float(), torch.nan).to(t.dtype),
            r"experts\.3\.down_proj\.weight_scale: 192 block scales are NaN",
        ),
    ],
)
def test_tensors_that_do_not_fit(name: str, by: Any, message: str, build: Build) -> None:
    method, layer = build()

    def loaded() -> None:
        load(layer, Model(weight_only=False), change=replaced(name, by))
        method.process_weights_after_loading(layer)

    with pytest.raises(UnsupportedCheckpoint, match=message):
        loaded()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"activation": MoEActivation.RELU2}, "its activation is relu2, must be silu, "),
        (
            {"activation": MoEActivation.SITU, "activation_situ_beta": None},
            "its activation_situ_beta is None, must be positive",
        ),
        ({"is_lora_enabled": True}, "LoRA is enabled"),
        ({"hidden_dim": 72}, "H is 72, must be a multiple of 16"),
        ({"intermediate_size_per_partition": 24}, "I on a rank is 24, must be a multiple of 16"),
    ],
)
def test_layers_that_are_not_served(config: dict[str, Any], message: str, build: Build) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=f"{PREFIX}: {message}"):
        build(Layer(**config))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (
            {"enable_eplb": True},
            "experts are balanced over ranks, must not be; leave out --enable-",
        ),
        (
            {"use_all2all_kernels": True, "all2all_backend": "deepep_low_latency"},
            "all2all-backend is deepep_low_latency, must be allgather_reducescatter",
        ),
        ({"use_all2all_kernels": True, "all2all_backend": "allgather_reducescatter"}, ""),
        ({"all2all_backend": "deepep_low_latency"}, ""),  # of one data-parallel rank
        ({"dp_size": 2}, "data_parallel_size is 2, must be 1 on a CPU"),
    ],
)
def test_ranks_that_are_not_served(ranks: dict[str, Any], message: str, build: Build) -> None:
    layer = Layer()
    vars(layer.moe_config.moe_parallel_config).update(ranks)
    if not message:
        build(layer)
        return
    with pytest.raises(UnsupportedCheckpoint, match=f"{PREFIX}: {message}"):
        build(layer)


@pytest.mark.parametrize(
    ("router", "refused"),
    [
        ({"scoring_func": "sigmoid"}, "sigmoid and without"),
        ({"e_score_correction_bias": torch.zeros(E)}, "softmax with a bias and without"),
        ({"scoring_func": "sigmoid", "use_grouped_topk": True}, ""),
        ({"scoring_func": "sigmoid", "custom_routing_function": len}, ""),
        ({"scoring_func": "sqrtsoftplus", "e_score_correction_bias": torch.zeros(E)}, ""),
    ],
)
def test_routers_of_a_cpu(router: dict[str, Any], refused: str, build: Build) -> None:
    layer = Layer()
    for name, value in router.items():
        setattr(layer, name, value)
    if not refused:
        build(layer)
        return
    with pytest.raises(UnsupportedCheckpoint, match=f"its router scores experts by {refused}"):
        build(layer)


def test_a_dummy_load_is_served(build: Build, vllm_config: Any) -> None:
    method, layer = build()
    kept = vllm_config.load_config.load_format
    vllm_config.load_config.load_format = "dummy"
    try:
        method.process_weights_after_loading(layer)
    finally:
        vllm_config.load_config.load_format = kept
    assert method.apply(layer, *batch(), None, None).isfinite().all()
