"""Checkpoints of zeros and of the largest and smallest weights: right, or refused by name."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import moe_checkpoints
from tests.extreme_values import WEIGHTS, decoded, ordinary, rounding, with_outlier
from tests.test_quantizer.checkpoints import LINEARS, change_tensors, read_config, read_tensors
from tests.test_quantizer.mixtures import save_mixture
from vllm_fp4_plugin import formats
from vllm_fp4_plugin.checkpoint import files as checkpoint_files
from vllm_fp4_plugin.checkpoint import values as checkpoint_values
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint
from vllm_fp4_plugin.quantizer.errors import QuantizerError

ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.1.mlp"
Q, OUT, GATE, DOWN = (
    *(f"{ATTENTION}.{part}_proj" for part in "qo"),
    *(f"{MLP}.{part}_proj" for part in ("gate", "down")),
)
FUSED = {
    Q: [f"{ATTENTION}.{part}_proj" for part in "qkv"],
    GATE: [GATE, f"{MLP}.up_proj"],
}

# Linears with each kind of weights.
SITUATIONS = {
    "LLaMA-Pro's zero projections": ([OUT, DOWN], "zero"),
    "q zero, k and v not": ([Q], "zero"),
    "gate zero": ([GATE], "zero"),
    "negative zeros": ([Q, OUT], "negative zero"),
    "zero rows": ([Q, DOWN], "zero rows"),
    "one outlier": ([Q, DOWN], "one outlier"),
}
BEYOND = {"1e-30": (Q, "1e-30"), "1e30": (DOWN, "1e30"), "subnormal": (GATE, "subnormal")}
STORED = [
    (torch.bfloat16, "absmax"), (torch.float32, "sweep"), (torch.float16, "four-over-six"),
]  # fmt: skip


def spoil(src: Path, linears: list[str], kind: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Give linears weights of a kind, and some tokens a zero embedding."""
    torch.manual_seed(0)
    tensors = read_tensors(src)
    changes = {
        f"{name}.weight": WEIGHTS[kind](*tensors[f"{name}.weight"].shape).to(dtype)
        for name in linears
    }
    embedding = tensors["model.embed_tokens.weight"].clone()
    embedding[::2] = 0.0
    change_tensors(src, changes | {"model.embed_tokens.weight": embedding})


