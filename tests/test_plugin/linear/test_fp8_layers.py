"""Linear layers of vLLM with FP8 activations: chosen on sm_90, or requested, and their report."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

from nvfp4_kernels import PerTokenFp8, StaticFp8, gemm, quantize, silu_mul_gemm
from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.devices import standing_in
from nvfp4_kernels.formats.folded import decode_folded, folded_shapes, to_folded
from nvfp4_kernels.formats.fp8_rows import from_rows, quantize_fp8, token_scales
from nvfp4_kernels.formats.nvfp4 import Nvfp4Tensor
from tests.sm90_product import sm90_ops
from tests.test_kernels.compilation import check_op
from tests.test_plugin.linear.test_linear_layers import (
    BF16_ROUNDING,
    GAINS,
    INTERMEDIATE,
    LAYERS,
    K,
    checkpoint,
    finish,
    load,
    quantised_shards,
    tensors_on_disk,
)
from tests.test_plugin.ops.test_handover import Whole
from vllm_fp4_plugin import kernel_weight
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.linear import method as linear_method
from vllm_fp4_plugin.linear.method import resolve_fusions
from vllm_fp4_plugin.ops.operands import QuantizedInput
from vllm_fp4_plugin.options import InvalidOption

REQUESTED = "activation is fp8"
NO_W4A4 = "sm_90 has no W4A4 kernel, activations stay 16-bit"
FP8 = {"nvfp4_tc": {"activation": "fp8"}}
SCALE = 0.004  # of NVFP4: that of E4M3 is six times as large
E4M3, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def ask_for_fp8(vllm_config: Any) -> None:
    vllm_config.additional_config = FP8


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(40, K, dtype=BF16)


def loaded(
    build: Callable[[Nvfp4TcConfig], Any],
    shards: list[Nvfp4Tensor],
    shard_ids: list[Any],
    *,
    weight_only: bool = False,
    input_scales: list[float] | None = None,
) -> Any:
    quant = checkpoint(weight_only=weight_only)
    layer = build(Nvfp4TcConfig(quant))
    fill(layer, shards, shard_ids, weight_only=weight_only, input_scales=input_scales)
    return layer


def fill(
    layer: Any,
    shards: list[Nvfp4Tensor],
    shard_ids: list[Any],
    *,
    weight_only: bool = False,
    input_scales: list[float] | None = None,
) -> None:
    quant = checkpoint(weight_only=weight_only)
    scales = input_scales or [SCALE] * len(shards)
    for shard, shard_id, scale in zip(shards, shard_ids, scales, strict=True):
        load(layer, tensors_on_disk(shard, torch.tensor(scale, dtype=FP32), quant), shard_id)
    finish(layer)


def of_kind(kind: str, **options: Any) -> tuple[Any, list[Nvfp4Tensor]]:
    build, rows, shard_ids = LAYERS[kind]
    shards = quantised_shards(rows, GAINS[: len(rows)])
    return loaded(build, shards, shard_ids, **options), shards


def values(x: Tensor, scale: float | None) -> Tensor:
    """Activations as E4M3 holds them, in float64; None: with a scale per token."""
    scales = token_scales(x) if scale is None else torch.tensor(scale, dtype=FP32)
    rows = from_rows(quantize_fp8(x, scales), x.shape[-1]).double()
    return rows * (scales.double().unsqueeze(-1) if scale is None else scales.double())


def weights(shards: list[Nvfp4Tensor]) -> Tensor:
    """Weights as their products multiply them, in float64."""
    found = []
    for shard in shards:
        folded = to_folded(shard.data, shard.scales)
        decoded = decode_folded(folded.data, folded.scales, *shard.dequantize(BF16).shape)
        per_row = folded.row_scale.double() * shard.global_scale.double()
        found.append(decoded.double() * per_row.unsqueeze(-1))
    return torch.cat(found)


def hard_to_fold(shard: Nvfp4Tensor, row: int = 3) -> Nvfp4Tensor:
    """Weight in one row of which a block of zeros has the largest, all others the least scale."""
    data, scales = shard.data.clone(), shard.scales.float()
    scales[row, 0], scales[row, 1:] = 448.0, 2.0**-9
    data[row, :8], data[row, 8:] = 0, 0x11
    return Nvfp4Tensor(data, scales.to(E4M3), shard.global_scale)


def record(layer: Any, name: str | None = None) -> Any:
    method = layer.quant_method
    [only] = [r for r in method.startup.report.layers if r.name == (name or method.prefix)]
    return only


# --- results ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("tokens", [1, 40], ids=["decode", "prefill"])
@pytest.mark.parametrize("kind", LAYERS)
def test_calibrated_on_hopper(kind: str, tokens: int, x: Tensor) -> None:
    with sm90_ops() as product:
        layer, shards = of_kind(kind)
        out, _ = layer(x[:tokens])
    expected = values(x[:tokens], 6 * SCALE) @ weights(shards).T
    torch.testing.assert_close(out.double(), expected, **BF16_ROUNDING)
    assert product.formats == [(E4M3, BF16)]
    n = sum(shard.data.shape[0] for shard in shards)
    assert (layer.weight.shape, layer.weight_scale.shape) == folded_shapes(n, K)
    assert layer.alpha.shape == (n,)
    assert float(layer.input_scale) == pytest.approx(6 * SCALE)
    decoded = layer.quant_method.dequantize_weight(layer).double()
    torch.testing.assert_close(decoded, weights(shards), rtol=1e-6, atol=0)
    told = record(layer)
    assert told.kernel == "nvfp4_gemm_w4a8/fp8_wgmma (sm_90)"
    assert (told.arithmetic, told.reason) == ("W4A8 static", REQUESTED)
    assert told.weight_bytes == sum(p.numel() * p.element_size() for p in layer.parameters())


@pytest.mark.parametrize("arch", ["cpu", "sm_90"])
@pytest.mark.parametrize("weight_only", [False, True], ids=["static", "per token"])
def test_requested(weight_only: bool, arch: str, x: Tensor, vllm_config: Any) -> None:
    vllm_config.additional_config = FP8
    device: AbstractContextManager[Any] = sm90_ops() if arch == "sm_90" else nullcontext()
    with device:
        layer, shards = of_kind("qkv", weight_only=weight_only)
        out, _ = layer(x)
    expected = values(x, None if weight_only else 6 * SCALE) @ weights(shards).T
    torch.testing.assert_close(out.double(), expected, **BF16_ROUNDING)
    told = record(layer)
    scaling = "per-token" if weight_only else "static"
    assert (told.arithmetic, told.reason) == (f"W4A8 {scaling}", REQUESTED)
    assert told.kernel.startswith("nvfp4_gemm_w4a8/")
    assert (layer.input_scale is None) == weight_only


@pytest.mark.usefixtures("vllm_config")
def test_shards_share_the_largest_input_scale(x: Tensor) -> None:
    build, rows, shard_ids = LAYERS["qkv"]
    shards = quantised_shards(rows, GAINS)
    with sm90_ops():
        layer = loaded(build, shards, shard_ids, input_scales=[SCALE, 2 * SCALE, SCALE / 2])
        out, _ = layer(x)
    expected = values(x, 12 * SCALE) @ weights(shards).T
    torch.testing.assert_close(out.double(), expected, **BF16_ROUNDING)


@pytest.mark.usefixtures("vllm_config")
def test_leading_dimensions_and_bias(x: Tensor) -> None:
    def build(config: Nvfp4TcConfig) -> Any:
        layer = ColumnParallelLinear(K, 80, quant_config=config, prefix="m.fc")
        layer.bias.data.copy_(torch.arange(80))
        return layer

    shards = quantised_shards([80], [1.0])
    with sm90_ops():
        out, _ = loaded(build, shards, [None])(x.view(2, 20, K))
    assert out.shape == (2, 20, 80)
    expected = values(x, 6 * SCALE) @ weights(shards).T + torch.arange(80)
    torch.testing.assert_close(out.view(40, 80).double(), expected, **BF16_ROUNDING)


@pytest.mark.parametrize("arch", ["cpu", "sm_90"])
def test_quantised_at_load(arch: str, x: Tensor, vllm_config: Any) -> None:
    vllm_config.additional_config = FP8
    build, rows, shard_ids = LAYERS["qkv"]
    whole = [(torch.randn(n, K) * gain).bfloat16() for n, gain in zip(rows, GAINS, strict=True)]
    device: AbstractContextManager[Any] = sm90_ops() if arch == "sm_90" else nullcontext()
    with device:
        layer = build(Nvfp4TcConfig())
        for weight, shard_id in zip(whole, shard_ids, strict=True):
            layer.weight.weight_loader(layer.weight, weight, shard_id)
        finish(layer)
        out, _ = layer(x)
    exact = x.double() @ torch.cat(whole).double().T
    assert float((out - exact).norm() / exact.norm()) < 0.13  # of W4A8: .103
    assert (record(layer).arithmetic, record(layer).reason) == ("W4A8 per-token", REQUESTED)


# --- what else may be chosen ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "weight_only", "option", "expected"),
    [
        ("sm_90", False, "16-bit", ("W4A16", "activation is 16-bit")),
        ("sm_90", True, "16-bit", ("W4A16", "")),
        ("sm_90", True, "per-token", ("W4A16", "")),
        ("sm_90", False, "per-token", ("W4A16", NO_W4A4)),
        ("cpu", False, "16-bit", ("W4A16", "activation is 16-bit")),
        ("cpu", False, "per-token", ("W4A4 static", "")),
        ("sm_100", False, "per-token", ("W4A4 static", "")),
    ],
)
def test_plan(
    arch: str, weight_only: bool, option: str, expected: tuple[str, str], vllm_config: Any
) -> None:
    vllm_config.additional_config = {"nvfp4_tc": {"activation": option}}
    with standing_in("cpu", arch):
        layer = LAYERS["row"][0](Nvfp4TcConfig(checkpoint(weight_only=weight_only)))
    assert (record(layer).arithmetic, record(layer).reason) == expected


@pytest.mark.parametrize("arch", ["sm_100", "sm_103"])
@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("fp8", "on {arch}, which multiplies NVFP4 itself; leave it out"),
        ("16-bit", "for calibrated activations on {arch}, .* itself; give activation_terms 3"),
    ],
)
def test_blackwell_refuses(option: str, remedy: str, arch: str, vllm_config: Any) -> None:
    vllm_config.additional_config = {"nvfp4_tc": {"activation": option}}
    message = rf"nvfp4_tc\.activation: is '{option}', must not be given {remedy.format(arch=arch)}"
    with standing_in("cpu", arch), pytest.raises(InvalidOption, match=message):
        LAYERS["row"][0](Nvfp4TcConfig(checkpoint()))


@pytest.mark.usefixtures("vllm_config")
def test_mla_needs_the_weight_of_its_projection_alone() -> None:
    """MLA multiplies an identity by kv_b_proj."""

    def build(config: Nvfp4TcConfig) -> Any:
        return ColumnParallelLinear(K, 80, bias=False, quant_config=config, prefix="attn.kv_b_proj")

    shards = quantised_shards([80], [1.0])
    with sm90_ops():
        layer = loaded(build, shards, [None])
        found = layer.quant_method.apply(layer, torch.eye(K, dtype=BF16), bias=None).T
    assert torch.equal(found, shards[0].dequantize(BF16))
    expected = "activations stay 16-bit: MLA needs the weight alone"
    assert (record(layer).arithmetic, record(layer).reason) == ("W4A16", expected)


def test_rows_too_long_for_a_scale_per_token(vllm_config: Any) -> None:
    vllm_config.additional_config = FP8
    config = Nvfp4TcConfig(checkpoint(weight_only=True))
    with standing_in("cpu", "sm_90"):
        RowParallelLinear(49152, 32, bias=False, quant_config=config, prefix="m.down_proj")
        refused = r"m.o_proj: K is 49168 on each rank, must be at most 49152 on sm_90 for a scale"
        with pytest.raises(UnsupportedCheckpoint, match=refused):
            RowParallelLinear(49168, 32, bias=False, quant_config=config, prefix="m.o_proj")


def test_batch_invariant_kernels(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with standing_in("cpu", "sm_90"):
        layer = LAYERS["row"][0](Nvfp4TcConfig(checkpoint()))
    plan = layer.quant_method.plan
    assert plan.targets[0] == "nvfp4_kernels.gemm.sm90.launch:gemm_batch_invariant"
    assert "W4A8" in record(layer).arithmetic
    assert layer.quant_method.startup.products["m.down_proj"].batch_invariant


# --- gated MLPs -------------------------------------------------------------------------------


def mlp_of(
    weight_only: bool = False, hard: str = "", down_first: bool = False
) -> tuple[Any, list[Nvfp4Tensor], list[Nvfp4Tensor]]:
    """MLP with random weights, of which the layer ``hard`` does not fold."""
    torch.manual_seed(3)
    mlp: Any = Whole(Nvfp4TcConfig(checkpoint(weight_only=weight_only)))
    pair = quantised_shards([INTERMEDIATE] * 2, [1.0, 8.0])
    last = quantised_shards([K], [1.0], INTERMEDIATE)
    if hard == "gate_up_proj":
        pair[1] = hard_to_fold(pair[1])
    elif hard == "down_proj":
        last[0] = hard_to_fold(last[0])
    layers = [(mlp.gate_up_proj, pair, [0, 1], SCALE), (mlp.down_proj, last, [None], 3.0)]
    for layer, shards, ids, scale in reversed(layers) if down_first else layers:
        scales = [scale] * len(shards)
        fill(layer, shards, ids, weight_only=weight_only, input_scales=scales)
    return mlp, pair, last


@pytest.mark.usefixtures("vllm_config")
def test_result_of_gate_and_up_is_fp8(x: Tensor) -> None:
    """Results are bit-identical to the library's ops called one after the other."""
    with sm90_ops() as product:
        mlp, *_ = mlp_of()
        out = mlp(x)
    assert product.formats == [(E4M3, E4M3), (E4M3, BF16)]
    pair, down = mlp.gate_up_proj, mlp.down_proj
    assert pair.alpha.shape == (2, INTERMEDIATE)
    hidden = silu_mul_gemm(
        quantize(x, StaticFp8(pair.input_scale)), None,
        pair.weight[0], pair.weight_scale[0], pair.weight[1], pair.weight_scale[1], pair.alpha,
        n=INTERMEDIATE, output=StaticFp8(down.input_scale),
    )  # fmt: skip
    # Rows of the result are padded to 192 elements, as are those of the weight.
    expected = gemm(hidden, None, down.weight, down.weight_scale, down.alpha, [K])
    assert torch.equal(out, expected)
    assert record(pair).reason == f"{REQUESTED}; result quantised for down_proj"
    assert record(pair).kernel == "nvfp4_silu_mul_gemm_w4a8/fp8_wgmma (sm_90)"
    product_of_pair = pair.quant_method.startup.products[pair.quant_method.prefix]
    assert (product_of_pair.fp8, product_of_pair.layer.out_terms) == (True, 1)


