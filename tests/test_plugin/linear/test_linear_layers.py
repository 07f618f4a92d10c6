"""Linear layers of vLLM under ``nvfp4-tc``: loaded as by vLLM, compared with float64."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers import linear as linear_layers
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from nvfp4_kernels.formats.nvfp4 import (
    Convention,
    Nvfp4Tensor,
    global_scale_of,
    quantize_activation,
    quantize_weight,
    row_global_scales,
)
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.formats import FORMATS, CheckpointConfig, UnsupportedCheckpoint
from vllm_fp4_plugin.fusion.gate_up import GateUp

K = 96
TOKENS = 5
INPUT_SCALE = torch.tensor(0.01, dtype=torch.float32)

# Outputs are rounded once to bfloat16: half an ulp, 2^-9 relative; float32 sums add far less.
BF16_ROUNDING = {"rtol": 2.0**-8, "atol": 1e-3}


def checkpoint(name: Convention = "modelopt", **changes: Any) -> CheckpointConfig:
    return CheckpointConfig(FORMATS[name], **({"weight_only": False} | changes))


def quantised_shards(rows: list[int], gains: list[float], k: int = K) -> list[Nvfp4Tensor]:
    """One NVFP4 matrix for each shard, scaled by ``gains``."""
    return [quantize_weight(torch.randn(n, k) * gain) for n, gain in zip(rows, gains, strict=True)]


def tensors_on_disk(
    shard: Nvfp4Tensor, input_scale: Tensor, quant: CheckpointConfig
) -> dict[str, Tensor]:
    names = quant.names
    weight_global, input_global = shard.global_scale, input_scale
    if quant.format.reciprocal:
        weight_global = weight_global.reciprocal().reshape(1)
        input_global = input_global.reciprocal().reshape(1)
    return {
        names.weight: shard.data,
        names.block_scale: shard.scales,
        names.weight_global: weight_global,
        names.input_global: input_global,
    }


def load(layer: Any, tensors: dict[str, Tensor], shard_id: Any = None) -> None:
    for name, tensor in tensors.items():
        parameter = getattr(layer, name)
        args = () if shard_id is None else (shard_id,)
        parameter.weight_loader(parameter, tensor, *args)


def expected_output(
    x: Tensor, shards: list[Nvfp4Tensor], input_scale: Tensor | None, bias: Tensor | None = None
) -> Tensor:
    """Product in float64, from values dequantised shard by shard."""
    values = x.double()
    if input_scale is not None:
        data, scales = quantize_activation(x, input_scale)
        values = Nvfp4Tensor(data, scales, input_scale).dequantize(torch.float64)
    out = torch.cat([values @ shard.dequantize(torch.float64).T for shard in shards], dim=-1)
    return out if bias is None else out + bias.double()


def finish(layer: Any) -> None:
    layer.quant_method.process_weights_after_loading(layer)


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(TOKENS, K, dtype=torch.bfloat16)
    return x, global_scale_of(x)


LAYERS: dict[str, tuple[Callable[[Nvfp4TcConfig], Any], list[int], list[Any]]] = {
    "column": (
        lambda c: ColumnParallelLinear(K, 80, bias=False, quant_config=c, prefix="m.fc"),
        [80],
        [None],
    ),
    "row": (
        lambda c: RowParallelLinear(K, 48, bias=False, quant_config=c, prefix="m.down_proj"),
        [48],
        [None],
    ),
    "replicated": (
        lambda c: ReplicatedLinear(K, 48, bias=False, quant_config=c, prefix="m.router"),
        [48],
        [None],
    ),
    "merged": (
        lambda c: MergedColumnParallelLinear(
            K, [40, 24, 136], bias=False, quant_config=c, prefix="m.in_proj"
        ),
        [40, 24, 136],
        [0, 1, 2],
    ),
    "qkv": (
        lambda c: QKVParallelLinear(K, 16, 4, 2, bias=False, quant_config=c, prefix="m.qkv_proj"),
        [64, 32, 32],
        ["q", "k", "v"],
    ),
}
GAINS = [1.0, 8.0, 0.25]


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("weight_only", [False, True], ids=["w4a4", "w4a16"])
@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("kind", LAYERS)
def test_layer_keeps_every_shards_own_scale(
    kind: str, format: Convention, weight_only: bool, inputs: tuple[Tensor, Tensor]
) -> None:
    """Shards 32 times apart in magnitude are right; a joint scale would be off by that factor."""
    x, input_scale = inputs
    build, rows, shard_ids = LAYERS[kind]
    quant = checkpoint(format, weight_only=weight_only)
    layer = build(Nvfp4TcConfig(quant))
    shards = quantised_shards(rows, GAINS[: len(rows)])
    for shard, shard_id in zip(shards, shard_ids, strict=True):
        load(layer, tensors_on_disk(shard, input_scale, quant), shard_id)
    finish(layer)
    out, _ = layer(x)
    expected = expected_output(x, shards, None if weight_only else input_scale)
    torch.testing.assert_close(out.double(), expected, **BF16_ROUNDING)
    torch.testing.assert_close(
        layer.quant_method.dequantize_weight(layer).double(),
        torch.cat([s.dequantize(torch.float64) for s in shards]),
        rtol=1e-6,
        atol=0,
    )


@pytest.mark.usefixtures("vllm_config")
def test_fused_on_disk(inputs: tuple[Tensor, Tensor]) -> None:
    """A checkpoint that stores qkv as one matrix has one global scale."""
    x, input_scale = inputs
    build, rows, _ = LAYERS["qkv"]
    quant = checkpoint()
    layer = build(Nvfp4TcConfig(quant))
    [whole] = quantised_shards([sum(rows)], [1.0])
    load(layer, tensors_on_disk(whole, input_scale, quant))
    finish(layer)
    out, _ = layer(x)
    torch.testing.assert_close(
        out.double(), expected_output(x, [whole], input_scale), **BF16_ROUNDING
    )


@pytest.mark.usefixtures("vllm_config")
def test_bias(inputs: tuple[Tensor, Tensor]) -> None:
    x, input_scale = inputs
    quant = checkpoint()
    layer = ColumnParallelLinear(K, 80, quant_config=Nvfp4TcConfig(quant), prefix="m.fc")
    [shard] = quantised_shards([80], [1.0])
    load(layer, tensors_on_disk(shard, input_scale, quant))
    layer.bias.data.copy_(torch.randn(80))
    finish(layer)
    out, _ = layer(x)
    expected = expected_output(x, [shard], input_scale, layer.bias)
    torch.testing.assert_close(out.double(), expected, **BF16_ROUNDING)


@pytest.mark.usefixtures("vllm_config")
def test_weights_stay_in_four_bits() -> None:
    quant = checkpoint()
    config = Nvfp4TcConfig(quant)
    layer = ColumnParallelLinear(256, 128, bias=False, quant_config=config, prefix="m.fc")
    [shard] = quantised_shards([128], [1.0], 256)
    load(layer, tensors_on_disk(shard, INPUT_SCALE, quant))
    finish(layer)
    held = sum(p.numel() * p.element_size() for p in layer.parameters())
    assert held == 128 * 256 * (4 + 8 / 16) / 8 + 4 + 4  # codes, block scales, alpha, input scale
    assert config.startup.report.layers[0].weight_bytes == held


# --- gate and up projection with their activation ---------------------------------------------

INTERMEDIATE = 176  # its second half would not start on a 128-row atom


class Mlp(torch.nn.Module):
    """Gated MLP as in vLLM's models, up to the activation."""

    def __init__(self, config: Nvfp4TcConfig, activation: Callable[[], Any], **changes: Any):
        super().__init__()
        settings: dict[str, Any] = {"bias": False, "prefix": "model.layers.0.mlp.gate_up_proj"}
        self.gate_up_proj = MergedColumnParallelLinear(
            K,
            **({"output_sizes": [INTERMEDIATE] * 2, "quant_config": config} | settings | changes),
        )
        self.act_fn = activation()

    def forward(self, x: Tensor) -> Tensor:
        gate_up, _ = self.gate_up_proj(x)
        return self.act_fn(gate_up)


