"""Mixed-precision checkpoints, made from a 16-bit and an NVFP4 checkpoint of the same model."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nvfp4_kernels.formats.nvfp4 import E2M1_VALUES, Nvfp4Tensor
from vllm_fp4_plugin.formats.kind import Kind

E4M3_MAX = 448.0
E4M3_STEPS_OF_NVFP4 = 6.0  # an NVFP4 scale is amax/2688, one of FP8 amax/448

ALGORITHMS = {
    Kind.NVFP4: "NVFP4",
    Kind.NVFP4_A16: "W4A16_NVFP4",
    Kind.FP8: "FP8",
    Kind.FP8_CHANNEL: "FP8_PER_CHANNEL_PER_TOKEN",
    Kind.FP8_BLOCK: "FP8_PB_WO",
    Kind.MXFP8: "MXFP8",
}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
TOKEN = FP8 | {"strategy": "token", "dynamic": True}
MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
GROUPS: dict[Kind, dict[str, Any]] = {
    Kind.FP8: {
        "format": "float-quantized",
        "weights": FP8 | {"strategy": "tensor"},
        "input_activations": FP8 | {"strategy": "tensor"},
    },
    Kind.FP8_CHANNEL: {
        "format": "float-quantized",
        "weights": FP8 | {"strategy": "channel"},
        "input_activations": TOKEN,
    },
    Kind.FP8_BLOCK: {
        "format": "float-quantized",
        "weights": FP8 | {"strategy": "block", "block_structure": [128, 128]},
        "input_activations": FP8 | {"strategy": "group", "group_size": 128, "dynamic": True},
    },
    Kind.MXFP8: {
        "format": "mxfp8-quantized",
        "weights": FP8 | MX,
        "input_activations": FP8 | MX | {"dynamic": True},
    },
    Kind.MXFP4: {"format": "mxfp4-pack-quantized", "weights": FP8 | MX | {"num_bits": 4}},
}


@dataclass(frozen=True)
class Quantized:
    """Matrix on disk, as tensors, and its values.

    Attributes:
        tensors: tensors by the part of their names after the module's name.
        values: float32 ``(N, K)``.
    """

    tensors: dict[str, Tensor]
    values: Tensor


def quantize(kind: Kind, weight: Tensor, *, modelopt: bool) -> Quantized:
    """Quantise a matrix ``(N, K)`` to a kind other than NVFP4, as its format's producer does."""
    w = weight.float()
    n, k = w.shape
    if kind in (Kind.MXFP8, Kind.MXFP4):
        return _quantize_mx(kind, w)
    if kind is Kind.FP8:
        scale = w.abs().amax() / E4M3_MAX
        steps = scale.expand(n, k)
        stored = scale if modelopt else scale.view(1)
    elif kind is Kind.FP8_CHANNEL:
        stored = w.abs().amax(1) / E4M3_MAX
        steps = stored.unsqueeze(1).expand(n, k)
        stored = stored if modelopt else stored.unsqueeze(1)
    else:
        rows, columns = -(-n // 128), -(-k // 128)
        stored = torch.empty(rows, columns)
        steps = torch.empty(n, k)
        for i in range(rows):
            for j in range(columns):
                block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
                stored[i, j] = w[block].abs().amax() / E4M3_MAX
                steps[block] = stored[i, j]
        stored = stored[:, None, :, None] if modelopt else stored
    codes = (w / steps).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": stored.contiguous()}
    return Quantized(tensors, codes.float() * steps)


def _quantize_mx(kind: Kind, w: Tensor) -> Quantized:
    largest = 6.0 if kind is Kind.MXFP4 else E4M3_MAX
    blocks = w.unflatten(1, (-1, 32))
    exponents = torch.ceil(torch.log2(blocks.abs().amax(-1) / largest))
    scaled = blocks / torch.exp2(exponents).unsqueeze(-1)
    scales = (exponents + 127).to(torch.uint8)
    if kind is Kind.MXFP8:
        codes = scaled.to(torch.float8_e4m3fn)
        values = codes.float()
        tensors = {"weight": codes.flatten(1), "weight_scale": scales}
    else:
        grid = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)])
        nearest = (scaled.unsqueeze(-1) - grid).abs().argmin(-1)
        values = grid[nearest]
        flat = nearest.flatten(1).to(torch.uint8)
        tensors = {"weight_packed": flat[:, 0::2] | flat[:, 1::2] << 4, "weight_scale": scales}
    return Quantized(tensors, (values * torch.exp2(exponents).unsqueeze(-1)).flatten(1))


@dataclass(frozen=True)
class Mixed:
    """Mixed-precision checkpoint.

    Attributes:
        path: directory of the checkpoint.
        values: float32 values of every tensor of the model, by name.
        inputs: rounding of the input of each layer that quantises its input, by name.
    """

    path: Path
    values: dict[str, Tensor]
    inputs: dict[str, Callable[[Tensor], Tensor]]


