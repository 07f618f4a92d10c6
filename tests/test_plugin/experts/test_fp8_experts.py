"""Experts with FP8 activations on a CPU, against an oracle; and experts that stay in 16 bits."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from nvfp4_kernels.devices import standing_in
from nvfp4_kernels.formats.folded import folded_shapes
from nvfp4_kernels.formats.nvfp4 import Nvfp4Tensor
from tests import devices
from tests.emulator import EAGER
from tests.test_kernels.compilation import check_op
from tests.test_plugin.experts.test_experts import (
    FORMULAS,
    INNER,
    PREFIX,
    E,
    H,
    Layer,
    Model,
    batch,
    built,
    load,
    load_alternating,
    load_biases,
    load_stacked,
    silu_mul,
)
from tests.test_plugin.linear.test_fp8_layers import HARD, hard_to_fold
from vllm_fp4_plugin import kernel_weight
from vllm_fp4_plugin.experts import base
from vllm_fp4_plugin.experts.method import Nvfp4ExpertsMethod
from vllm_fp4_plugin.formats import FORMATS, UnsupportedCheckpoint
from vllm_fp4_plugin.options import Options

FP8 = Options(activation="fp8")
BF16, E4M3, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
CHOSEN = "activation is fp8; experts chosen by vLLM: routing method Custom"
SCALING = pytest.mark.parametrize("per_token", [False, True], ids=["static", "per token"])


class Fp8Model(Model):
    """Random experts with an oracle for FP8, in which weights and inputs are rounded to E4M3."""

    def __init__(self, *, per_token: bool, **options: Any) -> None:
        super().__init__(weight_only=per_token, **options)

    def says(self, x: Tensor, expert: int, activation: Callable[..., Tensor]) -> Tensor:
        rounded = self._round(x, self.w13_input)
        projected = [self._project(rounded, expert, name) for name in self.shards]
        hidden = activation(*projected).float()
        if self.weight_only:  # a further launch quantises 16-bit values
            hidden = hidden.to(x.dtype)
        rounded = self._round(hidden, self.scales[expert, "down_proj"])
        return self._project(rounded, expert, "down_proj")

    def _round(self, x: Tensor, scale: Tensor) -> Tensor:
        largest = x.abs().amax().float() if self.weight_only else 6 * 448 * scale
        step = largest / 448
        return (x.float() / step).clamp(-448, 448).to(E4M3).double() * step.double()

    def _value(self, expert: int, name: str) -> Tensor:
        return folded(self.weights[expert, name])


def folded(weight: Nvfp4Tensor) -> Tensor:
    """Values of a weight in E4M3, scaled by a power of two for each row, in float64."""
    plain = Nvfp4Tensor(weight.data, weight.scales, torch.tensor(1.0, dtype=F32))
    exponent = torch.floor(torch.log2(72 / weight.scales.float().amax(1, keepdim=True)))
    assert (torch.ldexp(weight.scales.float(), exponent) >= 2**-5).all()
    rounded = torch.ldexp(plain.dequantize(), exponent).to(E4M3).double()
    return torch.ldexp(rounded, -exponent.double()) * weight.global_scale.double()


def served(
    model: Model,
    layer: Layer | None = None,
    *,
    options: Options = FP8,
    how: Callable[..., None] = load,
    **given: Any,
) -> tuple[Nvfp4ExpertsMethod, Layer]:
    """Layer that holds ``model``, of which the checkpoint has input scales or not."""
    given |= {"weight_only": model.weight_only, "options": options}
    method, layer = built(layer, **given)
    how(layer, model, **({"format": given["format"]} if "format" in given else {}))
    if layer.moe_config.has_bias and how is load:
        load_biases(layer, model)
    method.add_record()
    method.process_weights_after_loading(layer)
    return method, layer


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Check equality up to one rounding to bfloat16 and a few E4M3 rounding flips."""
    assert float((actual.double() - expected).norm() / expected.norm()) < 0.006


def record(method: Nvfp4ExpertsMethod) -> Any:
    [only] = method.startup.report.layers
    return only


