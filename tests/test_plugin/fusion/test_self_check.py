"""Self-check at start: correct fused ops stay; wrong ops are unfused and named."""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention

from tests import heap
from tests.registry import configs, session, step, unbuilt, weights
from vllm_fp4_plugin.attention.rotation import Rotation, Unrotated
from vllm_fp4_plugin.engine.complete_loaders import _CompleteDefaultLoader
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.fusion import gate_up, match_rotary, norm_quantize
from vllm_fp4_plugin.fusion.norm_quantize import QuantizingNorm
from vllm_fp4_plugin.fusion.self_check import attention, mlp, norm, run

STATIC = {
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "float", "group_size": 16},
                "input_activations": {"num_bits": 4, "type": "float", "group_size": 16},
            }
        },
    }
}
QWEN, EXAONE = "Qwen3ForCausalLM", "Exaone4ForCausalLM"
GAIN = 200
SEEN = 0.1  # at most, of what is right; ROUNDING leaves room for other models


@pytest.fixture(scope="module")
def vllm() -> Iterator[session.Session]:
    with session.started() as found:
        yield found


def built(vllm: session.Session, architecture: str = QWEN, **options: Any) -> session.Built:
    """Loaded model whose linear layers are NVFP4 with static scales."""
    config: dict[str, Any] = {"additional_config": {"nvfp4_tc": options}, "changes": STATIC}
    found = vllm.build(architecture, device="cpu", load_format="dummy", **config)
    torch.manual_seed(0)  # of what NVFP4 tensors are filled with
    weights.load(found)
    return found


def with_large_gates(vllm: session.Session, **options: Any) -> session.Built:
    """Model with gates so large that SiLU is not just half of its input."""
    found = built(vllm, **options)
    for module in found.model.modules():
        if hasattr(module, "gate_up_proj"):
            module.gate_up_proj.alpha.mul_(GAIN)
    return found


class Log:
    """Logger that keeps the logged lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, line: str, *given: Any) -> None:
        self.lines.append(line % given)

    warning = info


def checked(model: session.Built) -> list[str]:
    """Lines that the self-check logs for a model."""
    log = Log()
    with patch.object(run, "logger", log), set_current_vllm_config(model.config):
        run.check(model.model, model.config)
    return log.lines


def kinds(model: session.Built) -> list[Any]:
    with set_current_vllm_config(model.config):
        return [
            *attention.neighbourhoods(model.model, model.config),
            *norm.neighbourhoods(model.model),
            *mlp.neighbourhoods(model.model),
        ]


def test_what_is_right_stays_fused(vllm: session.Session) -> None:
    model = built(vllm)
    before = step.run(model)
    [line] = checked(model)
    assert line.startswith("nvfp4-tc: self-check: 4 of 4 kinds of fused ops agree with their")
    assert torch.equal(step.run(model), before)
    assert len(kinds(model)) == 8  # two layers: attention, two norms, an MLP


def test_fp8_that_is_right_stays_fused(vllm: session.Session) -> None:
    model = built(vllm, activation="fp8")
    before = step.run(model)
    [line] = checked(model)
    assert line.startswith("nvfp4-tc: self-check: 4 of 4 kinds of fused ops agree with their")
    assert torch.equal(step.run(model), before)
    assert len(kinds(model)) == 8


@pytest.mark.parametrize("fault", ["exchanged", "scale"])
def test_a_fault_of_fp8(fault: str, vllm: session.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up are exchanged; a norm quantises by another scale than the layer's."""
    model = with_large_gates(vllm, activation="fp8")
    expected = step.run(model)
    product, op = gate_up.silu_mul_linear_fp8, norm_quantize.norm_op

    def other(x: Any, s: Any, r: Any, weight: Tensor, scales: Tensor, *rest: Any) -> Any:
        return product(x, s, r, weight.flip(0), scales.flip(0), *rest)

    def doubled(name: str) -> Any:
        return lambda *given: op(name)(*given[:-2], 3 * given[-2], given[-1])

    if fault == "exchanged":
        monkeypatch.setattr(gate_up, "silu_mul_linear_fp8", other)
    else:
        monkeypatch.setattr(norm_quantize, "norm_op", doubled)
    warned = [line for line in checked(model) if "unfused, as its results" in line]
    where = "gate_up_proj (with" if fault == "exchanged" else "layernorm (quantises)"
    assert warned
    assert all(where in line for line in warned)
    assert far(step.run(model), expected) < 0.2


