"""Experts with a launch cache: launches of a cached call, and changes that need a new check."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import InvalidArgument
from nvfp4_kernels.activation import SILU
from nvfp4_kernels.devices import SM_COUNTS
from nvfp4_kernels.gemm.grouped.tile_tokens import ExpertSizes
from nvfp4_kernels.moe.router import Router
from nvfp4_kernels.precompile.experts_layer import Choice, Experts
from nvfp4_kernels.runtime import compile as compiler
from nvfp4_kernels.runtime import launch_cache
from tests import devices
from tests.emulator import randomised
from tests.test_plugin.experts.test_experts import E, H, K, Model
from vllm_fp4_plugin.experts import op
from vllm_fp4_plugin.experts.plan import make_plan
from vllm_fp4_plugin.experts.weights import folded_experts, kernel_experts
from vllm_fp4_plugin.warmup import ExpertsLayer, product_kernels

INNER = 64  # between the products
ROUTER = Router(K, "softmax", True, 1, 1, 1.0)
Call = dict[str, Any]


@dataclass
class Device:
    """Device that records launches and runs nothing.

    Attributes:
        launched: kernel and arguments of each launch.
        checked: number of calls that were checked rather than repeated.
    """

    launched: list[tuple[Any, tuple[Any, ...]]] = field(default_factory=list)
    checked: int = 0

    def compiled(self, kernel: Any, target: str) -> Callable[..., None]:
        return lambda *words: self.launched.append((kernel, words))

    def launches(self, call: Call) -> list[Any]:
        """Call the op; returns the launches, with names in place of addresses."""
        self.launched.clear()
        run = op.routed_experts if "router_logits" in call else op.experts
        result = run(*call.values())
        given = [x for x in call.values() if isinstance(x, Tensor)]
        names: dict[int, str] = {x.data_ptr(): f"given {n}" for n, x in enumerate(given)}
        return [_named(each, names) for each in self.launched] + [result.shape, result.dtype]


def _named(word: Any, names: dict[int, str]) -> Any:
    if isinstance(word, tuple):
        return tuple(_named(each, names) for each in word)
    if isinstance(word, int) and word >> 32:
        return names.setdefault(word, f"allocated {len(names)}")
    return word


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    devices.cutlass_or_skip()
    found = Device()
    choose = op.choose_tile_tokens

    def counted(*given: Any) -> Any:
        found.checked += 1
        return choose(*given)

    arch = getattr(request, "param", "sm_100")
    with devices.emulated_ops(randomised(1), arch), launch_cache.suspended(False):
        monkeypatch.setattr(compiler, "compiled", found.compiled)
        monkeypatch.setattr(op, "choose_tile_tokens", counted)
        yield found
        monkeypatch.undo()


def call_of(
    inputs: str = "static", tokens: int = 3, *, chosen: bool = True, **changes: Any
) -> Call:
    """Arguments of a layer's op for new tensors; the op chooses the experts if ``chosen``.

    ``inputs`` that begin with ``"fp8-"`` are in FP8.
    """
    model = Model(weight_only=inputs == "16-bit", inner=INNER)
    choice = Choice(ROUTER, "bfloat16", False) if chosen else None
    scaling: Any = inputs.removeprefix("fp8-")
    option: Any = "per-token" if scaling == inputs else "fp8"
    plan = make_plan(SILU, gated=True, inputs=scaling, requested=None, option=option, choice=choice)
    held = model.held()
    kept = folded_experts(held, plan).experts if plan.is_fp8 else kernel_experts(held, plan)
    start: Call = {"x": torch.zeros(tokens, H, dtype=torch.bfloat16)}
    end: Call = {"weight_on_input": False}
    if chosen:
        logits = torch.zeros(tokens, E, dtype=torch.bfloat16)
        start |= {"router_logits": logits, "router_bias": None, "padding": None}
        end = ROUTER._asdict()
    else:
        start["topk_weights"] = torch.zeros(tokens, K, dtype=torch.float32)
        start["topk_ids"] = torch.zeros(tokens, K, dtype=torch.int32)
    call = {
        **start, "expert_map": None, **kept._asdict(),
        "sizes": [H, INNER, E, E], "kernels": plan.targets, "quantizes": inputs != "16-bit",
        "terms": plan.terms, **plan.activation._asdict(), **end,
    }  # fmt: skip
    assert changes.keys() <= call.keys()
    return call | changes


def mapped() -> Tensor:
    return torch.arange(E, dtype=torch.int32)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "few": ("sm_100", {}),
    "many": ("sm_100", {"tokens": 2000}),
    "a scale per token": ("sm_100", {"inputs": "per-token"}),
    "chosen before": ("sm_100", {"chosen": False}),
    "many, chosen before": ("sm_100", {"chosen": False, "tokens": 2000}),
    "in 16 bits": ("sm_90", {"inputs": "16-bit"}),
    "in 16 bits, chosen before": ("sm_90", {"inputs": "16-bit", "chosen": False}),
    "FP8": ("sm_90", {"inputs": "fp8-static"}),
    "FP8, many": ("sm_90", {"inputs": "fp8-static", "tokens": 2000}),
    "FP8, a scale per token": ("sm_90", {"inputs": "fp8-per-token"}),
    "FP8, a scale per token, chosen before": (
        "sm_90", {"inputs": "fp8-per-token", "chosen": False, "tokens": 2000},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("device", "case"), CASES.values(), ids=CASES, indirect=["device"])
def test_a_replay_launches_what_a_checked_call_does(device: Device, case: dict[str, Any]) -> None:
    first, second = call_of(**case), call_of(**case)
    recorded, repeated = device.launches(first), device.launches(second)
    assert device.checked == 1
    with launch_cache.suspended():
        assert device.launches(second) == repeated == recorded
    assert device.checked == 2


@pytest.mark.parametrize(("device", "case"), CASES.values(), ids=CASES, indirect=["device"])
def test_warmup_compiles_what_is_launched(device: Device, case: dict[str, Any]) -> None:
    call = call_of(**case)
    device.launches(call)
    launched = {kernel for kernel, _ in device.launched}
    inputs: Any = case.get("inputs", "static")
    choice = Choice(ROUTER, "bfloat16", False) if case.get("chosen", True) else None
    sizes = ExpertSizes(H, INNER, E, E)
    experts = Experts(sizes, K, SILU, "bfloat16", inputs, choice=choice)
    family = "sm_90" if inputs not in ("static", "per-token") else "sm_100"
    made = product_kernels([ExpertsLayer(family, experts)], len(call["x"]), SM_COUNTS[family])
    assert len(launched) >= 4
    assert launched <= {spec.kernel() for spec in made}


# Changes after which a call is checked again and its kernels are chosen again.
CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    "tokens": lambda: {"tokens": 4},
    "dtype of the tokens": lambda: {"x": torch.zeros(3, H, dtype=torch.float16)},
    "dtype of the logits": lambda: {"router_logits": torch.zeros(3, E)},
    "a bias of the router": lambda: {"router_bias": torch.zeros(E)},
    "padding": lambda: {"padding": torch.zeros(3, dtype=torch.bool)},
    "a map of experts": lambda: {"expert_map": mapped()},
    "biases of experts": lambda: {"w2_bias": torch.zeros(E, H, dtype=torch.bfloat16)},
    "activation": lambda: {"limit": 7.0},
    "top_k": lambda: {"top_k": 1},
    "scoring": lambda: {"scoring": "sigmoid"},
    "factor": lambda: {"scale": 2.5},
    "not renormalised": lambda: {"renormalize": False},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_checked_again(change: Callable[[], dict[str, Any]], device: Device) -> None:
    before = device.launches(call_of())
    for _ in range(2):
        assert device.launches(call_of(**change())) != before
    assert device.checked == 2


def test_other_kernels_are_called(device: Device) -> None:
    """Kernels are strings in a list, which is part of the cache's key."""
    call = call_of()
    device.launches(call)
    *kernels, last = call["kernels"]
    for name in ("missing", "absent"):
        with pytest.raises(AttributeError, match=name):
            device.launches(
                call | {"kernels": [*kernels, last.replace(":moe_combine", f":{name}")]}
            )
    assert device.checked == 3


def test_a_weight_that_is_misaligned_is_refused_as_at_first(device: Device) -> None:
    call = call_of()
    for _ in range(2):
        device.launches(call)
    shifted = torch.zeros(call["w2"].numel() + 8, dtype=torch.uint8)[8:].view(call["w2"].shape)
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="b: starts 8 bytes"):
            device.launches(call | {"w2": shifted})
    assert device.checked == 3
