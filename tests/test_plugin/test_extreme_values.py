"""Zeros, and extreme weights and inputs: right within rounding, or refused by name."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import RowParallelLinear

from nvfp4_kernels.formats.nvfp4 import (
    Convention,
    Nvfp4Tensor,
    global_scale_of,
    quantize_activation,
    row_global_scales,
)
from nvfp4_kernels.formats.scale_search import SCALE_RULES, quantize_with_rule
from nvfp4_kernels.formats.terms import decode_terms, quantize_terms
from tests.extreme_values import WEIGHTS, decoded, inputs, ordinary, rounding, with_outlier
from tests.test_plugin.linear.test_linear_layers import (
    INTERMEDIATE,
    LAYERS,
    K,
    checkpoint,
    finish,
    gate_up,
    load,
    tensors_on_disk,
)
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.linear import online

# Three shards of a layer: all alike, as in LLaMA-Pro's zero projections, or one different.
ALIKE = {f"all {name}": (name,) * 3 for name in WEIGHTS}
UNLIKE = {f"one {name}": (name, "ordinary", "ordinary") for name in WEIGHTS if name != "ordinary"}
SITUATIONS = ALIKE | UNLIKE | {"1e30 beside 1e-30": ("1e30", "1e-30", "zero")}
READABLE = {name: s for name, s in SITUATIONS.items() if not {"1e30", "1e-30", "subnormal"} & {*s}}


def weights_of(situation: tuple[str, ...], rows: list[int], k: int = K) -> list[Tensor]:
    """16-bit weights of each shard, by their names ``situation`` in ``WEIGHTS``."""
    torch.manual_seed(0)
    return [WEIGHTS[name](n, k).bfloat16() for name, n in zip(situation, rows, strict=True)]


def options(config: Any, **chosen: Any) -> None:
    config.additional_config = {"nvfp4_tc": chosen}


def seen(x: Tensor, activation: str, input_scale: Tensor | None = None) -> Tensor:
    """Input of the product in float64: exact, or decoded from its NVFP4 codes."""
    if activation == "16-bit":
        return x.double()
    scale = row_global_scales(x) if input_scale is None else input_scale
    value = Nvfp4Tensor(*quantize_activation(x, scale), scale).dequantize(torch.float64)
    if input_scale is None:
        assert bool(((value - x.double()).abs() <= rounding(x, scale)).all())
    return value


def assert_product(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Check float32 sums rounded once to bfloat16; overflows may give infinity or the maximum."""
    exact = x @ weight.T
    assert not out.isnan().any()
    sums = x.abs() @ weight.abs().T * len(weight.T) * 2.0**-24
    # Products below float32's normal numbers are rounded to multiples of 2^-149.
    bound = exact.abs() * 2.0**-8 + 2 * sums + K * 2688.0**2 * 2.0**-149
    overflows = exact.abs() + bound > torch.finfo(torch.bfloat16).max
    assert bool(((out.double() - exact).abs() <= bound)[~overflows].all())
    assert bool((out.abs() > 1e38)[overflows].all())


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("activation", ["16-bit", "per-token"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_layers_quantised_at_load(
    situation: str, activation: str, rule: Any, vllm_config: Any
) -> None:
    options(vllm_config, activation=activation, scales=rule)
    build, rows, shard_ids = LAYERS["qkv"]
    layer = build(Nvfp4TcConfig())
    plain = weights_of(SITUATIONS[situation], rows)
    for weight, shard_id in zip(plain, shard_ids, strict=True):
        layer.weight.weight_loader(layer.weight, weight, shard_id)
    finish(layer)
    value = layer.quant_method.dequantize_weight(layer).double()
    bounds = [rounding(w, float(global_scale_of(w)), rule != "absmax") for w in plain]
    assert bool(((value - torch.cat(plain).double()).abs() <= torch.cat(bounds)).all())
    x = inputs(K).bfloat16()
    assert_product(layer(x)[0], seen(x, activation), value)


@pytest.mark.parametrize("activation", ["16-bit", "per-token"])
@pytest.mark.parametrize("situation", ["zero", "1e-30", "one outlier"])
def test_a_fused_gate_and_up(situation: str, activation: str, vllm_config: Any) -> None:
    """A zero gate makes the result zero, whatever up and the input are."""
    options(vllm_config, activation=activation)
    layer = gate_up(Nvfp4TcConfig())
    plain = weights_of((situation, "ordinary"), [INTERMEDIATE] * 2)
    for shard_id, weight in enumerate(plain):
        layer.weight.weight_loader(layer.weight, weight, shard_id)
    finish(layer)
    x = inputs(K).bfloat16()
    out = SiluAndMul()(layer(x)[0])
    weight = layer.quant_method.dequantize_weight(layer).double()
    gate, up = (seen(x, activation) @ weight.T).chunk(2, -1)
    expected = (silu(gate) * up).bfloat16()  # the square of 1e30 is infinity in either
    torch.testing.assert_close(out, expected, rtol=2.0**-6, atol=1e-3)
    if situation == "zero":
        assert not out.any()


@pytest.mark.parametrize(
    ("situation", "other"),
    list(product(["zero", "ordinary", "1e-30", "one outlier"], ["zero", "ordinary", "1e30"])),
)
def test_a_rank_s_part_has_the_scale_of_the_whole(
    situation: str, other: str, vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank's weights are as exact as an unsharded layer's, or the load is refused."""
    layer = RowParallelLinear(K, 48, bias=False, quant_config=Nvfp4TcConfig(), prefix="m.down_proj")
    layer.tp_size = 2
    mine, theirs = weights_of((situation, other), [48, 48])
    whole = torch.cat([mine, theirs]).abs().amax().float()
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda amax, **_: amax.copy_(whole))
    monkeypatch.setattr(online, "get_tp_group", lambda: type("Group", (), {"device_group": None}))
    is_lost = other == "1e30" and situation != "zero"
    is_lost |= (situation, other) == ("1e-30", "ordinary")
    if is_lost:
        with pytest.raises(UnsupportedCheckpoint, match=r"m\.down_proj\.weight: .* too small for"):
            layer.weight.weight_loader(layer.weight, mine)
        return
    layer.weight.weight_loader(layer.weight, mine)
    value = layer.quant_method.dequantize_weight(layer).double()
    assert bool(((value - mine.double()).abs() <= rounding(mine, float(whole) / 2688)).all())


REFUSED = {
    "NaN": (
        lambda w: w.index_fill(0, torch.tensor(3), torch.nan),
        "holds NaN or infinity as bfloat16, must",
    ),
    "infinity": (lambda w: w.index_fill(0, torch.tensor(3), torch.inf), "holds NaN or infinity"),
    "an outlier of 1e5": (
        lambda w: with_outlier(*w.shape, 1e5).bfloat16(),
        r"\d+ of its 192 blocks of 16 weights are too small for NVFP4 beside the largest of its "
        r"global scale, 1\.0e\+05; .*nvfp4_tc\.ignore",
    ),
    "beyond float32's sums": (
        lambda w: (w * 1e36).bfloat16(),
        r'its largest weight is .*e\+34, must be at most 1\.3e\+33 .*activation "16-bit"',
    ),
}


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize(("spoil", "message"), REFUSED.values(), ids=REFUSED)
def test_a_weight_that_nvfp4_does_not_hold_is_refused_by_name(spoil: Any, message: str) -> None:
    build, rows, shard_ids = LAYERS["qkv"]
    layer = build(Nvfp4TcConfig())
    plain = weights_of(("ordinary",) * 3, rows)
    plain[1] = spoil(plain[1])
    for weight, shard_id in zip(plain[:-1], shard_ids, strict=False):
        layer.weight.weight_loader(layer.weight, weight, shard_id)
    with pytest.raises(UnsupportedCheckpoint, match=rf"m\.qkv_proj\.weight \(shard 1\): {message}"):
        layer.weight.weight_loader(layer.weight, plain[-1], shard_ids[-1])


def test_weights_beyond_float32_s_sums_are_served_with_16_bit_inputs(vllm_config: Any) -> None:
    options(vllm_config, activation="16-bit")
    layer = LAYERS["column"][0](Nvfp4TcConfig())
    weight = (ordinary(80, K) * 1e36).bfloat16()
    layer.weight.weight_loader(layer.weight, weight)
    x = inputs(K).bfloat16()
    assert_product(layer(x)[0], x.double(), layer.quant_method.dequantize_weight(layer).double())


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["FP64", "FP32"])
def test_wider_files_become_what_the_plain_model_takes(dtype: torch.dtype) -> None:
    layers = []
    torch.manual_seed(0)
    weight = ordinary(80, K).to(dtype)
    for each in (weight, weight.bfloat16()):
        layer = LAYERS["column"][0](Nvfp4TcConfig())
        layer.weight.weight_loader(layer.weight, each)
        layers.append(layer)
    for wide, narrow in zip(*(layer.parameters() for layer in layers), strict=True):
        assert torch.equal(wide.view(torch.uint8), narrow.view(torch.uint8))


# --- checkpoints --------------------------------------------------------------------------------


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("weight_only", [False, True], ids=["w4a4", "w4a16"])
@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("situation", READABLE)
def test_layers_of_a_checkpoint(situation: str, format: Convention, weight_only: bool) -> None:
    build, rows, shard_ids = LAYERS["qkv"]
    quant = checkpoint(format, weight_only=weight_only)
    layer = build(Nvfp4TcConfig(quant))
    plain = weights_of(READABLE[situation], rows)
    x = inputs(K).bfloat16()[[0, 1, 2, 3, 5, 6]]  # the largest are beyond any calibrated scale
    input_scale = global_scale_of(x)
    stored = [quantize_with_rule(weight, convention=format) for weight in plain]
    for shard, shard_id in zip(stored, shard_ids, strict=True):
        load(layer, tensors_on_disk(shard, input_scale, quant), shard_id)
    finish(layer)
    value = layer.quant_method.dequantize_weight(layer).double()
    by_formula = torch.cat([decoded(s.data, s.scales, s.global_scale) for s in stored])
    torch.testing.assert_close(value, by_formula, rtol=2.0**-20, atol=0)
    activation = "16-bit" if weight_only else "static"
    assert_product(layer(x)[0], seen(x, activation, input_scale), value)


# --- activations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("terms", [1, 2, 3, 4])
def test_rows_of_any_size_keep_their_values_in_terms(terms: int) -> None:
    """Each term leaves at most a quarter of the block's remainder, or the scales' floor."""
    torch.manual_seed(0)
    x = inputs(K).bfloat16()
    scale = row_global_scales(x)
    assert bool((torch.isfinite(scale) & (scale > 0)).all())
    data, scales = quantize_terms(x, scale, terms)
    value = decode_terms(data, scales, terms).double() * scale.double().unsqueeze(-1)
    blocks = x.double().unflatten(-1, (-1, 16)).abs().amax(-1).repeat_interleave(16, -1)
    floor = 3 * 2.0**-9 * scale.double().unsqueeze(-1)
    assert bool(((value - x.double()).abs() <= torch.maximum(blocks * 0.25**terms, floor)).all())
    assert not value[1:3].any()