@pytest.mark.thorough
def test_every_architecture(vllm: session.Session) -> None:
    """Each kind of fused op is checked in every architecture; exceptions are named here."""
    counts = dict.fromkeys(("rotated", "result quantised", "quantises", "SiLU-mul"), 0)
    wrong, unknown, fused, refused = {}, {}, 0, 0
    for architecture, *_ in configs.distinct().values():
        if architecture in unbuilt.UNBUILT.keys() | weights.UNPREPARED.keys():
            continue
        with heap.paused():
            try:
                model = built(vllm, architecture)
            except UnsupportedCheckpoint:  # MLA's projections, and routers that a CPU has not
                refused += 1
                continue
            found = {each.kind: each for each in kinds(model)}
            fused += bool(found)
            for said in counts:
                counts[said] += any(said in each.name for each in found.values())
            with set_current_vllm_config(model.config), torch.no_grad():
                for each in found.values():
                    outcome = run._outcome(each)
                    if outcome.unknown:
                        unknown[f"{architecture} {each.name}"] = outcome.unknown
                    elif not outcome.distance <= SEEN:
                        wrong[f"{architecture} {each.name}"] = outcome.distance
            del model, found
    print(f"{fused} architectures: {counts}; {unknown}")
    assert not wrong
    assert not unknown
    assert fused >= 175
    assert refused < 50
    assert counts["rotated"] >= 105
    assert min(counts.values()) >= 105


# --- faults ---------------------------------------------------------------------------------------


