"""Experts chosen by the plugin's kernels, as by vLLM's routers, where the layer permits it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import grouped_topk

from nvfp4_kernels import Router, moe_topk
from nvfp4_kernels.precompile.experts_layer import Choice
from tests.test_kernels.router_cases import CASES, RouterCase
from tests.test_plugin.experts.test_experts import E, Layer, Model, batch, built, load
from vllm_fp4_plugin.experts import base
from vllm_fp4_plugin.experts.router import choice_of, padding

SAME = 1e-6  # of weights: roundings of float32


def vllms(case: RouterCase, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights and ids from vLLM's router on CPU, by descending weight."""
    rule = case.router
    grouped = rule.groups > 1 or rule.scoring == "sigmoid" or bias is not None
    router = CPURouter(
        rule.top_k, case.experts, grouped, rule.groups, rule.top_groups, rule.renormalize,
        rule.scoring, rule.scale if grouped else 1.0, bias,
    )  # fmt: skip
    return router._compute_routing(logits, logits, None)


def check_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], close: float) -> None:
    """Check for the same experts in any order, with weights within ``close``, relative."""
    found_ids, order = found[1].sort(dim=1)
    expected_ids, theirs = expected[1].sort(dim=1)
    assert torch.equal(found_ids, expected_ids)
    weights = found[0].gather(1, order)
    torch.testing.assert_close(weights, expected[0].gather(1, theirs), rtol=close, atol=1e-7)


# Float32 logits are hardly ever equal; among equal logits vLLM's CPU router takes any.
ROUTERS = {
    name: replace(case, dtype=torch.float32)
    for name, case in CASES.items()
    if not (case.ties or case.padded)
}


@pytest.mark.parametrize("name", ROUTERS)
def test_as_vllm_chooses(name: str) -> None:
    case = ROUTERS[name]
    logits, bias, _ = case.given()
    weights, ids = moe_topk(logits, case.router, bias)
    if not (case.router.scoring == "sigmoid" or case.biased or case.router.groups > 1):
        weights = weights / case.router.scale  # which vLLM's leaves out
    check_same((weights, ids), vllms(case, logits, bias), SAME)


@pytest.mark.parametrize("name", ["DeepSeek V2", "DeepSeek V3", "GLM 4"])
def test_as_vllm_chooses_in_groups(name: str) -> None:
    """The reference is the formula that vLLM tests its grouped kernels against."""
    case, (logits, bias, _) = ROUTERS[name], ROUTERS[name].given()
    rule = case.router
    expected = grouped_topk.__wrapped__(
        logits, logits.float(), rule.top_k, rule.renormalize, rule.groups, rule.top_groups,
        rule.scoring, rule.scale, bias,
    )  # fmt: skip
    check_same(moe_topk(logits, rule, bias), expected, SAME)


def layer(**given: Any) -> SimpleNamespace:
    """Router attributes of vLLM's layer of experts; by default those of a Qwen3."""
    config = {
        "num_experts": 128,
        "experts_per_token": 8,
        "routing_method": RoutingMethodType.RenormalizeNaive,
        "router_logits_dtype": None,
        "in_dtype": torch.bfloat16,
    }
    asked = {
        "custom_routing_function": None,
        "scoring_func": "softmax",
        "renormalize": True,
        "use_grouped_topk": False,
        "num_expert_group": None,
        "topk_group": None,
        "routed_scaling_factor": 1.0,
        "e_score_correction_bias": None,
        "apply_router_weight_on_input": False,
        "expert_map_manager": SimpleNamespace(num_fused_shared_experts=0),
    }
    config |= {name: value for name, value in given.items() if name in config}
    asked |= {name: value for name, value in given.items() if name not in config}
    return SimpleNamespace(moe_config=SimpleNamespace(**config), **asked)


DEEPSEEK: dict[str, Any] = {
    "num_experts": 256,
    "scoring_func": "sigmoid",
    "use_grouped_topk": True,
    "num_expert_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "routing_method": RoutingMethodType.DeepSeekV3,
    "router_logits_dtype": torch.float32,
    "e_score_correction_bias": torch.zeros(256, dtype=torch.float32),
}