def gate_up(
    config: Nvfp4TcConfig, activation: Callable[[], Any] = SiluAndMul, **changes: Any
) -> Any:
    return Mlp(config, activation, **changes).gate_up_proj


def loaded_gate_up(
    input_scale: Tensor, *, weight_only: bool = False
) -> tuple[Any, list[Nvfp4Tensor]]:
    quant = checkpoint(weight_only=weight_only)
    layer = gate_up(Nvfp4TcConfig(quant))
    shards = quantised_shards([INTERMEDIATE] * 2, [1.0, 8.0])
    for shard_id, shard in enumerate(shards):
        load(layer, tensors_on_disk(shard, input_scale, quant), shard_id)
    finish(layer)
    return layer, shards


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("weight_only", [False, True], ids=["w4a4", "w4a16"])
def test_fused_mlp(weight_only: bool, inputs: tuple[Tensor, Tensor]) -> None:
    x, input_scale = inputs
    layer, shards = loaded_gate_up(input_scale, weight_only=weight_only)
    promise, _ = layer(x)
    assert isinstance(promise, GateUp)
    out = SiluAndMul()(promise)
    both = expected_output(x, shards, None if weight_only else input_scale)
    gate, up = both.chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(out.double(), expected, **BF16_ROUNDING)


@pytest.mark.processes
@pytest.mark.usefixtures("vllm_config")
def test_fused_mlp_is_the_same_compiled(inputs: tuple[Tensor, Tensor]) -> None:
    x, input_scale = inputs
    layer, _ = loaded_gate_up(input_scale)
    activation = SiluAndMul()

    def mlp(x: Tensor) -> Tensor:
        return activation(layer(x)[0])

    compiled = torch.compile(mlp, fullgraph=True, dynamic=True)
    for tokens in (TOKENS, 1, 40):  # 40 tokens take gemm, fewer gemv
        rows = x.repeat(tokens, 1)[:tokens]
        assert torch.equal(compiled(rows), mlp(rows))