def test_with_a_scale_per_token_down_quantises(x: Tensor, vllm_config: Any) -> None:
    vllm_config.additional_config = FP8
    with sm90_ops() as product:
        mlp, *_ = mlp_of(weight_only=True)
        out = mlp(x)
    assert product.formats == [(E4M3, BF16), (E4M3, BF16)]
    pair, down = mlp.gate_up_proj, mlp.down_proj
    rows, row_scale = quantize(x, PerTokenFp8())
    hidden = silu_mul_gemm(
        rows, None, pair.weight[0], pair.weight_scale[0], pair.weight[1], pair.weight_scale[1],
        pair.alpha, row_scale=row_scale, n=INTERMEDIATE,
    )  # fmt: skip
    rows, row_scale = quantize(hidden, PerTokenFp8())
    how = {"row_scale": row_scale}
    expected = gemm(rows, None, down.weight, down.weight_scale, down.alpha, [K], **how)
    assert torch.equal(out, expected)
    reason = "result in 16 bits: down_proj has a scale per token"
    assert record(pair).reason == f"{REQUESTED}; {reason}"


@pytest.mark.usefixtures("vllm_config")
def test_before_a_calibrated_layer_one_of_weights_alone(x: Tensor) -> None:
    """A product whose input has a scale per token writes with the calibrated scale."""
    with sm90_ops():
        before = Nvfp4TcConfig(checkpoint(weight_only=True))
        mlp: Any = Whole(before, Nvfp4TcConfig(checkpoint()))
        resolve_fusions(mlp)
    assert mlp.gate_up_proj.quant_method.plan.out_terms == 1
    assert record(mlp.gate_up_proj).arithmetic == "W4A8 per-token"
    assert record(mlp.down_proj).arithmetic == "W4A8 static"


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "apart"])
@pytest.mark.usefixtures("vllm_config")
def test_compiled_is_the_same(fuse: bool, x: Tensor, vllm_config: Any) -> None:
    vllm_config.additional_config = {"nvfp4_tc": {"activation": "fp8", "fuse_mlp": fuse}}
    mlp, *_ = mlp_of()
    compiled = torch.compile(mlp, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (5, 1, 40):
        assert torch.equal(compiled(x[:tokens]), mlp(x[:tokens]))


@pytest.mark.processes
@pytest.mark.parametrize("dims", [(5,), (2, 5)], ids=["tokens", "batch"])
@pytest.mark.parametrize("weight_only", [False, True], ids=["static", "per token"])
def test_opcheck(weight_only: bool, dims: tuple[int, ...], x: Tensor, vllm_config: Any) -> None:
    vllm_config.additional_config = FP8
    mlp, *_ = mlp_of(weight_only=weight_only)
    pair, down = mlp.gate_up_proj, mlp.down_proj
    x = x[:10].view(2, 5, K)[(0,) if dims == (5,) else ()]
    both = pair.weight, pair.weight_scale, pair.alpha, INTERMEDIATE, pair.input_scale
    how = *pair.quant_method.plan.targets, 1
    ops = torch.ops.nvfp4_tc
    rows, *row_scale = (
        quantize(x.view(-1, K), PerTokenFp8()) if weight_only
        else (quantize(x.view(-1, K), StaticFp8(pair.input_scale)),)
    )  # fmt: skip
    for operand in ((x, None, None), (rows, None, *(row_scale or (None,)))):
        check_op(ops.silu_mul_linear.default, (*operand, *both, *how, x.dtype))
        check_op(
            ops.silu_mul_linear_fp8.default, (*operand, *both, *how, torch.tensor(0.5, dtype=FP32))
        )
    hidden = torch.randn(*dims, INTERMEDIATE).bfloat16()
    one = down.weight, down.weight_scale, down.alpha, [K], down.input_scale, None
    how = *down.quant_method.plan.targets, 1
    check_op(ops.linear.default, (hidden, None, None, *one, *how, x.dtype))


@pytest.mark.usefixtures("vllm_config")
def test_another_quantisation_is_refused(vllm_config: Any) -> None:
    with sm90_ops():
        layer, _ = of_kind("row")
    given = QuantizedInput(
        torch.zeros(3, K // 2, dtype=torch.uint8), torch.zeros(()), None, (3, K), BF16, 1
    )
    with pytest.raises(InvalidArgument, match=r"m\.down_proj: its input is NVFP4 of 1 terms"):
        layer(given)
    vllm_config.additional_config = {}
    vllm_layer = LAYERS["row"][0](Nvfp4TcConfig(checkpoint()))
    given = QuantizedInput(torch.zeros(3, 128).to(E4M3), None, None, (3, K), BF16, 1)
    with pytest.raises(InvalidArgument, match=r"m\.down_proj: its input is E4M3 \(3, 96\), must"):
        vllm_layer(given)


# --- weights that do not fold -----------------------------------------------------------------

HARD = "FP8 changes a row of its weight by .*%, must be at most 5%"


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("kind", ["column", "qkv"])
def test_a_weight_that_does_not_fold_stays_in_16_bits(kind: str, x: Tensor) -> None:
    build, rows, shard_ids = LAYERS[kind]
    shards = quantised_shards(rows, GAINS[: len(rows)])
    shards[-1] = hard_to_fold(shards[-1])
    with sm90_ops() as product:
        layer = loaded(build, shards, shard_ids)
        out, _ = layer(x)
    assert product.formats == [(BF16, BF16)]
    exact = torch.cat([shard.dequantize(torch.float64) for shard in shards])
    torch.testing.assert_close(out.double(), x.double() @ exact.T, **BF16_ROUNDING)
    told = record(layer)
    assert told.arithmetic == "W4A16"
    assert told.reason.startswith(f"activations stay 16-bit: {layer.quant_method.prefix}: FP8 ch")
    assert told.weight_bytes == sum(p.numel() * p.element_size() for p in layer.parameters())
    products = layer.quant_method.startup.products
    assert not products[layer.quant_method.prefix].fp8


@pytest.mark.parametrize("down_first", [False, True], ids=["in order", "down first"])
@pytest.mark.parametrize(
    ("hard", "formats", "reason"),
    [
        ("down_proj", [(E4M3, BF16), (BF16, BF16)], "result in 16 bits: down_proj takes 16 bits"),
        ("gate_up_proj", [(BF16, BF16), (E4M3, BF16)], "result in 16 bits: only FP8 products wr"),
    ],
)
@pytest.mark.usefixtures("vllm_config")
def test_neighbours_of_a_layer_in_16_bits(
    hard: str, formats: list[Any], reason: str, down_first: bool, x: Tensor
) -> None:
    with sm90_ops() as product:
        mlp, pair, last = mlp_of(hard=hard, down_first=down_first)
        out = mlp(x)
    assert product.formats == formats
    own = weights if hard != "gate_up_proj" else exactly
    first = values(x, 6 * SCALE) if hard != "gate_up_proj" else x.double()
    gate, up = (first @ own(pair).T).chunk(2, dim=-1)
    hidden = torch.nn.functional.silu(gate) * up
    hidden = hidden.bfloat16() if hard == "down_proj" else values(hidden.bfloat16(), 18.0)
    expected = hidden.double() @ (exactly if hard == "down_proj" else weights)(last).T
    assert float((out - expected).norm() / expected.norm()) < 0.005  # roundings of the result
    told = record(mlp.gate_up_proj).reason
    if not (hard == "down_proj" and down_first):  # planned after it
        assert reason in told
    plan = mlp.gate_up_proj.quant_method.plan
    assert plan.out_terms == 0
    startup = mlp.gate_up_proj.quant_method.startup
    assert startup.products["model.mlp.gate_up_proj"].layer.out_terms == 0


def exactly(shards: list[Nvfp4Tensor]) -> Tensor:
    return torch.cat([shard.dequantize(torch.float64) for shard in shards])


def test_the_hash_tells_them_apart(vllm_config: Any) -> None:
    hashes = set()
    for hard in ("", "down_proj", "gate_up_proj"):
        vllm_config.additional_config = FP8
        with sm90_ops():
            mlp_of(hard=hard)
        hashes.add(vllm_config.compute_hash())
    assert len(hashes) == 3


@pytest.mark.usefixtures("vllm_config")
def test_a_factor_that_float32_holds_inexactly() -> None:
    [shard] = quantised_shards([80], [1.0])
    tiny = Nvfp4Tensor(shard.data, shard.scales, torch.tensor(kernel_weight.MIN_GLOBAL, dtype=FP32))
    build, _, shard_ids = LAYERS["column"]
    scales = [2 * kernel_weight.MIN_GLOBAL]
    with sm90_ops():
        layer = loaded(build, [tiny], shard_ids, input_scales=scales)
        assert layer.quant_method.plan.is_fp8  # 2⁻¹¹⁹ is normal
        lifted = Nvfp4Tensor(shard.data, (shard.scales.float() / 2**13).to(E4M3), tiny.global_scale)
        layer = loaded(build, [lifted], shard_ids, input_scales=scales)
    assert record(layer).arithmetic == "W4A16"


@pytest.mark.usefixtures("vllm_config")
def test_ranks_decide_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank's rows do not fold, and so these stay in 16 bits too."""
    told: list[float] = []

    def all_reduce(error: Tensor, op: Any, group: Any) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        told.append(float(error))
        error.fill_(0.5)

    monkeypatch.setattr(linear_method, "get_tp_group", lambda: type("G", (), {"device_group": 0}))
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    build, rows, shard_ids = LAYERS["row"]
    with sm90_ops():
        layer = build(Nvfp4TcConfig(checkpoint()))
        layer.tp_size = 2
        fill(layer, quantised_shards(rows, [1.0]), shard_ids)
    assert told[0] < 0.04
    assert "by 50.0%, must be at most 5%" in record(layer).reason


@pytest.mark.usefixtures("vllm_config")
def test_weights_loaded_again(x: Tensor) -> None:
    """A server's arithmetic is fixed at start."""
    build, rows, shard_ids = LAYERS["row"]
    good = quantised_shards(rows, [1.0])
    bad = [hard_to_fold(good[0])]

    def again(layer: Any, shards: list[Nvfp4Tensor]) -> None:
        method = layer.quant_method
        for name in ("weight", "weight_scale", "alpha", "input_scale", "input_scale_reciprocal"):
            delattr(layer, name)
        method.stored.__init__(
            layer, method.prefix, method.checkpoint, rows, K, lambda p, t, *_: p.data.copy_(t),
            static=True,
        )  # fmt: skip
        fill(layer, shards, shard_ids)

    with sm90_ops():
        layer = loaded(build, good, shard_ids)
        again(layer, good)
        assert layer.quant_method.plan.is_fp8
        with pytest.raises(UnsupportedCheckpoint, match=rf"m\.down_proj: {HARD} for activations"):
            again(layer, bad)
        layer = loaded(build, bad, shard_ids)
        again(layer, good)
        out, _ = layer(x)
    assert record(layer).arithmetic == "W4A16"
    torch.testing.assert_close(out.double(), x.double() @ exactly(good).T, **BF16_ROUNDING)