def test_what_a_layer_asks_for(vllm_config: Any) -> None:
    assert choice_of(layer()) == (Choice(Router(8), "bfloat16", False), "")
    deepseek = Router(8, "sigmoid", groups=8, top_groups=4, scale=2.5)
    assert choice_of(layer(**DEEPSEEK)) == (Choice(deepseek, "float32", True), "")
    # Without groups or a bias vLLM's router ignores the factor.
    ignored = layer(renormalize=False, routed_scaling_factor=2.0)
    assert choice_of(ignored) == (Choice(Router(8, renormalize=False), "bfloat16", False), "")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"custom_routing_function": print}, "the model has a function for it"),
        ({"routing_method": RoutingMethodType.Simulated}, "routing method Simulated"),
        ({"routing_method": RoutingMethodType.Unspecified}, "routing method Unspecified"),
        (
            {"scoring_func": "sqrtsoftplus", "routing_method": RoutingMethodType.DeepseekV4},
            "routing method DeepseekV4",
        ),
        ({"apply_router_weight_on_input": True}, "weights come before the first product"),
        (
            {"expert_map_manager": SimpleNamespace(num_fused_shared_experts=1)},
            "shared ones are among them",
        ),
        (
            DEEPSEEK | {"e_score_correction_bias": torch.zeros(256, dtype=torch.bfloat16)},
            "their bias is bfloat16",
        ),
        (DEEPSEEK | {"num_expert_group": 7}, "7 groups of 256"),
        ({"experts_per_token": 33}, "33 of 128"),
        ({"num_experts": 2048}, "8 of 2048"),
    ],
    ids=str,
)
def test_what_stays_vllms(given: dict[str, Any], why: str, vllm_config: Any) -> None:
    assert choice_of(layer(**given)) == (None, f"experts chosen by vLLM: {why}")


@pytest.mark.parametrize("required", [True, False])
def test_routes_that_vllm_adjusts(required: bool, vllm_config: Any) -> None:
    """Since 0.33 vLLM's config flags substituted experts and simulated routes."""
    given = layer()
    given.moe_config.require_decomposed_backend = required
    why = "experts chosen by vLLM: it changes them after its router" if required else ""
    assert choice_of(given) == (None if required else Choice(Router(8), "bfloat16", False), why)


def test_requests_that_ask_for_their_experts(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_config.aux_output_config, "enable_return_routed_experts", True)
    assert choice_of(layer()) == (None, "experts chosen by vLLM: requests ask which they were")


def test_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is the batch's slice of vLLM's mask, on a GPU and for one rank's tokens only."""
    from vllm_fp4_plugin.experts import router

    mask, on_gpu = torch.arange(8) > 4, SimpleNamespace(type="cuda")
    context = SimpleNamespace(is_padding=mask, dp_metadata=None)
    monkeypatch.setattr(router, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(router, "get_forward_context", lambda: context)

    class Logits(list):
        device = on_gpu

    assert padding(torch.zeros(6, 4)) is None
    found = padding(Logits(range(6)))  # type: ignore[arg-type]
    assert found is not None
    assert found.tolist() == mask[:6].tolist()
    assert padding(Logits(range(9))) is None  # type: ignore[arg-type]
    context.dp_metadata = object()
    assert padding(Logits(range(6))) is None  # type: ignore[arg-type]


def test_padding_of_a_batch_adds_nothing(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in vLLM's padding mask get no experts where the plugin chooses them by logits."""
    method, layer = built(Layer(routing_method=RoutingMethodType.Renormalize))
    load(layer, Model(weight_only=False))
    method.process_weights_after_loading(layer)
    assert method.is_monolithic
    x, _, _ = batch(4)
    logits = torch.randn(4, E).bfloat16()
    whole = method.apply_monolithic(layer, x, logits)
    assert whole.any(1).all()
    mask = torch.tensor([False, True, False, True])
    monkeypatch.setattr(base, "padding", lambda given: mask if given is logits else None)
    padded = method.apply_monolithic(layer, x, logits)
    assert torch.equal(padded[~mask], whole[~mask])
    assert not padded[mask].any()