@pytest.mark.usefixtures("vllm_config")
def test_silu_and_mul_still_takes_tensors() -> None:
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    Nvfp4TcConfig(checkpoint()).get_quant_method(torch.nn.Identity(), "model.embed_tokens")
    expected = torch.nn.functional.silu(x[:, :4]) * x[:, 4:]
    assert torch.equal(SiluAndMul()(x), expected)


@pytest.mark.usefixtures("vllm_config")
def test_promise_names_its_misuse(inputs: tuple[Tensor, Tensor]) -> None:
    x, input_scale = inputs
    layer, _ = loaded_gate_up(input_scale)
    promise, _ = layer(x)
    with pytest.raises(AttributeError, match=r"asked its result for 'shape'.*fuse_mlp"):
        _ = promise.shape


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("option", r"switched off \(fuse_mlp\)"),
        ("activation", "Mlp.act_fn is GeluAndMul, not our SiluAndMul"),
        ("no owner", "the module that calls it is not known"),
        ("lora", "LoRA is enabled"),
        ("bias", "the projection has a bias"),
        ("gather_output", "its output is gathered"),
        ("shards", "not a pair of equal column-parallel shards"),
    ],
)
def test_what_keeps_a_layer_from_fusing(
    change: str, reason: str, vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Nvfp4TcConfig(checkpoint())
    changes: dict[str, Any] = {}
    if change == "option":
        vllm_config.additional_config = {"nvfp4_tc": {"fuse_mlp": False}}
    elif change == "activation":
        changes = {"activation": GeluAndMul}
    elif change == "lora":
        monkeypatch.setattr(vllm_config, "lora_config", object())
    elif change == "bias":
        changes = {"bias": True}
    elif change == "gather_output":
        changes = {"gather_output": True}
    elif change == "shards":
        changes = {"output_sizes": [64, 32]}
    if change == "no owner":
        sizes, prefix = [INTERMEDIATE] * 2, "mlp.gate_up_proj"
        layer = MergedColumnParallelLinear(K, sizes, bias=False, quant_config=config, prefix=prefix)
    else:
        layer = gate_up(config, **changes)
    layer.quant_method.resolve_fusions(layer)
    assert not layer.quant_method.plan.gate_up
    [record] = config.startup.report.layers
    assert record.kernel == "nvfp4_gemm/reference (cpu)"
    assert re.search(f"not fused: .*{reason}", record.reason)


# --- 16-bit checkpoints -----------------------------------------------------------------------


@pytest.mark.usefixtures("vllm_config")
def test_online_layer_quantises_each_shard_by_itself(inputs: tuple[Tensor, Tensor]) -> None:
    x, _ = inputs
    build, rows, shard_ids = LAYERS["qkv"]
    layer = build(Nvfp4TcConfig())
    weights = [(torch.randn(n, K) * gain).bfloat16() for n, gain in zip(rows, GAINS, strict=True)]
    for weight, shard_id in zip(weights, shard_ids, strict=True):
        layer.weight.weight_loader(layer.weight, weight, shard_id)
    assert layer.weight.dtype == torch.uint8  # quantised with the last shard, unasked
    finish(layer)  # vLLM calls it for every layer once more
    out, _ = layer(x)
    per_row = row_global_scales(x)
    expected = expected_output(x, [quantize_weight(w) for w in weights], per_row)
    torch.testing.assert_close(out.double(), expected, **BF16_ROUNDING)


@pytest.mark.usefixtures("vllm_config")
def test_online_layer_that_the_model_has_in_float32() -> None:
    """Heads of reward models and classifiers stay in float32; the report gives the reason."""
    config = Nvfp4TcConfig()
    layer = ReplicatedLinear(
        K, 8, bias=False, params_dtype=torch.float32, quant_config=config, prefix="score"
    )
    assert isinstance(layer.quant_method, UnquantizedLinearMethod)
    assert layer.weight.dtype == torch.float32
    [record] = config.startup.report.layers
    assert (record.name, record.reason) == ("score", "the model has it in float32")


# --- refused ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize(
    ("tensor", "change", "message"),
    [
        ("weight", None, r"m\.in_proj\.weight of shard \['1'\]: not in the checkpoint"),
        ("weight_scale", None, r"weight_scale of shard \['1'\]: not in the checkpoint"),
        ("weight_scale_2", None, r"weight_scale_2 of shard \['1'\]: not in the checkpoint"),
        ("input_scale", None, r"input_scale of shard \['1'\]: not in the checkpoint"),
        ("weight", lambda t: t.float(), r"weight \(shard 1\): dtype is float32, must be uint8"),
        (
            "weight_scale",
            lambda t: t.float(),
            r"weight_scale \(shard 1\): dtype is float32, must be float8_e4m3fn",
        ),
        (
            "weight",
            lambda t: t[:, :-8],
            r"weight \(shard 1\): shape is \(24, 40\), must be \(24, 48\)",
        ),
        ("weight", lambda t: t.repeat(2, 1), r"shape is \(48, 48\), must be \(24, 48\)"),
        ("weight_scale", lambda t: t[:-1], r"shape is \(23, 6\), must be \(24, 6\)"),
        ("weight_scale_2", lambda t: t.expand(24), r"weight_scale_2 .* must be one number"),
        (
            "weight_scale_2",
            lambda t: t * 0,
            r"weight_scale_2 \(shard 1\): holds .* must be positive",
        ),
        ("weight_scale_2", lambda t: -t, r"weight_scale_2 \(shard 1\): holds .*positive"),
        (
            "weight_scale_2",
            lambda t: t * torch.nan,
            r"weight_scale_2 \(shard 1\): holds .* must be positive",
        ),
        ("input_scale", lambda t: t * 0, r"input_scale \(shard 1\): holds .*positive"),
        (
            "input_scale",
            lambda t: t * torch.inf,
            r"input_scale \(shard 1\): holds .* must be positive",
        ),
        (
            "weight_scale",
            lambda t: t.float().index_fill(0, torch.tensor(3), torch.nan).to(t.dtype),
            r"weight_scale \(shard 1\): 6 block scales are NaN, the first at row 3, block 0",
        ),
        ("weight_scale", lambda t: (-t.float()).to(t.dtype), "144 block scales are negative"),
        ("weight_scale", lambda t: (t.float() * 0).to(t.dtype), "144 block scales are zero"),
    ],
)
def test_damaged_layer_is_refused(
    tensor: str, change: Callable[[Tensor], Tensor] | None, message: str
) -> None:
    build, rows, shard_ids = LAYERS["merged"]
    quant = checkpoint()
    layer = build(Nvfp4TcConfig(quant))

    def attempt() -> None:
        shards = quantised_shards(rows, GAINS)
        for shard, shard_id in zip(shards, shard_ids, strict=True):
            tensors = tensors_on_disk(shard, INPUT_SCALE, quant)
            if shard_id == 1 and change is None:
                del tensors[tensor]
            elif shard_id == 1 and change is not None:
                tensors[tensor] = change(tensors[tensor])
            load(layer, tensors, shard_id)
        finish(layer)

    with pytest.raises(UnsupportedCheckpoint, match=message):
        attempt()