# --- results ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("vllm_config")
@SCALING
class TestResults:
    @pytest.mark.parametrize("tokens", [1, 9, 70])
    def test_any_number_of_tokens(self, tokens: int, per_token: bool) -> None:
        model = Fp8Model(per_token=per_token)
        method, layer = served(model)
        x, weights, ids = batch(tokens)
        out = method.apply(layer, x, weights, ids, None, None)
        assert out.dtype == x.dtype
        assert_near(out, model.oracle(x, weights, ids, silu_mul))
        if per_token:  # the static scales of these tests saturate
            exact = Model(weight_only=True).oracle(x, weights, ids, silu_mul)
            assert 0.02 < float((out - exact).norm() / exact.norm()) < 0.06

    def test_any_routing(self, per_token: bool) -> None:
        """Routing has padding, unknown ids and duplicates; weights of empty slots are ignored."""
        model = Fp8Model(per_token=per_token)
        x, weights, ids = batch()
        ids[0], ids[1], ids[2] = torch.tensor([[-1, -1], [E, 1], [2, 2]])
        weights[0], weights[1, 0] = torch.nan, torch.inf
        method, layer = served(model)
        out = method.apply(layer, x, weights, ids, None, None)
        assert_near(out, model.oracle(x, weights, ids, silu_mul))
        assert not out[0].any()

    @pytest.mark.parametrize("tokens", [0, 1])
    def test_nothing_routed(self, tokens: int, per_token: bool) -> None:
        x, weights, ids = batch(tokens)
        method, layer = served(Fp8Model(per_token=per_token))
        out = method.apply(layer, x, weights, ids.fill_(-1), None, None)
        assert torch.equal(out, torch.zeros_like(x))

    def test_a_token_is_alone(self, per_token: bool) -> None:
        """NaN in one token's row does not affect other rows."""
        method, layer = served(Fp8Model(per_token=per_token))
        x, weights, ids = batch()
        clean = method.apply(layer, x, weights, ids, None, None)
        x[3] = torch.nan
        dirty = method.apply(layer, x, weights, ids, None, None)
        assert torch.equal(clean[torch.arange(9) != 3], dirty[torch.arange(9) != 3])
        assert dirty[3].isnan().all()

    def test_the_router_s_weight_comes_first(self, per_token: bool) -> None:
        model, layer = Fp8Model(per_token=per_token), Layer()
        layer.apply_router_weight_on_input = True
        method, _ = served(model, layer)
        x, weights, ids = batch()
        args = x, weights[:, :1], ids[:, :1]
        out = method.apply(layer, *args, None, None)
        assert_near(out, model.oracle(*args, silu_mul, weight_on_input=True))

    @pytest.mark.parametrize("name", FORMULAS)
    def test_activations(self, name: str, per_token: bool) -> None:
        """FP8 kernels compute every activation, and the epilogue quantises its result."""
        gated = not name.endswith("_no_mul")
        vllms = {"swigluoai_uninterleave": "swigluoai"}.get(name, name)
        layer = Layer(
            activation=MoEActivation(vllms), is_act_and_mul=gated,
            activation_situ_beta=4.0, activation_situ_linear_beta=25.0,
        )  # fmt: skip
        if not gated:
            layer.ckpt_gate_proj_name = None  # type: ignore[assignment]
        model = Fp8Model(per_token=per_token, gated=gated)
        method, _ = served(model, layer)
        assert method.plan.is_fp8
        x, weights, ids = batch()
        out = method.apply(layer, x, weights, ids, None, None)
        assert_near(out, model.oracle(x, weights, ids, FORMULAS[name]))

    @pytest.mark.parametrize("format", FORMATS)
    def test_tensors_and_record(self, format: str, per_token: bool) -> None:
        model = Fp8Model(per_token=per_token)
        method, layer = served(model, format=format)
        method.process_weights_after_loading(layer)  # vLLM may ask twice
        for part, matrices, n, k in (("w13", (E, 2), INNER, H), ("w2", (E,), H, INNER)):
            data, scales = folded_shapes(n, k)
            assert getattr(layer, f"{part}_weight").shape == (*matrices, *data)
            scale = getattr(layer, f"{part}_weight_scale")
            assert (scale.shape, scale.dtype) == ((*matrices, *scales), torch.int32)
            alpha = getattr(layer, f"{part}_alpha")
            assert (alpha.shape, alpha.dtype) == ((*matrices, n), F32)
            assert (getattr(layer, f"{part}_input") is None) == per_token
        if not per_token:
            torch.testing.assert_close(layer.w13_input.data, 6 * model.w13_input)
            own = torch.stack([model.scales[e, "down_proj"] for e in range(E)])
            torch.testing.assert_close(layer.w2_input.data, 6 * own)
        told = record(method)
        assert told.kernel == "nvfp4_grouped_silu_mul_gemm_w4a8/reference (cpu)"
        scaling = "per-token" if per_token else "static"
        assert (told.arithmetic, told.reason) == (f"W4A8 {scaling}", CHOSEN)
        assert told.weight_bytes == sum(p.nbytes for p in layer.parameters())

    @pytest.mark.parametrize(("parallel", "held"), [("tp", [E, E]), ("ep", [2, 1, 1])], ids=str)
    def test_ranks_add_up(
        self, parallel: str, held: list[int], per_token: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Row factors are divided as the rows are; with biases, which one rank adds."""
        inner = 2 * INNER if parallel == "tp" else INNER
        model = Fp8Model(per_token=per_token, inner=inner, biased=True)
        told = ranks(monkeypatch, len(held))
        x, weights, ids = batch()
        parts = torch.zeros(x.shape, dtype=F32)
        for rank, count in enumerate(held):
            layer = Layer(**{parallel: len(held)}, rank=rank, has_bias=True)
            method, _ = served(model, layer)
            assert len(layer.w13_alpha) == count
            parts += method.apply(layer, x, weights, ids, None, None).float()
        assert [errors.shape for errors in told] == [(E, 3)] * len(held)
        if parallel == "ep" or not per_token:
            assert_near(parts, model.oracle(x, weights, ids, silu_mul))
        else:  # each rank has its own scale of a token's hidden values
            exact = model.oracle(x, weights, ids, silu_mul)
            assert float((parts - exact).norm() / exact.norm()) < 0.05


def ranks(monkeypatch: pytest.MonkeyPatch, count: int, worst: float = 0.0) -> list[Tensor]:
    """Stand-in for ``count`` ranks, one of which finds the error ``worst`` in expert 2's up.

    Returns:
        Errors that ranks of this process tell the others.
    """
    told: list[Tensor] = []

    def all_reduce(errors: Tensor, op: Any, group: str) -> None:
        assert (op, group) == (torch.distributed.ReduceOp.MAX, "ranks")
        told.append(errors.clone())
        errors[2, 1].clamp_(min=worst)

    group = SimpleNamespace(world_size=count, device_group="ranks")
    monkeypatch.setattr(base, "get_tp_group", lambda: group)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return told


@pytest.mark.usefixtures("vllm_config")
def test_alternating_rows_and_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of gate and up alternate, as in gpt-oss, with biases, on two ranks."""
    model = Fp8Model(per_token=False, inner=2 * INNER, biased=True)
    for expert in range(E):
        gate, up = model.weights[expert, "gate_proj"], model.weights[expert, "up_proj"]
        model.weights[expert, "up_proj"] = Nvfp4Tensor(up.data, up.scales, gate.global_scale)
    ranks(monkeypatch, 2)
    x, weights, ids = batch()
    parts = torch.zeros(x.shape, dtype=F32)
    for rank in range(2):
        layer = Layer(tp=2, rank=rank, activation=MoEActivation.SWIGLUOAI, has_bias=True)
        method, _ = served(model, layer, how=load_alternating)
        parts += method.apply(layer, x, weights, ids, None, None).float()
    assert_near(parts, model.oracle(x, weights, ids, FORMULAS["swigluoai_uninterleave"]))


@pytest.mark.usefixtures("vllm_config")
def test_stacks() -> None:
    """Llama 4's stacks give the layer that single tensors give."""
    model = Fp8Model(per_token=False)
    for expert in range(E):
        gate, up = model.weights[expert, "gate_proj"], model.weights[expert, "up_proj"]
        model.weights[expert, "up_proj"] = Nvfp4Tensor(up.data, up.scales, gate.global_scale)
        model.scales[expert, "up_proj"] = model.scales[expert, "gate_proj"]
    one, other = (served(model, how=how)[1].state_dict() for how in (load, load_stacked))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.usefixtures("vllm_config")
@SCALING
def test_one_op(per_token: bool) -> None:
    method, layer = served(Fp8Model(per_token=per_token))
    compiled = torch.compile(
        lambda *args: method.apply(layer, *args, None, None), fullgraph=True, backend="eager"
    )
    args = batch()
    assert torch.equal(compiled(*args), method.apply(layer, *args, None, None))
    plan = method.plan
    check_op(
        torch.ops.nvfp4_tc.experts.default,
        (
            *args, None, *method.held(layer), method._sizes[:4], plan.targets, True, plan.terms,
            *plan.activation, False,
        ),
    )  # fmt: skip


@pytest.mark.usefixtures("vllm_config")
@SCALING
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "no gate"])
def test_kernels_of_hopper(gated: bool, per_token: bool) -> None:
    """Emulated kernels of sm_90 are as near to the references as a few E4M3 roundings."""
    devices.cutlass_or_skip()
    activation = MoEActivation.SILU if gated else MoEActivation.RELU2_NO_MUL

    def result() -> tuple[Nvfp4ExpertsMethod, Tensor]:
        layer = Layer(is_act_and_mul=gated, activation=activation)
        if not gated:
            layer.ckpt_gate_proj_name = None  # type: ignore[assignment]
        method, _ = served(Fp8Model(per_token=per_token, gated=gated), layer)
        return method, method.apply(layer, *batch(5), None, None)

    _, expected = result()
    with devices.emulated_ops(EAGER, "sm_90"):
        method, found = result()
    assert float((found - expected).double().norm() / expected.double().norm()) < 0.02
    op = "grouped_silu_mul_gemm" if gated else "grouped_gemm"
    assert record(method).kernel == f"nvfp4_{op}_w4a8/fp8_wgmma (sm_90)"


