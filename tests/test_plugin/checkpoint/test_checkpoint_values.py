"""Values that no sound checkpoint holds are refused: global scales always, the others on demand."""

import contextlib
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_fp4_plugin.checkpoint.files import read_headers
from vllm_fp4_plugin.checkpoint.values import check_global_scales, check_values
from vllm_fp4_plugin.formats import FORMATS, CheckpointConfig, UnsupportedCheckpoint, parse

LAYER = "model.layers.0"
ATTENTION = f"{LAYER}.self_attn"


def tensors(format: str) -> dict[str, Tensor]:
    names = FORMATS[format].names
    return {
        f"{ATTENTION}.q_proj.{names.weight}": torch.full((4, 16), 0x22, dtype=torch.uint8),
        f"{ATTENTION}.q_proj.{names.block_scale}": torch.ones(4, 2).to(torch.float8_e4m3fn),
        f"{ATTENTION}.q_proj.{names.weight_global}": torch.tensor([0.5]),
        f"{ATTENTION}.q_proj.{names.input_global}": torch.tensor([0.5]),
        f"{ATTENTION}.{names.k_scale}": torch.tensor(0.5),
        f"{ATTENTION}.{names.v_scale}": torch.tensor(0.5),
        f"{LAYER}.input_layernorm.weight": torch.ones(8, dtype=torch.bfloat16),
    }


def config(format: str, weight_only: bool = False) -> CheckpointConfig:
    return CheckpointConfig(FORMATS[format], weight_only)


def scales(format: str) -> list[str]:
    names = FORMATS[format].names
    of_q = [f"q_proj.{name}" for name in (names.weight_global, names.input_global)]
    return [f"{ATTENTION}.{name}" for name in (*of_q, names.k_scale, names.v_scale)]


@pytest.mark.parametrize("format", FORMATS)
def test_sound_scales_are_counted(format: str, tmp_path: Path) -> None:
    save_file(tensors(format), tmp_path / "model.safetensors")
    assert check_global_scales(read_headers(tmp_path), config(format)) == 4
    check_values(read_headers(tmp_path), config(format))


@pytest.mark.parametrize("value", [0.0, -0.5, math.nan, math.inf, 1e30, 1e-30], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_scales_that_cannot_be(format: str, value: float, tmp_path: Path) -> None:
    for name in scales(format):
        changed = tensors(format)
        changed[name].fill_(value)
        save_file(changed, tmp_path / "model.safetensors")
        message = (
            rf"model\.safetensors: {name}: holds .*, global scales must be positive, between 9e-19"
        )
        with pytest.raises(UnsupportedCheckpoint, match=message):
            check_global_scales(read_headers(tmp_path), config(format))


def test_scales_of_mixed_precision(tmp_path: Path) -> None:
    """Values are checked by each layer's kind, FP8 layers included."""
    fp8 = {
        "o_proj.weight": torch.ones(4, 16).to(torch.float8_e4m3fn),
        "o_proj.weight_scale": torch.tensor(0.5),
        "o_proj.input_scale": torch.tensor(0.5),
    }
    good = tensors("modelopt") | {f"{ATTENTION}.{name}": tensor for name, tensor in fp8.items()}
    layers = {f"{ATTENTION}.q_proj": "NVFP4", f"{ATTENTION}.o_proj": "FP8"}
    mixed = parse(
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                name: {"quant_algo": algo, "group_size": 16} for name, algo in layers.items()
            },
        }
    )
    used = [
        *scales("modelopt"),
        *(f"{ATTENTION}.o_proj.{end}_scale" for end in ("weight", "input")),
    ]
    save_file(good, tmp_path / "model.safetensors")
    assert check_global_scales(read_headers(tmp_path), mixed) == len(used)
    for name in used:
        save_file(
            good | {name: torch.full_like(good[name], math.nan)}, tmp_path / "model.safetensors"
        )
        with pytest.raises(UnsupportedCheckpoint, match=f"{name}: holds .*nan"):
            check_global_scales(read_headers(tmp_path), mixed)


@pytest.mark.parametrize("value", [2.0**-60, 2.0**60], ids=["least", "largest"])
def test_scales_at_the_bounds(value: float, tmp_path: Path) -> None:
    changed = tensors("modelopt")
    for name in scales("modelopt"):
        changed[name].fill_(value)
    save_file(changed, tmp_path / "model.safetensors")
    check_global_scales(read_headers(tmp_path), config("modelopt"))


def test_scales_that_are_not_used(tmp_path: Path) -> None:
    """Input scales, even uncalibrated, are ignored if only weights are quantised."""
    changed = tensors("modelopt")
    changed[f"{ATTENTION}.q_proj.input_scale"].fill_(0)
    save_file(changed, tmp_path / "model.safetensors")
    assert check_global_scales(read_headers(tmp_path), config("modelopt", weight_only=True)) == 3


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (f"{LAYER}.input_layernorm.weight", math.nan, "holds 1 NaN or infinite values"),
        (f"{LAYER}.input_layernorm.weight", math.inf, "holds 1 NaN or infinite values"),
        (f"{ATTENTION}.q_proj.weight_scale", math.nan, "1 block scales are NaN"),
        (f"{ATTENTION}.q_proj.weight_scale", -1.0, "1 block scales are negative"),
        (f"{ATTENTION}.q_proj.weight_scale", 0.0, "1 block scales are zero"),
    ],
)
def test_values(name: str, value: float, message: str, tmp_path: Path) -> None:
    changed = tensors("modelopt")
    kind = changed[name].dtype
    wider = changed[name].float()
    wider.view(-1)[-1] = value
    changed[name] = wider.to(kind)
    save_file(changed, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedCheckpoint, match=rf"model\.safetensors: {name}: {message}"):
        check_values(read_headers(tmp_path), config("modelopt"))


def test_values_of_a_checkpoint_that_is_not_quantised(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.tensor([1.0, math.nan])}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedCheckpoint, match=r"model\.norm\.weight: holds 1 NaN"):
        check_values(read_headers(tmp_path), None)


@pytest.mark.parametrize(
    ("dtype", "code"),
    [
        (torch.float8_e4m3fn, 0xFF),
        (torch.float8_e5m2, 0x7C),
        (torch.float8_e5m2, 0xFE),
        (torch.float8_e8m0fnu, 0xFF),
    ],
    ids=str,
)
@pytest.mark.parametrize("checkpoint", [None, config("modelopt")], ids=["plain", "NVFP4"])
def test_eight_bit_values(
    dtype: torch.dtype, code: int, checkpoint: CheckpointConfig | None, tmp_path: Path
) -> None:
    """The largest finite value passes; NaN, and the infinity of E5M2, is refused."""
    for last, refused in ((0x7B if dtype == torch.float8_e5m2 else 0x7E, False), (code, True)):
        codes = torch.tensor([0, 1, last], dtype=torch.uint8)
        stored = tensors("modelopt") | {"model.fp8.weight": codes.view(dtype)}
        save_file(stored, tmp_path / "model.safetensors")
        expected = (
            pytest.raises(UnsupportedCheckpoint, match=r"fp8\.weight: holds 1 NaN or infinite")
            if refused
            else contextlib.nullcontext()
        )
        with expected:
            check_values(read_headers(tmp_path), checkpoint)
