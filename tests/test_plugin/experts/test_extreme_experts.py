"""Experts of zeros and of extreme weights, quantised at load: right, or refused by name."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from nvfp4_kernels.formats.nvfp4 import (
    Nvfp4Tensor,
    global_scale_of,
    quantize_activation,
    quantize_weight,
    row_global_scales,
)
from tests.extreme_values import WEIGHTS, inputs, ordinary, rounding, with_outlier
from tests.test_plugin.experts.test_experts import INNER, PREFIX, E, H, Layer
from vllm_fp4_plugin.experts.online import Nvfp4OnlineExpertsMethod
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.options import Options
from vllm_fp4_plugin.startup import Startup

Weights = dict[tuple[int, str], Tensor]
SHAPES = {"w1": (INNER, H), "w3": (INNER, H), "w2": (H, INNER)}
# Kinds of weights in gate, up and down of one expert beside ordinary experts.
SITUATIONS = {
    "an expert of zeros": ("zero", "zero", "zero"),
    "gate zero": ("zero", "ordinary", "ordinary"),
    "up zero": ("ordinary", "zero", "ordinary"),
    "down zero": ("ordinary", "ordinary", "negative zero"),
    "zero rows": ("zero rows", "zero rows", "zero rows"),
    "gate 1e-30": ("1e-30", "ordinary", "ordinary"),
    "up 1e30": ("ordinary", "1e30", "ordinary"),
    "down 1e30, up 1e-30": ("ordinary", "1e-30", "1e30"),
    "one outlier": ("one outlier", "ordinary", "one outlier"),
}


def plain_weights(situation: tuple[str, ...], expert: int = 1) -> Weights:
    torch.manual_seed(0)
    kinds = {(expert, shard): kind for shard, kind in zip(SHAPES, situation, strict=True)}
    return {
        (e, shard): WEIGHTS[kinds.get((e, shard), "ordinary")](*shape).bfloat16()
        for e in range(E)
        for shard, shape in SHAPES.items()
    }


def loaded(plain: Weights, activation: Any) -> tuple[Nvfp4OnlineExpertsMethod, Layer]:
    layer = Layer()
    layer.moe_config.tp_size = 1
    options = Options(activation=activation)
    method = Nvfp4OnlineExpertsMethod(Startup(), options, layer, PREFIX)
    sizes = layer.local, H, INNER, torch.bfloat16
    method.create_weights(layer, *sizes, global_num_experts=E, weight_loader=None)
    for name in ("w13_weight", "w2_weight"):  # which vLLM would do once all have come
        empty = torch.full(getattr(layer, name).shape, torch.nan).bfloat16()
        setattr(layer, name, nn.Parameter(empty, requires_grad=False))
    for (expert, shard), weight in plain.items():
        name = "w2_weight" if shard == "w2" else "w13_weight"
        given = (getattr(layer, name), weight, f"{PREFIX}.{name}", shard, expert, True)
        method.ledger.loader(method._load)(*given)
    method.process_weights_after_loading(layer)
    return method, layer


def oracle(plain: Weights, x: Tensor, expert: int, activation: str) -> Tensor:
    """Result of an expert for tokens, by float64 products of its NVFP4 weights."""

    def seen(rows: Tensor) -> Tensor:
        if activation == "16-bit":
            return rows.double()
        scale = row_global_scales(rows)
        return Nvfp4Tensor(*quantize_activation(rows, scale), scale).dequantize().double()

    values = {}
    for shard in SHAPES:
        weight = plain[expert, shard]
        values[shard] = quantize_weight(weight).dequantize().double()
        off = (values[shard] - weight.double()).abs()
        assert bool((off <= rounding(weight, float(global_scale_of(weight)))).all())
    gate, up = (seen(x) @ values[shard].T for shard in ("w1", "w3"))
    return seen((silu(gate) * up).bfloat16()) @ values["w2"].T


@pytest.mark.parametrize("activation", ["16-bit", "per-token"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_experts_quantised_at_load(situation: str, activation: str, vllm_config: Any) -> None:
    """Every token goes to the expert under test and to an ordinary expert."""
    plain = plain_weights(SITUATIONS[situation])
    method, layer = loaded(plain, activation)
    x = inputs(H).bfloat16()[[0, 1, 2, 3, 5, 6]]  # of 1e30 gate times up is infinity
    x[4, 3] = 10.0 if "1e30" in situation else 1e4  # what down gets must stay below 1e33
    ids = torch.tensor([[1, 0]] * len(x), dtype=torch.int32)
    weights = torch.rand(ids.shape, dtype=torch.float32)
    out = method.apply(layer, x, weights, ids, None, None)
    each = torch.stack([oracle(plain, x, expert, activation) for expert in (1, 0)], 1)
    expected = (each * weights.double().unsqueeze(-1)).sum(1)
    assert bool(torch.isfinite(out).all())
    size = (each.abs() * weights.unsqueeze(-1)).sum(1).norm(dim=-1)
    # The bound allows roundings to bfloat16 and, with a scale per token, a few 4-bit steps decided
    # by sums.
    assert bool(((out.double() - expected).norm(dim=-1) <= 0.01 * size).all())
    assert not out[1:3].any()


@pytest.mark.parametrize(
    ("shard", "name"), [("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")]
)
@pytest.mark.parametrize("fault", ["NaN", "outlier", "largest"])
def test_a_matrix_that_nvfp4_does_not_hold_is_refused_by_name(
    fault: str, shard: str, name: str, vllm_config: Any
) -> None:
    plain = plain_weights(("ordinary",) * 3)
    spoilt = {
        "NaN": plain[2, shard].index_fill(0, torch.tensor(3), torch.nan),
        "outlier": with_outlier(*SHAPES[shard], 1e6).bfloat16(),
        "largest": (ordinary(*SHAPES[shard]) * 1e36).bfloat16(),
    }
    messages = {
        "NaN": "holds NaN or infinity as bfloat16, must be finite",
        "outlier": "blocks of 16 weights are too small for NVFP4",
        "largest": r"its largest weight is .*e\+34, must be at most",
    }
    plain[2, shard] = spoilt[fault]
    message = rf"{PREFIX}\.2\.{name}\.weight: .*{messages[fault]}"
    with pytest.raises(UnsupportedCheckpoint, match=message):
        loaded(plain, "per-token")
