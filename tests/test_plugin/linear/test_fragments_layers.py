"""Linear layers on sm_90 with ``activation`` "16-bit": weights in fragments, and their report.

Results are bit-identical to the same weights in the blocked layout, weight-only, on CPU.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear

from nvfp4_kernels import NoKernelError
from nvfp4_kernels.devices import standing_in
from nvfp4_kernels.formats import fragments
from nvfp4_kernels.formats.fragments import fragment_shapes, to_fragments
from nvfp4_kernels.formats.nvfp4 import Nvfp4Tensor, quantize_weight
from tests.sm90_product import sm90_ops
from tests.test_kernels.compilation import check_op
from tests.test_plugin.linear.test_linear_layers import (
    GAINS,
    INTERMEDIATE,
    LAYERS,
    K,
    checkpoint,
    finish,
    gate_up,
    load,
    quantised_shards,
    tensors_on_disk,
)
from vllm_fp4_plugin import kernel_weight
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.formats import UnsupportedCheckpoint

FP32 = torch.float32
WHY = "activation is 16-bit"


@pytest.fixture(autouse=True)
def stay_in_16_bits(vllm_config: Any) -> None:
    vllm_config.additional_config = {"nvfp4_tc": {"activation": "16-bit"}}


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(40, K, dtype=torch.bfloat16)


def loaded(
    build: Callable[[Nvfp4TcConfig], Any],
    shards: list[Nvfp4Tensor],
    shard_ids: list[Any],
    *,
    weight_only: bool,
    input_scale: float = 0.01,
) -> Any:
    quant = checkpoint(weight_only=weight_only)
    layer = build(Nvfp4TcConfig(quant))
    for shard, shard_id in zip(shards, shard_ids, strict=True):
        load(layer, tensors_on_disk(shard, torch.tensor(input_scale, dtype=FP32), quant), shard_id)
    finish(layer)
    return layer


def held_bytes(layer: Any) -> int:
    return sum(p.numel() * p.element_size() for p in layer.parameters())


def record(layer: Any) -> Any:
    [only] = [r for r in layer.quant_method.startup.report.layers if r.elements]
    return only


# --- layers -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("tokens", [1, 40], ids=["decode", "prefill"])
@pytest.mark.parametrize("weight_only", [False, True], ids=["w4a4", "w4a16"])
@pytest.mark.parametrize("kind", LAYERS)
def test_layer(kind: str, weight_only: bool, tokens: int, x: Tensor) -> None:
    build, rows, shard_ids = LAYERS[kind]
    shards = quantised_shards(rows, GAINS[: len(rows)])
    blocked = loaded(build, shards, shard_ids, weight_only=True)
    expected, _ = blocked(x[:tokens])
    with sm90_ops() as product:
        layer = loaded(build, shards, shard_ids, weight_only=weight_only)
        out, _ = layer(x[:tokens])
    assert torch.equal(out, expected)
    assert product.rows == [tokens]
    n = sum(rows)
    assert (layer.weight.shape, layer.weight_scale.shape) == fragment_shapes(n, K)
    assert layer.input_scale is None
    method = layer.quant_method
    assert torch.equal(
        method.dequantize_weight(layer), blocked.quant_method.dequantize_weight(blocked)
    )
    told = record(layer)
    assert told.kernel == "nvfp4_gemm_w4a16/wgmma (sm_90)"
    assert told.arithmetic == "W4A16"
    assert told.reason == ("" if weight_only else WHY)
    assert told.weight_bytes == held_bytes(layer)


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("off", [0, 8], ids=["columns", "columns that start elsewhere"])
def test_inputs_that_kernels_cannot_read_as_they_are(off: int, x: Tensor) -> None:
    """Inputs are columns of a wider matrix, as MLA passes them to kv_b_proj."""
    build, rows, shard_ids = LAYERS["column"]
    shards = quantised_shards(rows, GAINS[: len(rows)])
    wide = torch.zeros(40, K + 64, dtype=x.dtype)
    wide[:, off : off + K] = x
    with sm90_ops():
        layer = loaded(build, shards, shard_ids, weight_only=True)
        expected, _ = layer(x)
        out, _ = layer(wide[:, off : off + K])
    assert torch.equal(out, expected)


@pytest.mark.parametrize("arch", ["cpu", "sm_90", "sm_100"])
def test_more_projections_than_kernels_take(arch: str, vllm_config: Any) -> None:
    vllm_config.additional_config = {}

    def build() -> Any:
        config = Nvfp4TcConfig(checkpoint(weight_only=False))
        return MergedColumnParallelLinear(
            K, [16] * 9, bias=False, quant_config=config, prefix="m.f"
        )

    with standing_in("cpu", arch):
        if arch == "cpu":
            assert len(build().quant_method.plan.shard_sizes) == 9
            return
        message = rf"m\.f: joins 9 projections, must join at most 8 on {arch}; leave the layer"
        with pytest.raises(UnsupportedCheckpoint, match=message):
            build()


@pytest.mark.usefixtures("vllm_config")
def test_leading_dimensions_and_bias(x: Tensor) -> None:
    """Layers get a batch of sequences, as in vLLM's multimodal models."""

    def build(config: Nvfp4TcConfig) -> Any:
        layer = ColumnParallelLinear(K, 80, quant_config=config, prefix="m.fc")
        layer.bias.data.copy_(torch.arange(80))
        return layer

    shards = quantised_shards([80], [1.0])
    expected, _ = loaded(build, shards, [None], weight_only=True)(x.view(2, 20, K))
    with sm90_ops():
        out, _ = loaded(build, shards, [None], weight_only=False)(x.view(2, 20, K))
    assert out.shape == (2, 20, 80)
    assert torch.equal(out, expected)


