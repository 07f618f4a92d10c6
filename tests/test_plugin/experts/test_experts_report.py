"""Report and expected kernels of a layer of experts: counts, bytes, ranks, and the method."""

from typing import Any

import pytest
import torch

from nvfp4_kernels.devices import standing_in
from nvfp4_kernels.precompile.experts_layer import Experts
from tests.test_plugin.experts.test_experts import INNER, PREFIX, E, H, Layer, Model
from vllm_fp4_plugin.experts import choice
from vllm_fp4_plugin.experts.online import Nvfp4OnlineExpertsMethod
from vllm_fp4_plugin.experts.plan import make_plan
from vllm_fp4_plugin.experts.record import own_record, unquantized
from vllm_fp4_plugin.experts.weights import kernel_experts
from vllm_fp4_plugin.formats import FORMATS, CheckpointConfig, LayerGroup, UnsupportedCheckpoint
from vllm_fp4_plugin.formats.kind import Kind
from vllm_fp4_plugin.options import Activation as Inputs
from vllm_fp4_plugin.options import InvalidOption, Options
from vllm_fp4_plugin.startup import Startup
from vllm_fp4_plugin.warmup import ExpertsLayer

GATED = pytest.mark.parametrize("gated", [True, False], ids=["gated", "no gate"])
RANKS = pytest.mark.parametrize("ranks", [1, 2])


def elements(projections: int, ranks: int) -> int:
    """Number of weight elements in a rank's experts."""
    return E // ranks * projections * INNER * H


@RANKS
@GATED
@pytest.mark.parametrize("weight_only", [False, True], ids=["static", "16-bit"])
@pytest.mark.parametrize("arch", ["cpu", "sm_90", "sm_100"])
def test_bytes_of_experts_are_those_they_take(
    arch: str, weight_only: bool, gated: bool, ranks: int, vllm_config: Any
) -> None:
    """Bytes include all scales, one factor per matrix, and padding, as stored for the kernels."""
    del vllm_config
    layer = Layer(ep=ranks, rank=ranks - 1, is_act_and_mul=gated)
    model = Model(weight_only=weight_only, gated=gated)
    held = model.held(slice(layer.first, layer.first + layer.local))
    inputs: Inputs = "16-bit" if weight_only else "static"
    activation = choice.SILU if gated else choice.SILU._replace(name="relu2")
    with standing_in("cpu", arch):
        plan = make_plan(activation, gated=gated, inputs=inputs, requested=None)
        record = own_record(layer.moe_config, PREFIX, plan, "asked for")
        tensors = [t for t in kernel_experts(held, plan) if t is not None]
    assert record.name == PREFIX
    assert record.kernel == plan.first.label
    assert record.reason.startswith("asked for")
    assert record.elements == elements(2 + gated, ranks)
    assert record.weight_bytes == sum(t.nbytes for t in tensors)


@pytest.mark.parametrize(
    ("arch", "option", "inputs", "expected"),
    [
        (
            "sm_90", "per-token", "static",
            ("W4A16", "sm_90 has no W4A4 kernel, activations stay 16-bit"),
        ),
        ("sm_90", "fp8", "static", ("W4A8 static", "activation is fp8")),
        ("sm_90", "fp8", "16-bit", ("W4A8 per-token", "activation is fp8")),
        ("sm_90", "16-bit", "static", ("W4A16", "activation is 16-bit")),
        ("cpu", "fp8", "static", ("W4A8 static", "activation is fp8")),
        ("cpu", "fp8", "per-token", ("W4A8 per-token", "activation is fp8")),
        ("cpu", "16-bit", "static", ("W4A16", "activation is 16-bit")),
        ("cpu", "16-bit", "per-token", ("W4A16", "")),
    ],
)  # fmt: skip
@GATED
def test_plans(arch: str, option: Any, inputs: Any, expected: tuple[str, str], gated: bool) -> None:
    with standing_in("cpu", arch):
        plan = make_plan(choice.SILU, gated=gated, inputs=inputs, requested=None, option=option)
    assert (plan.arithmetic, plan.reason) == expected
    mode = "w4a8" if "W4A8" in expected[0] else "w4a16"
    assert plan.first.mode == plan.second.mode == mode
    assert plan.enter.mode == ("w4a8" if mode == "w4a8" else "float")
    between = None if plan.between is None else plan.between.mode
    assert between == ("w4a8" if "per-token" in expected[0] else None)


def test_blackwell_refuses_fp8_of_experts_too() -> None:
    message = r"activation: is 'fp8', must not be given on sm_100, which multiplies NVFP4 itself"
    with standing_in("cpu", "sm_100"), pytest.raises(InvalidOption, match=message):
        make_plan(choice.SILU, gated=True, inputs="static", requested=None, option="fp8")


