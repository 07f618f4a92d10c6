"""FP8, MXFP8 and MXFP4 layers under ``nvfp4-tc``: vLLM's methods, against references in float64."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)

from nvfp4_kernels.devices import standing_in
from nvfp4_kernels.formats.nvfp4 import Convention
from tests.mixed_checkpoints import quantize, round_input
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.delegated import choice, reference
from vllm_fp4_plugin.delegated.reference import ReferenceLinearMethod
from vllm_fp4_plugin.delegated.vllm_methods import vllm_method
from vllm_fp4_plugin.formats import (
    FORMATS,
    INVERSE_SCALE,
    SCALE,
    CheckpointConfig,
    LayerGroup,
    UnsupportedCheckpoint,
)
from vllm_fp4_plugin.formats.kind import Kind

K, TOKENS = 256, 5
INPUT_SCALE = torch.tensor(0.01)
GAINS = (1.0, 8.0, 0.25)

# Sums in float32, or sums of FP8 products, and one rounding to bfloat16.
ROUNDING = {"rtol": 2.0**-7, "atol": 2e-2}

LAYERS: dict[str, tuple[Callable[[Nvfp4TcConfig], Any], list[int], list[Any]]] = {
    "row": (
        lambda c: RowParallelLinear(K, 160, bias=False, quant_config=c, prefix="m.down_proj"),
        [160],
        [None],
    ),
    "merged": (
        lambda c: MergedColumnParallelLinear(
            K, [128, 256, 64], bias=False, quant_config=c, prefix="m.in_proj"
        ),
        [128, 256, 64],
        [0, 1, 2],
    ),
    "qkv": (
        lambda c: QKVParallelLinear(K, 64, 4, 2, bias=False, quant_config=c, prefix="m.qkv_proj"),
        [256, 128, 128],
        ["q", "k", "v"],
    ),
}
CASES = [
    ("modelopt", Kind.FP8),
    ("modelopt", Kind.FP8_CHANNEL),
    ("modelopt", Kind.FP8_BLOCK),
    ("modelopt", Kind.MXFP8),
    ("compressed-tensors", Kind.FP8),
    ("compressed-tensors", Kind.FP8_CHANNEL),
    ("compressed-tensors", Kind.FP8_BLOCK),
    ("compressed-tensors", Kind.MXFP8),
    ("compressed-tensors", Kind.MXFP4),
]


def group_of(format: Convention, kind: Kind, scale: str = SCALE) -> LayerGroup:
    group = FORMATS[format].group(kind, static_input=kind is Kind.FP8)
    assert group is not None
    return replace(group, scale=scale)


def config_of(format: Convention, kind: Kind, scale: str = SCALE) -> Nvfp4TcConfig:
    groups = (group_of(format, kind, scale),)
    return Nvfp4TcConfig(CheckpointConfig(FORMATS[format], True, groups=groups))


def loaded(
    format: Convention, kind: Kind, which: str, scale: str = SCALE, **changes: Any
) -> tuple[Any, Tensor]:
    """Layer with weights loaded as by vLLM, and the values of the weight.

    ``which``: key of ``LAYERS``; ``scale``: name of the weight scale; ``changes``: other tensors.
    """
    torch.manual_seed(0)
    build, rows, shard_ids = LAYERS[which]
    layer = build(config_of(format, kind, scale))
    values = []
    for n, shard_id, gain in zip(rows, shard_ids, GAINS, strict=False):
        matrix = quantize(kind, torch.randn(n, K) * gain, modelopt=format == "modelopt")
        tensors = dict(matrix.tensors)
        if scale != SCALE:
            tensors[scale] = tensors.pop(SCALE).view(-(-n // 128), -(-K // 128))
        if kind is Kind.FP8:
            number = INPUT_SCALE * (0.5 if shard_id == "q" else 1)
            tensors["input_scale"] = number if format == "modelopt" else number.view(1)
        for name, tensor in (tensors | changes).items():
            if tensor is not None:
                parameter, shard = getattr(layer, name), () if shard_id is None else (shard_id,)
                parameter.weight_loader(parameter, tensor, *shard)
        values.append(matrix.values)
    layer.quant_method.process_weights_after_loading(layer)
    return layer, torch.cat(values)


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("which", LAYERS)
@pytest.mark.parametrize(("format", "kind"), CASES)
def test_layer_multiplies_rounded_inputs_by_decoded_weights(
    format: Convention, kind: Kind, which: str
) -> None:
    layer, values = loaded(format, kind, which)
    x = torch.randn(TOKENS, K).bfloat16()
    rounded = x.float() if kind is Kind.MXFP4 else round_input(kind, x)
    if kind is Kind.FP8:
        rounded = round_input(kind, x, INPUT_SCALE)  # the largest of the shards
    out, _ = layer(x)
    expected = rounded.double() @ values.double().T
    if not isinstance(layer.quant_method, ReferenceLinearMethod):
        # vLLM multiplies by reciprocals where the formula divides, so ties go to the other code.
        assert float((out.double() - expected).norm() / expected.norm()) < 0.01
    else:
        torch.testing.assert_close(out.double(), expected, **ROUNDING)
        torch.testing.assert_close(
            layer.quant_method.dequantize_weight(layer), values, rtol=1e-6, atol=0
        )


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("which", LAYERS)
@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
def test_scales_of_blocks_by_deepseeks_name(format: Convention, which: str) -> None:
    layer, values = loaded(format, Kind.FP8_BLOCK, which, INVERSE_SCALE)
    x = torch.randn(TOKENS, K).bfloat16()
    expected = round_input(Kind.FP8_BLOCK, x).double() @ values.double().T
    torch.testing.assert_close(layer(x)[0].double(), expected, **ROUNDING)


@pytest.mark.usefixtures("vllm_config")
def test_scales_of_blocks_by_deepseeks_name_that_never_came() -> None:
    message = r"m\.qkv_proj\.weight_scale_inv \(shard q\): 4 of its 4 numbers are NaN or not"
    with pytest.raises(UnsupportedCheckpoint, match=message):
        loaded("modelopt", Kind.FP8_BLOCK, "qkv", INVERSE_SCALE, **{INVERSE_SCALE: None})


@pytest.mark.usefixtures("vllm_config")
def test_one_scale_for_all_shards_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: all shards get the largest of their scales."""
    exact = reference.dequantize_weight

    def largest(kind: Kind, weight: Tensor, scale: Tensor, sizes: Any) -> Tensor:
        return exact(kind, weight, scale.max().expand_as(scale), sizes)

    monkeypatch.setattr(reference, "dequantize_weight", largest)
    with pytest.raises(AssertionError, match="not close"):
        test_layer_multiplies_rounded_inputs_by_decoded_weights("modelopt", Kind.FP8, "qkv")