@pytest.mark.usefixtures("vllm_config")
def test_input_scales_are_left_out(x: Tensor) -> None:
    """Input scales do not affect 16-bit activations."""
    build, rows, shard_ids = LAYERS["merged"]
    shards = quantised_shards(rows, GAINS)
    with sm90_ops():
        outputs = [
            loaded(build, shards, shard_ids, weight_only=False, input_scale=scale)(x)[0]
            for scale in (0.01, 3.0)
        ]
    assert torch.equal(*outputs)


# --- gate and up projection -------------------------------------------------------------------


def loaded_pair(shards: list[Nvfp4Tensor], *, weight_only: bool) -> Any:
    return loaded(gate_up, shards, [0, 1], weight_only=weight_only)


@pytest.fixture
def pair() -> list[Nvfp4Tensor]:
    return quantised_shards([INTERMEDIATE] * 2, [1.0, 8.0])


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("weight_only", [False, True], ids=["w4a4", "w4a16"])
def test_fused_mlp(weight_only: bool, pair: list[Nvfp4Tensor], x: Tensor) -> None:
    blocked = loaded_pair(pair, weight_only=True)
    expected = SiluAndMul()(blocked(x)[0])
    with sm90_ops() as product:
        layer = loaded_pair(pair, weight_only=weight_only)
        out = SiluAndMul()(layer(x)[0])
    assert torch.equal(out, expected)
    assert product.rows == [40]  # once, with both weights
    data, scales = fragment_shapes(INTERMEDIATE, K)
    assert layer.weight.shape == (2, *data)
    assert layer.weight_scale.shape == (2, *scales)
    assert torch.equal(
        layer.quant_method.dequantize_weight(layer), blocked.quant_method.dequantize_weight(blocked)
    )
    told = record(layer)
    assert told.kernel == "nvfp4_silu_mul_gemm_w4a16/wgmma (sm_90)"
    assert told.reason == ("" if weight_only else WHY)
    assert told.weight_bytes == held_bytes(layer)


@pytest.mark.processes
@pytest.mark.usefixtures("vllm_config")
def test_compiled_is_the_same(pair: list[Nvfp4Tensor], x: Tensor) -> None:
    build, rows, shard_ids = LAYERS["row"]
    with sm90_ops():
        mlp, fc = loaded_pair(pair, weight_only=True), SiluAndMul()
        other = loaded(build, quantised_shards(rows, [1.0]), shard_ids, weight_only=True)

        def both(x: Tensor) -> Tensor:
            return torch.cat([fc(mlp(x)[0]), other(x)[0]], dim=-1)

        compiled = torch.compile(both, fullgraph=True, dynamic=True)
        for tokens in (5, 1, 40):
            assert torch.equal(compiled(x[:tokens]), both(x[:tokens]))


@pytest.mark.usefixtures("vllm_config")
def test_opcheck(pair: list[Nvfp4Tensor], x: Tensor) -> None:
    """Widths are not multiples of a tile, so the weights' shapes do not determine them."""
    build, rows, shard_ids = LAYERS["row"]
    with sm90_ops():
        mlp = loaded_pair(pair, weight_only=True)
        row = loaded(build, quantised_shards(rows, [1.0]), shard_ids, weight_only=True)
        one = (row.weight, row.weight_scale, row.alpha, rows, None, None)
        both = (mlp.weight, mlp.weight_scale, mlp.alpha, INTERMEDIATE, None)
        check_op(
            torch.ops.nvfp4_tc.linear.default,
            (x, None, None, *one, *row.quant_method.plan.targets, 1, x.dtype),
        )
        targets = mlp.quant_method.plan.targets
        check_op(
            torch.ops.nvfp4_tc.silu_mul_linear.default, (x, None, None, *both, *targets, 1, x.dtype)
        )