def read_as(format: str, tensors: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """Weight of a linear in float64, decoded by the format, and its global scale as a factor."""
    if format == "modelopt":
        parts = [tensors[f"{name}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2")]
        return decoded(*parts), parts[2].double()
    parts = [
        tensors[f"{name}.{part}"]
        for part in ("weight_packed", "weight_scale", "weight_global_scale")
    ]
    return decoded(*parts, divisor=True), 1 / parts[2].double()


@pytest.mark.processes
@pytest.mark.parametrize(("dtype", "scales"), STORED, ids=["BF16", "F32", "F16"])
@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_weights_become_the_same_within_rounding(
    src: Path, tmp_path: Path, situation: str, format: str, scales: str, dtype: torch.dtype
) -> None:
    spoil(src, *SITUATIONS[situation], dtype)
    quantize_checkpoint(src, tmp_path / "dst", format=format, scales=scales)
    before, after = read_tensors(src), read_tensors(tmp_path / "dst")
    for name in LINEARS:
        plain = before[f"{name}.weight"].double()
        value, step = read_as(format, after, name)
        bound = rounding(plain, float(step), scales != "absmax")
        assert bool(((value - plain).abs() <= bound).all()), name
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    check_readable(tmp_path / "dst")


def check_readable(dst: Path) -> None:
    """Check that serving accepts every value."""
    found = formats.parse(read_config(dst)["quantization_config"])
    headers = checkpoint_files.read_headers(dst)
    assert checkpoint_values.check_global_scales(headers, found) >= len(LINEARS)
    checkpoint_values.check_values(headers, found)


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize(("name", "kind"), BEYOND.values(), ids=BEYOND)
def test_global_scales_that_no_reader_takes_are_refused(
    src: Path, tmp_path: Path, name: str, kind: str, format: str
) -> None:
    spoil(src, [name], kind)
    ignore = FUSED.get(name, [name])
    remedy = " ".join(f"--ignore {each}" for each in ignore)
    message = (
        rf"^{name}\.weight: its largest weight is .*e[+-]\d\d, must be 0 or between 2\.3e-15 and "
        rf"3\.1e\+21; mend it in model\.safetensors, or .* {remedy}$"
    )
    with pytest.raises(QuantizerError, match=message):
        quantize_checkpoint(src, tmp_path / "dst", format=format)
    assert os.listdir(tmp_path) == ["src"]
    quantize_checkpoint(src, tmp_path / "dst", format=format, ignore=ignore)


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("scales", ["absmax", "four-over-six", "sweep"])
def test_an_outlier_that_leaves_nothing_of_the_others_is_refused(
    src: Path, tmp_path: Path, scales: str, format: str
) -> None:
    spoil(src, [DOWN], "zero")
    change_tensors(src, {f"{DOWN}.weight": with_outlier(64, 96, 1e6).bfloat16()})
    message = (
        rf"^{DOWN}\.weight: 38\d of its 384 blocks of 16 weights are too small for NVFP4 beside "
        rf"the largest of its global scale, 1\.0e\+06; mend that outlier in .* --ignore {DOWN}$"
    )
    with pytest.raises(QuantizerError, match=message):
        quantize_checkpoint(src, tmp_path / "dst", format=format, scales=scales)


def test_a_shared_scale_that_leaves_nothing_of_a_linear_is_refused(src: Path, tmp_path: Path):
    change_tensors(src, {f"{Q}.weight": (1e-8 * ordinary(64, 64)).bfloat16()})
    with pytest.raises(
        QuantizerError, match=rf"^{Q}\.weight: .*; quantise without a shared scale$"
    ):
        quantize_checkpoint(src, tmp_path / "dst", shared_fused_scale=True)
    quantize_checkpoint(src, tmp_path / "dst")


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("name", [Q, GATE])
def test_a_zero_shard_takes_the_scale_of_its_matrix(
    src: Path, tmp_path: Path, name: str, format: str
) -> None:
    """A zero shard must not have the smallest scale: readers may apply it to the whole matrix."""
    spoil(src, [name], "zero")
    quantize_checkpoint(src, tmp_path / "dst", format=format)
    after = read_tensors(tmp_path / "dst")
    scales = {each: float(read_as(format, after, each)[1]) for each in FUSED[name]}
    assert scales.pop(name) == max(scales.values())


ZERO_INPUTS = {
    "q zero": (Q, None),
    "o zero": (OUT, None),
    "down zero": (DOWN, None),
    "v zero": (f"{ATTENTION}.v_proj", OUT),
    "gate zero": (GATE, DOWN),
    "up zero": (f"{MLP}.up_proj", DOWN),
}


@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize(("zero", "starved"), ZERO_INPUTS.values(), ids=ZERO_INPUTS)
def test_inputs_of_zero_projections_are_measured_or_refused(
    src: Path, text: Path, tmp_path: Path, zero: str, starved: str | None, format: str
) -> None:
    spoil(src, [zero], "zero")
    options = {"format": format, "calibrate": text, "seq_len": 64, "calibration_tokens": 256}
    if starved is not None:
        message = rf"^{starved}: .* is 0\.0, must be positive.*; .* with --ignore {starved}$"
        with pytest.raises(QuantizerError, match=message):
            quantize_checkpoint(src, tmp_path / "dst", **options)
        options["ignore"] = [starved]
    quantize_checkpoint(src, tmp_path / "dst", **options)
    check_readable(tmp_path / "dst")


def test_inputs_whose_scales_no_reader_takes_are_refused(src: Path, text: Path, tmp_path: Path):
    """A norm weight of 1e-30 feeds q, k and v, which share one input."""
    change_tensors(src, {"model.layers.1.input_layernorm.weight": torch.full((64,), 1e-30)})
    ignore = " ".join(f"--ignore {name}" for name in FUSED[Q])
    message = rf"^{Q}: .* must be positive, between 2\.3e-15 and 3\.1e\+21; .* with {ignore}$"
    with pytest.raises(QuantizerError, match=message):
        quantize_checkpoint(src, tmp_path / "dst", calibrate=text, seq_len=64)


@pytest.mark.parametrize("cached", ["k", "v"])
def test_keys_and_values_of_zero_have_no_scale(
    src: Path, text: Path, tmp_path: Path, cached: str
) -> None:
    spoil(src, [f"{ATTENTION}.{cached}_proj"], "zero")
    options = {"calibrate": text, "seq_len": 64, "ignore": [OUT]}
    kind = {"k": "keys", "v": "values"}[cached]
    message = rf"^{ATTENTION}, {kind}: .* is 0\.0, must be .*; .*leave out --kv-cache-scheme$"
    with pytest.raises(QuantizerError, match=message):
        quantize_checkpoint(src, tmp_path / "dst", kv_cache_scheme="fp8", **options)
    quantize_checkpoint(src, tmp_path / "dst", **options)


def test_fp64_weights_are_refused_and_others_kept(src: Path, tmp_path: Path) -> None:
    tensors = read_tensors(src)
    wide = ["model.embed_tokens.weight", "model.norm.weight", f"{OUT}.weight"]
    change_tensors(src, {name: tensors[name].double() for name in wide})
    message = rf"^{OUT}\.weight: dtype is F64, must be BF16, F16, F32; convert it, or .*--ignore o_"
    with pytest.raises(QuantizerError, match=message):
        quantize_checkpoint(src, tmp_path / "dst")
    quantize_checkpoint(src, tmp_path / "dst", ignore=["o_proj"])
    after = read_tensors(tmp_path / "dst")
    assert all(torch.equal(after[name], tensors[name].double()) for name in wide)


@pytest.mark.parametrize("zeros", [("gate_proj",), ("gate_proj", "up_proj", "down_proj")], ids=len)
def test_an_expert_of_zeros(text: Path, tmp_path: Path, zeros: tuple[str, ...]) -> None:
    src = save_mixture(tmp_path / "src", moe_checkpoints.qwen3())
    layer = "model.layers.1.mlp.experts"
    before = read_tensors(src)
    names = [f"{layer}.2.{projection}" for projection in zeros]
    change_tensors(src, {f"{n}.weight": torch.zeros_like(before[f"{n}.weight"]) for n in names})
    quantize_checkpoint(src, tmp_path / "weight-only")
    after = read_tensors(tmp_path / "weight-only")
    assert not any(read_as("modelopt", after, name)[0].any() for name in names)
    gate, up = (read_as("modelopt", after, f"{layer}.2.{p}")[1] for p in ("gate_proj", "up_proj"))
    assert gate == up  # the scale of gate is what some readers take for both
    message = rf"^{layer}\.2\.down_proj: .* is 0\.0, must be .* with --ignore {layer}$"
    options = {"calibrate": text, "seq_len": 64, "calibration_tokens": 256}
    with pytest.raises(QuantizerError, match=message):
        quantize_checkpoint(src, tmp_path / "calibrated", **options)
    quantize_checkpoint(src, tmp_path / "calibrated", ignore=[layer], **options)
