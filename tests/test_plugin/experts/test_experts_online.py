"""Experts in 16 bits that are quantised at load."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nvfp4_kernels.formats.nvfp4 import global_scale_of, quantize_weight
from tests.test_plugin.experts.test_experts import INNER, PREFIX, E, H, Layer
from vllm_fp4_plugin.experts import base, online
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.options import Options
from vllm_fp4_plugin.startup import Startup


@pytest.mark.parametrize(
    ("ranks", "reduced_over"),
    [
        ({}, ""),
        ({"ep": 2, "rank": 1}, ""),
        ({"tp": 2, "rank": 1}, "tp"),
        ({"tp": 2, "rank": 1}, "ep"),  # over which data-parallel ranks divide each expert
    ],
)
def test_16_bit_experts_are_quantised(
    ranks: dict[str, int],
    reduced_over: str,
    vllm_config: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each matrix is quantised separately; a rank's part gets the scale of the whole matrix."""
    torch.manual_seed(7)
    inner = 2 * INNER if "tp" in ranks else INNER
    shapes = {"w1": (inner, H), "w3": (inner, H), "w2": (H, inner)}
    plain = {
        (expert, shard): torch.randn(shape).bfloat16() * (1 + expert)
        for expert in range(E)
        for shard, shape in shapes.items()
    }
    layer, startup = Layer(**ranks), Startup()
    whole = {(e, s): weight.abs().amax().float() for (e, s), weight in plain.items()}

    def gathered(amax: Tensor, op: Any, group: str) -> None:
        """Write the maxima over both ranks to ``amax``, in the order of w13 or w2."""
        assert (op, group) == (torch.distributed.ReduceOp.MAX, reduced_over)
        order = [("w1", "w3"), ("w2",)][len(amax) == layer.local]
        mine = range(layer.first, layer.first + layer.local)
        amax.copy_(torch.stack([whole[e, s] for e in mine for s in order]))

    monkeypatch.setattr(torch.distributed, "all_reduce", gathered)
    tp = SimpleNamespace(world_size=2 if reduced_over == "tp" else 1, device_group="tp")
    monkeypatch.setattr(base, "get_tp_group", lambda: tp)
    monkeypatch.setattr(base, "get_ep_group", lambda: SimpleNamespace(device_group="ep"))
    options = Options(activation="16-bit")
    method = online.Nvfp4OnlineExpertsMethod(startup, options, layer, PREFIX)
    sizes = layer.local, H, INNER, torch.bfloat16
    method.create_weights(layer, *sizes, global_num_experts=E, weight_loader=None)
    for name in ("w13_weight", "w2_weight"):  # which vLLM would do once all have come
        param = getattr(layer, name)
        assert param.device.type == "meta"
        real = nn.Parameter(torch.full(param.shape, torch.nan).bfloat16(), requires_grad=False)
        setattr(layer, name, real)
    for (expert, shard), weight in plain.items():
        name = "w2_weight" if shard == "w2" else "w13_weight"
        given = (getattr(layer, name), weight, f"{PREFIX}.{name}", shard, expert, True)
        method.ledger.loader(method._load)(*given)
    method.process_weights_after_loading(layer)
    method.process_weights_after_loading(layer)  # done already
    late = {"shard_id": "w2", "expert_id": 0, "return_success": True}  # another rank's, with EP
    param = layer.w2_weight
    assert param.weight_loader(param=param, loaded_weight=plain[0, "w2"], **late) is False
    held = method.held(layer)
    for row, expert in enumerate(range(layer.first, layer.first + layer.local)):
        for shard, weight in ((s, plain[expert, s]) for s in shapes):
            expected = quantize_weight(weight, global_scale_of(whole[expert, shard]))
            part = slice(layer.moe_config.tp_rank * INNER, (layer.moe_config.tp_rank + 1) * INNER)
            if shard == "w2":
                bytes_ = slice(part.start // 2, part.stop // 2)
                assert torch.equal(held.w2[row], expected.data[:, bytes_])
                assert held.w2_alpha[row] == expected.global_scale
            else:
                at = ("w1", "w3").index(shard)
                assert torch.equal(held.w13[row, at], expected.data[part])
                assert held.w13_alpha[row, at] == expected.global_scale


@pytest.mark.parametrize(("ranks", "first", "more"), [({}, 0, 11), ({"ep": 2, "rank": 1}, 2, 5)])
def test_a_missing_weight_is_named(
    ranks: dict[str, int], first: int, more: int, vllm_config: Any
) -> None:
    """The named weight is this rank's: vLLM quantises before the weights of other ranks arrive."""
    layer = Layer(**ranks)
    method = online.Nvfp4OnlineExpertsMethod(Startup(), Options(), layer, PREFIX)
    with pytest.raises(UnsupportedCheckpoint, match=f"{PREFIX}: its experts have biases, must"):
        online.Nvfp4OnlineExpertsMethod(Startup(), Options(), Layer(has_bias=True), PREFIX)
    method.create_weights(
        layer, layer.local, H, INNER, torch.bfloat16, global_num_experts=E, weight_loader=None
    )
    assert len(list(method.ledger.missing())) == 3 * layer.local
    message = rf"{PREFIX}\.{first}\.gate_proj\.weight and {more} more"
    with pytest.raises(UnsupportedCheckpoint, match=message):
        method.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("ranks", "formats"),
    [({"ep": 2}, ["W4A8 per-token", "W4A16"]), ({"tp": 2}, ["W4A16", "W4A16"])],
    ids=["half of the experts", "half of every expert"],
)
def test_experts_that_do_not_fold(
    ranks: dict[str, int], formats: list[str], vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks whose experts arrive at other times do not wait for one another, but warn."""
    inner = 2 * INNER if "tp" in ranks else INNER
    shapes = {"w1": (inner, H), "w3": (inner, H), "w2": (H, inner)}
    warned: list[str] = []
    worst = torch.zeros(E, 3)
    fold = base.folded_experts

    def folded(*given: Any) -> Any:
        found = fold(*given)
        if rank == 1:
            found.errors[-1, 1] = 0.5  # of expert 3's up
        return found

    def both_ranks(values: Tensor, *_: Any) -> None:
        if values.shape == worst.shape:
            values.copy_(worst.copy_(torch.maximum(worst, values)))

    monkeypatch.setattr(base, "folded_experts", folded)
    monkeypatch.setattr(base.logger, "warning", lambda text, *given: warned.append(text % given))
    monkeypatch.setattr(torch.distributed, "all_reduce", both_ranks)
    group = SimpleNamespace(world_size=2, device_group="both")
    monkeypatch.setattr(base, "get_tp_group", lambda: group)
    found = {}
    for rank in (1, 0):
        layer = Layer(**ranks, rank=rank)
        method = online.Nvfp4OnlineExpertsMethod(
            Startup(), Options(activation="fp8"), layer, PREFIX
        )
        sizes = layer.local, H, INNER, torch.bfloat16
        method.create_weights(layer, *sizes, global_num_experts=E, weight_loader=None)
        for name in ("w13_weight", "w2_weight"):
            empty = torch.empty(getattr(layer, name).shape).bfloat16()
            setattr(layer, name, nn.Parameter(empty, requires_grad=False))
        for expert, (shard, shape) in product(range(E), shapes.items()):
            name = "w2_weight" if shard == "w2" else "w13_weight"
            weight = torch.randn(shape).bfloat16()
            given = (getattr(layer, name), weight, f"{PREFIX}.{name}", shard, expert, True)
            method.ledger.loader(method._load)(*given)
        method.process_weights_after_loading(layer)
        found[rank] = method.plan.arithmetic
    assert [found[0], found[1]] == formats
    why = f"nvfp4-tc: experts of rank 1: activations stay 16-bit: {PREFIX}.3.up_proj: FP8 changes a"
    assert [each.startswith(why) for each in warned] == [True] * ("ep" in ranks)