def test_both_reasons_are_told(vllm_config: Any, pair: list[Nvfp4Tensor], x: Tensor) -> None:
    vllm_config.additional_config = {"nvfp4_tc": {"activation": "16-bit", "fuse_mlp": False}}
    expected, _ = loaded_pair(pair, weight_only=True)(x)
    with sm90_ops():
        layer = loaded_pair(pair, weight_only=False)
        out, _ = layer(x)
    assert torch.equal(out, expected)
    assert record(layer).reason == f"{WHY}; not fused: switched off (fuse_mlp)"


# --- quantised at load, and dummies -----------------------------------------------------------


@pytest.mark.parametrize("activation", ["per-token", "16-bit"])
def test_online(activation: str, vllm_config: Any, x: Tensor) -> None:
    """Both options work: sm_90 has no NVFP4 activations, which the default requests."""
    vllm_config.additional_config = {"nvfp4_tc": {"activation": activation}}
    build, rows, shard_ids = LAYERS["qkv"]
    whole = [(torch.randn(n, K) * gain).bfloat16() for n, gain in zip(rows, GAINS, strict=True)]
    with sm90_ops():
        layer = build(Nvfp4TcConfig())
        for weight, shard_id in zip(whole, shard_ids, strict=True):
            layer.weight.weight_loader(layer.weight, weight, shard_id)
        finish(layer)
        out, _ = layer(x)
        told = record(layer)
    vllm_config.additional_config = {}
    expected, _ = loaded(build, [quantize_weight(w) for w in whole], shard_ids, weight_only=True)(x)
    assert torch.equal(out, expected)
    reason = "sm_90 has no W4A4 kernel, activations stay 16-bit"
    assert told.arithmetic == "W4A16"
    assert told.reason == (reason if activation == "per-token" else "")
    assert told.weight_bytes == held_bytes(layer)


def test_dummy_weights(
    vllm_config: Any, pair: list[Nvfp4Tensor], x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_config.load_config, "load_format", "dummy")
    with sm90_ops():
        layer = gate_up(Nvfp4TcConfig(checkpoint()))
        finish(layer)
        out = SiluAndMul()(layer(x)[0])
    assert out.shape == (40, INTERMEDIATE)
    assert out.isfinite().all()
    assert out.any()


# --- bringing a weight to the layout ----------------------------------------------------------


@pytest.mark.parametrize("elements", [1, 64 * 96, 5 * 64 * 96, 1 << 22])
@pytest.mark.parametrize("fused", [False, True], ids=["one", "pair"])
def test_in_pieces(fused: bool, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversion in slices of any size gives the same weight as conversion in one piece."""
    parts = [quantize_weight(torch.randn(n, 96)) for n in ((200, 200) if fused else (400,))]
    data, scales, globals_ = kernel_weight.join_shards(parts)
    monkeypatch.setattr(fragments, "_AT_ONCE", elements)
    ours = kernel_weight.kernel_weight(
        data, scales, globals_, None, gate_up=fused, layout="fragments"
    )
    whole = [to_fragments(p.data, p.scales) for p in parts]
    for name in ("data", "scales"):
        pieces = [getattr(w, name) for w in whole]
        expected = torch.stack(pieces) if fused else pieces[0]
        assert torch.equal(getattr(ours, name), expected)
    assert torch.equal(ours.alpha, globals_)


# --- refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_only", [False, True], ids=["w4a4", "w4a16"])
def test_a_device_with_no_kernel_at_all(weight_only: bool, vllm_config: Any) -> None:
    """The error names the requested kernel, not the substitute."""
    vllm_config.additional_config = {}
    mode = "w4a16" if weight_only else "w4a4"
    message = rf"gemm: no {mode} kernel for cpu \(sm_80\)"
    with standing_in("cpu", "sm_80"), pytest.raises(NoKernelError, match=message):
        LAYERS["column"][0](Nvfp4TcConfig(checkpoint(weight_only=weight_only)))


def kv_b_proj(config: Nvfp4TcConfig) -> Any:
    return ColumnParallelLinear(K, 80, bias=False, quant_config=config, prefix="attn.kv_b_proj")


def test_mla_takes_a_projection_whose_activations_stay_16_bit(vllm_config: Any, x: Tensor) -> None:
    """MLA multiplies an identity by kv_b_proj, so a calibrated input scale would not fit."""
    vllm_config.additional_config = {}
    with pytest.raises(UnsupportedCheckpoint, match=r"attn\.kv_b_proj: .* MLA needs its weight"):
        kv_b_proj(Nvfp4TcConfig(checkpoint()))
    shards = quantised_shards([80], [1.0])
    with sm90_ops():
        layer = loaded(kv_b_proj, shards, [None], weight_only=False)
        identity = torch.eye(K, dtype=torch.bfloat16)
        values = layer.quant_method.apply(layer, identity, bias=None).T
    assert torch.equal(values, shards[0].dequantize(torch.bfloat16))