@pytest.mark.usefixtures("vllm_config")
def test_a_dummy_load(vllm_config: Any) -> None:
    kept, vllm_config.load_config.load_format = vllm_config.load_config.load_format, "dummy"
    try:
        method, layer = built(options=FP8)
        method.process_weights_after_loading(layer)
    finally:
        vllm_config.load_config.load_format = kept
    assert method.plan.is_fp8
    assert method.apply(layer, *batch(), None, None).isfinite().all()


# --- experts that do not fold -------------------------------------------------------------------


def harden(model: Model, *which: tuple[int, str]) -> Model:
    for each in which:
        model.weights[each] = hard_to_fold(model.weights[each])
    return model


@pytest.mark.usefixtures("vllm_config")
@SCALING
@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_one_expert_keeps_its_layer_in_16_bits(name: str, per_token: bool) -> None:
    model = harden(Model(weight_only=True), (2, name))
    model.weight_only = per_token
    method, layer = served(model)
    model.weight_only = True
    args = batch()
    out = method.apply(layer, *args, None, None)
    assert_near(out, model.oracle(*args, silu_mul))
    told = record(method)
    assert told.arithmetic == "W4A16"
    assert told.kernel == "nvfp4_grouped_silu_mul_gemm_w4a16/reference (cpu)"
    start = f"activations stay 16-bit: {PREFIX}.2.{name}: FP8 changes a row of its weight by "
    assert told.reason.startswith(start)
    assert told.reason.endswith("must be at most 5%; experts chosen by vLLM: routing method Custom")
    assert told.weight_bytes == sum(p.nbytes for p in layer.parameters())