def test_layers_that_are_not_rotated(
    vllm: session.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rotation is matched wrongly, which the model's own forward pass reveals."""
    expected = step.run(built(vllm, EXAONE, fuse_attention=False))
    monkeypatch.setattr(match_rotary, "unsupported_reason", lambda *_: "")
    flow_of = match_rotary.flow_of
    monkeypatch.setattr(  # of the class: nothing is known of a layer's flags
        match_rotary, "flow_of", lambda owner, *a, **k: flow_of(type(owner), *a, **k)
    )
    model = built(vllm, EXAONE)
    layers = model.config.compilation_config.static_forward_context.values()
    rotating = [layer for layer in layers if isinstance(layer, Attention) and layer.impl.rotation]
    assert rotating
    flags = {bool(m.sliding_window or m.apply_rope_all_layers) for m in owners(model)}
    assert flags == {True, False}
    wrong = step.run(model)
    lines = checked(model)
    warnings = [line for line in lines if "unfused, as its results differ" in line]
    assert len(warnings) == 1
    assert "self_attn.attn (queries and keys rotated" in warnings[0]
    assert f"at most {run.ROUNDING}" in warnings[0]
    rotated = {bool(m.sliding_window or m.apply_rope_all_layers): m for m in owners(model)}
    assert type(rotated[True].rotary_emb) is Unrotated
    assert type(rotated[False].rotary_emb) is not Unrotated
    assert far(step.run(model), expected) < far(wrong, expected) / 3
    assert "unfused at start" in str(model.config.additional_config)
    report = model.config.quant_config.startup.report
    assert any("unfused at start" in record.reason for record in report.layers)


def owners(model: session.Built) -> list[Any]:
    return [m for m in model.model.modules() if isinstance(getattr(m, "attn", None), Attention)]


def far(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def wrong_positions(to: pytest.MonkeyPatch) -> None:
    store = Rotation.store
    to.setattr(
        Rotation, "store",
        lambda self, q, k, v, pages, slots, positions, scales: store(
            self, q, k, v, pages, slots, positions + 1, scales
        ),
    )  # fmt: skip


def unnormalised(to: pytest.MonkeyPatch) -> None:
    of_heads = Rotation.of_heads
    to.setattr(
        Rotation, "of_heads",
        lambda self, query: of_heads(self, query)._replace(q_norm=None, k_norm=None, eps=None),
    )  # fmt: skip


def exchanged(to: pytest.MonkeyPatch) -> None:
    """Exchange the gate and up projections."""
    product = gate_up.silu_mul_linear_quantized

    def other(x: Any, s: Any, r: Any, weight: Tensor, scales: Tensor, *rest: Any) -> Any:
        flipped = scales.view(torch.uint8).flip(0).view(scales.dtype)
        return product(x, s, r, weight.flip(0), flipped, *rest)

    to.setattr(gate_up, "silu_mul_linear_quantized", other)


def doubled(to: pytest.MonkeyPatch) -> None:
    op = norm_quantize.norm_op
    to.setattr(
        norm_quantize, "norm_op",
        lambda name: lambda x, *rest: op(name)(x, *rest[:-5], 3 * rest[-5], *rest[-4:]),
    )  # fmt: skip


def raising(to: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> NoReturn:
        raise RuntimeError("no such launch")

    to.setattr(gate_up, "silu_mul_linear_quantized", fail)


def nan(to: pytest.MonkeyPatch) -> None:
    product = gate_up.silu_mul_linear_quantized

    def broken(*given: Any) -> Any:
        data, scales = product(*given)
        scales.view(torch.uint8).fill_(0x7F)
        return data, scales

    to.setattr(gate_up, "silu_mul_linear_quantized", broken)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "positions": (wrong_positions, "self_attn.attn (queries and keys normalised, rotated"),
    "heads": (unnormalised, "self_attn.attn (queries and keys normalised, rotated"),
    "gate and up": (exchanged, "gate_up_proj (with SiLU-mul)"),
    "norm": (doubled, "layernorm (quantises)"),
    "an error": (raising, "gate_up_proj (with SiLU-mul)"),
    "NaN": (nan, "gate_up_proj (with SiLU-mul)"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_fused_op(
    name: str,
    vllm: session.Session,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The faulty op is unfused in every layer, and the model's results are right again."""
    expected = step.run(with_large_gates(vllm))
    break_it, where = FAULTS[name]
    model = with_large_gates(vllm)
    break_it(monkeypatch)
    warned = [line for line in checked(model) if "unfused, as its results" in line]
    assert warned
    assert all(where in line for line in warned)
    assert far(step.run(model), expected) < 0.2
    assert not [line for line in checked(model) if "unfused, as" in line]


def test_what_cannot_be_run_alone_is_said(
    vllm: session.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(vllm)
    kind = type(owners(model)[0])
    forward = kind.forward

    def needing(self: Any, positions: Any, hidden_states: Any, table: Any, limit: Any) -> Any:
        return forward(self, positions, hidden_states)

    monkeypatch.setattr(kind, "forward", needing)
    lines = checked(model)
    said = (
        "not run at start: TypeError: Qwen3Attention.forward takes positions, hidden_states, table"
    )
    assert said in lines[0]
    assert "self-check: 3 of 4 kinds" in lines[1]
    assert owners(model)[0].attn.impl.rotation is not None


def test_ranks_act_alike(vllm: session.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks unfuse an op if one rank finds a fault."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(run, "get_tensor_model_parallel_world_size", lambda: 2)
    others = torch.zeros(2)
    monkeypatch.setattr(run, "tensor_model_parallel_all_reduce", lambda flags: flags + others)
    assert run._agreed(run.Outcome(0.01), cpu) == run.Outcome(0.01)
    others[1] = 1
    assert run._agreed(run.Outcome(0.01), cpu).distance > run.ROUNDING
    others[0] = 1
    assert run._agreed(run.Outcome(0.01), cpu).unknown == "another rank cannot"


def test_only_models_of_ours(vllm: session.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    loaded = object()
    monkeypatch.setattr(run, "schedule", lambda *given: seen.append(given))
    monkeypatch.setattr(
        _CompleteDefaultLoader.__mro__[2], "load_model", lambda *_: loaded, raising=False
    )
    loader = _CompleteDefaultLoader.__new__(_CompleteDefaultLoader)
    model = built(vllm)
    assert loader.load_model(model.config, model.model_config) is loaded
    assert seen == [(loaded, model.config)]
    monkeypatch.setattr(model.model_config, "quantization", None)
    loader.load_model(model.config, model.model_config)
    assert len(seen) == 1


def test_it_runs_when_the_model_is_called_first(
    vllm: session.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(vllm)
    seen = []
    monkeypatch.setattr(run, "check", lambda *given: seen.append(given))
    run.schedule(model.model, model.config)
    assert not seen
    for _ in range(2):
        step.run(model)
        assert seen == [(model.model, model.config)]
    assert not model.model._forward_pre_hooks


def test_a_model_that_is_compiled_whole_is_checked_at_once(
    vllm: session.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls of a compiled model bypass hooks, so the check runs immediately."""
    model = built(vllm)
    seen = []
    monkeypatch.setattr(run, "check", lambda *given: seen.append(given))
    kind = type(model.model)
    monkeypatch.setattr(kind, "__call__", lambda self, *a, **k: self.forward(*a, **k))
    run.schedule(model.model, model.config)
    assert seen == [(model.model, model.config)]
    assert not model.model._forward_pre_hooks


def test_norms_are_left_to_vllm(vllm: session.Session) -> None:
    model = built(vllm, fuse_norm=False)
    assert not list(norm.neighbourhoods(model.model))
    assert not [m for m in model.model.modules() if type(m) is QuantizingNorm and m.feeding]
