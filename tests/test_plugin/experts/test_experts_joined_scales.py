"""Experts whose gate and up get a joint global scale, for vLLM's own methods."""

from enum import Enum
from typing import Any

import pytest
import torch

from nvfp4_kernels.activation import SILU
from tests.test_plugin.experts.test_experts import F32, PREFIX, Layer, Model, batch, mixture
from vllm_fp4_plugin.experts import vllm_methods
from vllm_fp4_plugin.experts.joined_scales import GlobalScales, described, join
from vllm_fp4_plugin.experts.ledger import ExpertLedger
from vllm_fp4_plugin.formats import FORMATS, CheckpointConfig, LayerGroup, UnsupportedCheckpoint
from vllm_fp4_plugin.formats.kind import Kind
from vllm_fp4_plugin.report import LayerRecord
from vllm_fp4_plugin.startup import Startup


@pytest.mark.parametrize("modelopt", [True, False], ids=["factors", "divisors"])
@pytest.mark.parametrize("weight_only", [True, False], ids=["W4A16", "W4A4"])
def test_joined_scales_compute_the_same(modelopt: bool, weight_only: bool) -> None:
    model = Model(weight_only=weight_only)
    held = model.held()
    x, weights, ids = batch()
    inputs = torch.stack([model.scales[e, "down_proj"] for e in range(len(held.w2))])
    factors = (held.w13_global, held.w2_global, inputs)
    stored = [each.clone() if modelopt else each.reciprocal() for each in factors]
    scales = GlobalScales(*stored, reciprocal=not modelopt)
    assert described(scales.factors()).startswith("differ in 4 of 4 experts, by up to ")
    join(scales)
    assert described(scales.factors()) == ""
    w13, w2, w2_input = (each if modelopt else each.reciprocal() for each in scales[:3])
    joined = held._replace(w13_global=w13, w2_global=w2, w2_input=None if weight_only else w2_input)
    says = [
        mixture(x, weights, ids, None, each, SILU, weight_on_input=False).double()
        for each in (joined, held, held._replace(w13_global=w13))
    ]
    off, off_without = ((other - says[0]).norm() / says[0].norm() for other in says[1:])
    assert off < 0.004  # roundings to bfloat16, of W4A4 a 4-bit step here and there
    assert off_without > 0.3


Backend = Enum("Backend", ["MARLIN", "HUMMING"])


class Delegate:
    """Stand-in for a method of vLLM's, limited to loading."""

    def __init__(self, backend: Backend) -> None:
        self.nvfp4_backend = backend

    def create_weights(self, layer: Any, *, weight_loader: Any) -> None:
        for name, shape in {
            "w13_weight_scale_2": (2, 2), "w2_weight_scale_2": (2,), "w2_input_scale": (4,),
        }.items():  # fmt: skip
            parameter = torch.nn.Parameter(torch.ones(shape, dtype=F32), requires_grad=False)
            parameter.weight_loader = weight_loader  # type: ignore[attr-defined]
            layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.seen = {name: p.tolist() for name, p in layer.named_parameters()}


@pytest.mark.parametrize(
    ("limit", "backend", "note", "w2", "w2_input"),
    [
        (None, "MARLIN", ": down's makes up for it", [1.0, 4.0], [1.0, 1.0, 1.0, 0.25]),
        (None, "HUMMING", ": down's makes up for it", [1.0, 4.0], [1.0, 1.0, 1.0, 0.25]),
        (7.0, "MARLIN", ": vLLM takes gate's for both", [1.0, 1.0], [1.0] * 4),
        (7.0, "HUMMING", ": Humming rounds each to 16 bits", [1.0, 1.0], [1.0] * 4),
    ],
    ids=["joined", "joined, Humming", "clamped", "clamped, Humming"],
)
def test_scales_are_joined_once_loaded(
    limit: float | None,
    backend: str,
    note: str,
    w2: list[float],
    w2_input: list[float],
    vllm_config: Any,
) -> None:
    """The rank is the second of two, which holds the input scales of all four experts."""
    layer, method, startup = Layer(ep=2, rank=1), Delegate(Backend[backend]), Startup()
    layer.swiglu_limit = limit
    startup.pending.add(PREFIX)
    startup.report.add(LayerRecord(PREFIX, "nvfp4 (vLLM: …)", "W4A16", "", 1, 1))
    ledger = ExpertLedger(layer, PREFIX)
    group, checkpoint = (
        LayerGroup("", Kind.NVFP4_A16),
        CheckpointConfig(FORMATS["modelopt"], weight_only=True),
    )
    vllm_methods._watch(method, ledger, group, checkpoint, startup)
    method.create_weights(layer, weight_loader=lambda *_: True)
    layer.w13_weight_scale_2.data[1, 1] = 4.0
    for expert in range(4):
        for shard, part in (("w1", "w13"), ("w3", "w13"), ("w2", "w2")):
            param = getattr(layer, f"{part}_weight_scale_2")
            name = f"{PREFIX}.{part}_weight_scale_2"
            param.weight_loader(param, torch.ones((), dtype=F32), name, shard, expert, True)
    method.process_weights_after_loading(layer)
    assert method.seen["w2_weight_scale_2"] == w2
    assert method.seen["w2_input_scale"] == w2_input
    [record] = startup.report.layers
    said = "global scales of gate and up differ in 1 of 2 experts, by up to 4.00×"
    assert record.reason == said + note
    assert not startup.pending


def test_scales_too_far_apart_to_be_joined_are_refused(vllm_config: Any) -> None:
    """Down's scales, which compensate for the joint scale, would become infinite or zero."""
    layer, method, startup = Layer(ep=2, rank=1), Delegate(Backend.MARLIN), Startup()
    group = LayerGroup("", Kind.NVFP4_A16)
    checkpoint = CheckpointConfig(FORMATS["modelopt"], weight_only=True)
    ledger = ExpertLedger(layer, PREFIX)
    ledger.check_complete = lambda: None  # type: ignore[method-assign]
    vllm_methods._watch(method, ledger, group, checkpoint, startup)
    method.create_weights(layer, weight_loader=lambda *_: True)
    layer.w13_weight_scale_2.data[1] = torch.tensor([2.0**-50, 2.0**60])
    layer.w2_weight_scale_2.data[1] = 2.0**20
    message = rf"{PREFIX}: global scales of gate and up differ in 1 of 2 experts, by up to .*; quan"
    with pytest.raises(UnsupportedCheckpoint, match=message):
        method.process_weights_after_loading(layer)