@pytest.mark.usefixtures("vllm_config")
def test_the_worst_is_named() -> None:
    model = harden(Fp8Model(per_token=False), (1, "down_proj"), (3, "gate_proj"))
    tiny = model.weights[3, "up_proj"]
    model.weights[3, "up_proj"] = Nvfp4Tensor(
        tiny.data, (tiny.scales.float() / 2**13).to(E4M3),
        torch.tensor(kernel_weight.MIN_GLOBAL, dtype=F32),
    )  # fmt: skip
    for each in model.scales:
        model.scales[each] = torch.tensor(kernel_weight.MIN_GLOBAL, dtype=F32)
    method, _ = served(model)
    start = f"activations stay 16-bit: {PREFIX}.3.up_proj and 2 more: FP8 makes a factor of a row"
    assert record(method).reason.startswith(start)


@pytest.mark.parametrize("arch", ["sm_90", "cpu"])
def test_kernels_and_hash_of_a_layer_in_16_bits(arch: str, vllm_config: Any) -> None:
    """A server compiles the kernels that serve, and takes up no graph of the other arithmetic."""
    hashes = set()
    for option, hard in (("fp8", False), ("fp8", True), ("16-bit", False)):
        vllm_config.additional_config = {"nvfp4_tc": {"activation": "fp8"}}
        model = Model(weight_only=False)
        if hard:
            harden(model, (2, "up_proj"))
        with standing_in("cpu", arch):
            options = Options(activation=option)  # type: ignore[arg-type]
            method, layer = built(Layer(), options=options)
            method.startup.loaded = lambda *_: None  # type: ignore[method-assign]  compiles nothing
            load(layer, model)
            method.process_weights_after_loading(layer)
        is_fp8 = option == "fp8" and not hard
        assert method.plan.is_fp8 == is_fp8
        if arch == "sm_90":
            needed: Any = method.startup.products[PREFIX]
            assert needed.experts.inputs == ("fp8-static" if is_fp8 else "16-bit")
            assert layer.w13_weight_scale.dtype == (torch.int32 if is_fp8 else torch.uint8)
        hashes.add(vllm_config.compute_hash())
    assert len(hashes) == 3


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("parallel", ["tp", "ep"])
def test_ranks_decide_alike(parallel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank's part or expert does not fold, and so this rank's stay in 16 bits too."""
    inner = 2 * INNER if parallel == "tp" else INNER
    told = ranks(monkeypatch, 2, worst=0.5)
    method, layer = served(Fp8Model(per_token=False, inner=inner), Layer(**{parallel: 2}))
    [errors] = told
    assert errors.max() < 0.04
    assert bool((errors[2] > 0).all()) == (parallel == "tp")  # expert 2 is the other rank's
    assert record(method).arithmetic == "W4A16"
    why = f"activations stay 16-bit: {PREFIX}.2.up_proj: FP8 changes a row of its weight by 50.0%"
    assert record(method).reason.startswith(why)
    assert layer.w13_input is None


def again(method: Nvfp4ExpertsMethod, layer: Layer, model: Model) -> None:
    """Load weights into a layer that serves."""
    method.create_weights(
        layer, layer.local, H, INNER, BF16, global_num_experts=E, weight_loader=None
    )
    load(layer, model)
    method.process_weights_after_loading(layer)


@pytest.mark.usefixtures("vllm_config")
def test_weights_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server's arithmetic is fixed at start; no rank waits for others, which may be serving."""
    good, bad = Fp8Model(per_token=False), harden(Fp8Model(per_token=False), (1, "up_proj"))
    told = ranks(monkeypatch, 2)
    method, layer = served(good, Layer(ep=2))
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    again(method, layer, good)
    after = layer.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert method.plan.is_fp8
    refused = rf"{PREFIX}\.1\.up_proj: {HARD} for activations in FP8, as at start; start the ser"
    with pytest.raises(UnsupportedCheckpoint, match=refused):
        again(method, layer, bad)
    assert len(told) == 1

    method, layer = served(bad, Layer(ep=2))
    again(method, layer, good)
    assert record(method).arithmetic == "W4A16"
    assert layer.w13_alpha.shape == (2, 2)
    assert len(told) == 2