def round_input(kind: Kind, x: Tensor, scale: Tensor | None = None) -> Tensor:
    """Round an input ``(..., K)`` as a layer of ``kind`` does; ``scale``: None if dynamic."""
    size = {Kind.FP8_BLOCK: 128, Kind.MXFP8: 32, Kind.MXFP4: 32}.get(kind, x.shape[-1])
    blocks = x.float().unflatten(-1, (-1, size))
    largest = 6.0 if kind is Kind.MXFP4 else E4M3_MAX
    step = blocks.abs().amax(-1, keepdim=True) / largest if scale is None else scale
    if kind in (Kind.MXFP8, Kind.MXFP4):
        step = torch.exp2(torch.ceil(torch.log2(step)))
    scaled = (blocks / step).clamp(-largest, largest)
    if kind is Kind.MXFP4:
        grid = torch.tensor(E2M1_VALUES)
        rounded = grid[(scaled.abs().unsqueeze(-1) - grid).abs().argmin(-1)] * scaled.sign()
    else:
        rounded = scaled.to(torch.float8_e4m3fn).float()
    return (rounded * step).flatten(-2)


def write(
    dst: Path, bf16: Path, calibrated: Path, kinds: Mapping[str, Kind], *, modelopt: bool
) -> Mixed:
    """Write a checkpoint whose linears have ``kinds``, by the last part of their names.

    Args:
        dst: directory of the checkpoint, which must not exist.
        bf16: checkpoint in 16 bits.
        calibrated: NVFP4 checkpoint of the same model in ModelOpt's format, with input scales.
        kinds: kinds by name, e.g. ``{"o_proj": Kind.FP8}``; other modules stay in 16 bits.
        modelopt: whether the format is ModelOpt's, not that of compressed-tensors.
    """
    shutil.copytree(bf16, dst)
    plain = load_file(bf16 / "model.safetensors")
    nvfp4 = load_file(calibrated / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    chosen: dict[str, Kind] = {}
    inputs: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, tensor in plain.items():
        module = name.removesuffix(".weight")
        kind = kinds.get(module.rpartition(".")[2])
        if kind is None:
            tensors[name], values[name] = tensor, tensor.float()
            continue
        chosen[module] = kind
        each = (
            _nvfp4(kind, module, nvfp4, modelopt=modelopt)
            if kind.is_nvfp4
            else quantize(kind, tensor, modelopt=modelopt)
        )
        values[name] = each.values
        tensors |= {f"{module}.{part}": t.contiguous() for part, t in each.tensors.items()}
        if kind is Kind.FP8:
            scale = nvfp4[f"{module}.input_scale"] * E4M3_STEPS_OF_NVFP4
            tensors[f"{module}.input_scale"] = scale if modelopt else scale.view(1)
            inputs[module] = partial(round_input, kind, scale=scale)
        elif kind in (Kind.FP8_CHANNEL, Kind.FP8_BLOCK, Kind.MXFP8):
            inputs[module] = partial(round_input, kind)
    save_file(tensors, dst / "model.safetensors", metadata={"format": "pt"})
    config = _modelopt_config(chosen) if modelopt else _compressed_tensors_config(kinds)
    set_config(dst, config)
    return Mixed(dst, values, inputs)


def _nvfp4(kind: Kind, module: str, nvfp4: Mapping[str, Tensor], *, modelopt: bool) -> Quantized:
    names = ("weight", "weight_scale", "weight_scale_2")
    weight = Nvfp4Tensor(*(nvfp4[f"{module}.{name}"] for name in names))
    input_scale = nvfp4[f"{module}.input_scale"] if kind is Kind.NVFP4 else None
    return Quantized(nvfp4_tensors(weight, input_scale, modelopt=modelopt), weight.dequantize())


def nvfp4_tensors(
    weight: Nvfp4Tensor, input_scale: Tensor | None, *, modelopt: bool
) -> dict[str, Tensor]:
    """Tensors of an NVFP4 matrix on disk, by the part of their names after the module's name.

    Args:
        weight: the matrix, with block scales in linear layout.
        input_scale: calibrated scale, as a factor; None: the activations stay in 16 bits.
        modelopt: whether the format is ModelOpt's, not that of compressed-tensors, which stores
            divisors.
    """
    names = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    scalars = [weight.global_scale, *([] if input_scale is None else [input_scale])]
    if not modelopt:
        names = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
        scalars = [scalar.reciprocal().view(1) for scalar in scalars]
    return dict(zip(names, (weight.data, weight.scales, *scalars), strict=False))


def set_config(directory: Path, quantization: dict[str, Any]) -> None:
    """Write a ``quantization_config`` into a checkpoint's ``config.json``."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"quantization_config": quantization}))


def _modelopt_config(kinds: Mapping[str, Kind]) -> dict[str, Any]:
    layers = {module: {"quant_algo": ALGORITHMS[kind]} for module, kind in kinds.items()}
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "exclude_modules": [] if "lm_head" in kinds else ["lm_head"],
        "quantized_layers": layers,
    }


def group(kind: Kind) -> dict[str, Any]:
    """Quantisation group of ``kind`` in compressed-tensors' config, without targets."""
    fp4 = FP8 | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    return GROUPS.get(kind) or {
        "format": "nvfp4-pack-quantized",
        "weights": fp4,
        "input_activations": fp4 | {"dynamic": "local"} if kind is Kind.NVFP4 else None,
    }


def _compressed_tensors_config(kinds: Mapping[str, Kind]) -> dict[str, Any]:
    groups: dict[str, Any] = {}
    for number, kind in enumerate(dict.fromkeys(kinds.values())):
        leaves = "|".join(leaf for leaf, its in kinds.items() if its is kind)
        groups[f"group_{number}"] = group(kind) | {"targets": [rf"re:(.*\.)?({leaves})$"]}
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "ignore": [] if "lm_head" in kinds else ["lm_head"],
        "config_groups": groups,
    }