@pytest.mark.usefixtures("vllm_config")
def test_misaligned_k_is_refused() -> None:
    with pytest.raises(
        UnsupportedCheckpoint,
        match=r"m\.fc: K is 100, must be a multiple of 16; .*nvfp4_tc\.ignore",
    ):
        ColumnParallelLinear(
            100, 80, bias=False, quant_config=Nvfp4TcConfig(checkpoint()), prefix="m.fc"
        )


def test_patterns_that_cover_nothing_are_told(vllm_config: Any) -> None:
    patterns = ["fc", "q_proj", "re:.*k_proj", "lm_head", "nothing", "m.f"]
    vllm_config.additional_config = {"nvfp4_tc": {"ignore": patterns}}
    quant = Nvfp4TcConfig()
    quant.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj"]}
    for prefix in ("m.fc", "m.qkv_proj", "lm_head"):
        quant.get_quant_method(torch.nn.Identity(), prefix)
    told = [warning.partition(" covers no layer")[0] for warning in quant.startup.idle_patterns()]
    assert told == ["nvfp4_tc.ignore: 'nothing'", "nvfp4_tc.ignore: 'm.f'"]


@pytest.mark.usefixtures("vllm_config")
def test_k_that_tensor_parallelism_misaligns_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_layers, "get_tensor_model_parallel_world_size", lambda: 4)
    message = r"K is 96, which tensor parallelism of 4 cuts into 24; .* --tensor-parallel-size"
    with pytest.raises(UnsupportedCheckpoint, match=message):
        LAYERS["row"][0](Nvfp4TcConfig(checkpoint()))


@pytest.mark.usefixtures("vllm_config")
def test_unsupported_dtype_is_refused() -> None:
    with pytest.raises(
        UnsupportedCheckpoint, match=r"m\.fc: dtype is torch\.float32, must be bfloat16"
    ):
        ColumnParallelLinear(
            K, 80, bias=False, params_dtype=torch.float32,
            quant_config=Nvfp4TcConfig(checkpoint()), prefix="m.fc",
        )  # fmt: skip


def test_online_options_on_a_quantised_checkpoint_are_refused(vllm_config: Any) -> None:
    vllm_config.additional_config = {"nvfp4_tc": {"scales": "sweep"}}
    with pytest.raises(ValueError, match=r"nvfp4_tc\.scales: is set, but .* quantised already"):
        _ = Nvfp4TcConfig(checkpoint()).options