@pytest.mark.usefixtures("vllm_config")
def test_inputs_that_are_not_rounded_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the inputs are not rounded."""
    monkeypatch.setattr(reference, "round_static", lambda x, scale: x.float())
    with pytest.raises(AssertionError, match="not close"):
        test_layer_multiplies_rounded_inputs_by_decoded_weights("modelopt", Kind.FP8, "row")


@pytest.mark.usefixtures("vllm_config")
def test_4_bit_activations_that_a_group_asks_for() -> None:
    group = LayerGroup("config_groups.group_0", Kind.MXFP4, None, {}, "dynamic")
    method = ReferenceLinearMethod(group, 0, "m.fc")
    shard = quantize(Kind.MXFP4, torch.randn(64, K), modelopt=False)
    method.shard_sizes = [64]
    layer: Any = SimpleNamespace(**shard.tensors)
    x, bias = torch.randn(TOKENS, K, dtype=torch.float32), torch.randn(64)
    expected = round_input(Kind.MXFP4, x) @ shard.values.T + bias
    torch.testing.assert_close(method.apply(layer, x, bias), expected, rtol=1e-5, atol=1e-4)


# --- lines of the report ----------------------------------------------------------------------


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize(
    ("format", "kind", "kernel", "arithmetic"),
    [
        ("modelopt", Kind.FP8, "fp8_linear/reference (cpu)", "W8A8 static"),
        ("modelopt", Kind.FP8_CHANNEL, "fp8 (vLLM: ModelOptLinearMethod)", "W8A8 dynamic"),
        (
            "compressed-tensors",
            Kind.FP8_CHANNEL,
            "fp8 (vLLM: CompressedTensorsW8A8Fp8)",
            "W8A8 dynamic",
        ),
        ("compressed-tensors", Kind.MXFP4, "mxfp4_linear/reference (cpu)", "W4A16"),
    ],
)
def test_report(format: Convention, kind: Kind, kernel: str, arithmetic: str) -> None:
    config = config_of(format, kind)
    layer = LAYERS["row"][0](config)
    [record] = config.startup.report.layers
    assert (record.kernel, record.arithmetic, record.reason) == (kernel, arithmetic, "")
    held = sum(p.numel() * p.element_size() for p in layer.parameters() if p.numel() > 1)
    assert record.weight_bytes - held in (0, 4)


# --- a GPU has a method of vLLM's for each ----------------------------------------------------


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize(("format", "kind"), [case for case in CASES if case[1] is not Kind.MXFP4])
def test_vllm_is_asked_for_its_method(format: Convention, kind: Kind) -> None:
    """The method comes from vLLM; vLLM chooses its kernels later, by the device."""
    layer = RowParallelLinear(K, 160, bias=False, prefix="m.down_proj")
    with standing_in("cpu", "sm_90"):
        method, record = choice.choose(
            layer, "m.down_proj", group_of(format, kind), FORMATS[format], {}, ""
        )
    names = {"modelopt": "ModelOptLinearMethod", "compressed-tensors": "CompressedTensorsLinear"}
    assert type(method).__name__.startswith(names[format])
    assert record.kernel.startswith(f"{kind.family} (vLLM: ")


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
def test_vllm_reads_scales_of_blocks_by_deepseeks_name(format: Convention) -> None:
    """The method for FP8 checkpoints reads DeepSeek's name; the exporters' methods do not."""
    layer = RowParallelLinear(K, 256, bias=False, prefix="m.down_proj")
    group = group_of(format, Kind.FP8_BLOCK, INVERSE_SCALE)
    with standing_in("cpu", "sm_90"):
        method, record = choice.choose(layer, "m.down_proj", group, FORMATS[format], {}, "")
    assert record.kernel == "fp8 (vLLM: Fp8LinearMethod)"
    assert method.weight_block_size == [128, 128]


# --- refused ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize(
    ("kind", "missing", "message"),
    [
        (
            Kind.FP8,
            "weight_scale",
            r"m\.qkv_proj\.weight_scale \(shard q\): 1 of its 1 numbers are",
        ),
        (Kind.FP8, "input_scale", r"m\.qkv_proj\.input_scale \(shard q\): 1 of its 1 numbers"),
        (Kind.FP8, "weight", r"m\.qkv_proj\.weight \(shard q\): 65536 of its 65536 numbers"),
        (Kind.FP8_BLOCK, "weight_scale", r"weight_scale \(shard q\): 4 of its 4 numbers"),
        (Kind.MXFP8, "weight_scale", r"weight_scale \(shard q\): 2048 of its 2048 numbers"),
    ],
)
def test_tensors_that_never_came(kind: Kind, missing: str, message: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=message):
        loaded("modelopt", kind, "qkv", **{missing: None})


@pytest.mark.usefixtures("vllm_config")
def test_shards_that_cut_blocks_are_refused() -> None:
    with pytest.raises(
        UnsupportedCheckpoint,
        match=r"m\.f: joins projections of \[64, 128\] rows .* 128 for FP8",
    ):
        MergedColumnParallelLinear(
            K, [64, 128], bias=False, prefix="m.f",
            quant_config=config_of("modelopt", Kind.FP8_BLOCK),
        )  # fmt: skip


@pytest.mark.usefixtures("vllm_config")
def test_k_that_cuts_blocks_is_refused() -> None:
    config = config_of("modelopt", Kind.MXFP8)
    with pytest.raises(UnsupportedCheckpoint, match=r"m\.f: K is 80 .* multiple of 32 for MXFP8"):
        RowParallelLinear(80, 64, bias=False, quant_config=config, prefix="m.f")


@pytest.mark.usefixtures("vllm_config")
def test_what_vllm_has_no_method_for_is_refused() -> None:
    layer = RowParallelLinear(K, 160, bias=False, prefix="m.down_proj")
    group = group_of("compressed-tensors", Kind.MXFP4)
    message = r"m\.down_proj: is MXFP4, which vLLM has no method for \(.*; quantise the model with"
    with pytest.raises(UnsupportedCheckpoint, match=f"(?s){message}"):
        vllm_method(layer, "m.down_proj", group, FORMATS["compressed-tensors"], {})


@pytest.mark.usefixtures("vllm_config")
def test_what_vllm_would_take_for_16_bits_is_refused() -> None:
    """ModelOpt configs in vLLM skip vision towers, whatever the checkpoint holds."""
    prefix = "vision_tower.fc"
    layer = RowParallelLinear(K, 160, bias=False, prefix=prefix)
    group = group_of("modelopt", Kind.FP8)
    with pytest.raises(UnsupportedCheckpoint, match="would take it for a 16-bit one"):
        vllm_method(layer, prefix, group, FORMATS["modelopt"], {})