@RANKS
@GATED
def test_experts_in_16_bits(gated: bool, ranks: int) -> None:
    layer = Layer(ep=ranks, is_act_and_mul=gated)
    layer.params_dtype = torch.bfloat16  # type: ignore[assignment]
    record = unquantized(layer, PREFIX, "ignored")
    assert record.arithmetic == "16-bit"
    assert record.elements == elements(2 + gated, ranks)
    assert record.weight_bytes == 2 * record.elements


@RANKS
@pytest.mark.parametrize(
    ("kind", "scale_bytes"),
    [
        # Scales of one matrix: one for each block, and one global scale.
        (Kind.NVFP4, INNER * H // 16 + 4),
        (Kind.FP8, 4),
        (Kind.FP8_CHANNEL, 0),
    ],
)
def test_experts_that_vllm_serves(
    kind: Kind, scale_bytes: int, ranks: int, vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report for another device names no method, as vLLM's choice there is unknown."""
    del vllm_config
    monkeypatch.setattr(choice, "is_planned", lambda: True)
    monkeypatch.setattr(choice, "UnquantizedFusedMoEMethod", lambda _: None)
    layer, startup = Layer(ep=ranks), Startup()
    checkpoint = CheckpointConfig(FORMATS["modelopt"], False)
    with standing_in("cpu", "sm_90"):
        choice.choose(
            layer, PREFIX, LayerGroup("", kind), checkpoint, Options(experts="vllm"), startup, "",
            None,
        )  # fmt: skip
    [record] = startup.report.layers
    data = INNER * H // 2 if kind is Kind.NVFP4 else INNER * H
    rows = 4 * (2 * INNER + H) if kind is Kind.FP8_CHANNEL else 0  # a factor each
    assert record.elements == elements(3, ranks)
    # In vLLM, gate and up are a matrix each.
    assert record.weight_bytes == E // ranks * (3 * (data + scale_bytes) + rows)


@pytest.mark.parametrize("ranks", [1, 2])
def test_kernels_of_a_rank_map_experts(ranks: int, vllm_config: Any) -> None:
    """An expert map is expected if other ranks hold experts; it covers the experts of all ranks."""
    del vllm_config
    startup, expected = Startup(), []
    startup.require_kernels = lambda prefix, layer: expected.append((prefix, layer))  # type: ignore[method-assign]
    layer = Layer(ep=ranks, in_dtype=torch.bfloat16, experts_per_token=2)
    with standing_in("cpu", "sm_100"):
        Nvfp4OnlineExpertsMethod(startup, Options(), layer, PREFIX)
    [(prefix, found)] = expected
    assert prefix == PREFIX
    assert isinstance(found, ExpertsLayer)
    assert isinstance(found.experts, Experts)
    assert found.experts.mapped == (0, E)[ranks - 1]
    assert (found.experts.sizes.held, found.experts.sizes.total) == (E // ranks, E)


class TestOnline:
    """16-bit experts in layers that cannot be quantised, or need not be."""

    @staticmethod
    def chosen(layer: Layer, **options: Any) -> tuple[Any, Startup]:
        layer.params_dtype = torch.bfloat16  # type: ignore[assignment]
        startup = Startup()
        method = choice.choose_online(layer, PREFIX, Options(**options), startup, None)
        return method, startup

    @pytest.mark.usefixtures("vllm_config")
    @pytest.mark.parametrize("server", ["auto", "own"])
    def test_ours(self, server: str) -> None:
        method, startup = self.chosen(Layer(), experts=server)
        assert isinstance(method, Nvfp4OnlineExpertsMethod)
        assert startup.pending == {PREFIX}
        [record] = startup.report.layers
        assert record.kernel == method.plan.first.label
        assert record.elements == elements(3, 1)

    @pytest.mark.usefixtures("vllm_config")
    def test_own_alone_is_refused_where_ours_cannot(self) -> None:
        with pytest.raises(UnsupportedCheckpoint, match=f"{PREFIX}: its experts have biases"):
            self.chosen(Layer(has_bias=True), experts="own")

    @pytest.mark.usefixtures("vllm_config")
    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({}, "its experts have biases, must have none"),
            ({"experts": "vllm"}, "nvfp4_tc.experts is 'vllm'"),
            ({"ignore": (PREFIX,), "experts": "own"}, f"ignored by '{PREFIX}'"),
        ],
    )
    def test_they_stay_in_16_bits(self, options: dict[str, Any], reason: str) -> None:
        method, startup = self.chosen(Layer(has_bias=not options), **options)
        assert method is None
        assert not startup.pending
        [record] = startup.report.layers
        assert record.kernel == "unquantized (vLLM)"
        assert record.reason.startswith(reason)
