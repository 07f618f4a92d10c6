"""Writer of a family's tiny checkpoint: a random transformers model, quantised as by exporters."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from nvfp4_kernels.formats.nvfp4 import quantize_weight
from tests import mixed_checkpoints, tiny_llama
from tests.catalogue.family import Family
from tests.catalogue.hub_classes import of_transformers
from vllm_fp4_plugin.formats.kind import Kind

INPUT_AMAX = 8.0  # of every layer, as if calibrated
_FP4_INPUT, _FP8_INPUT = INPUT_AMAX / (6 * 448), INPUT_AMAX / 448
_NEVER = ("embed", "conv1d", "norm", "patch_merger", ".hc_", ".ape", "A_log", "tid2eid")
_STACKS = ("gate_up_proj", "down_proj", ".experts.w13_weight", ".experts.w2_weight")
_KV_FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}


def write(
    family: Family,
    directory: Path,
    scale: Callable[[torch.nn.Module], None] = tiny_llama.amplify,
) -> Path:
    """Write the family's checkpoint with its tokenizer.

    Args:
        family: family whose checkpoint is written.
        directory: directory of the checkpoint.
        scale: function that scales the weights of a fresh model.

    Returns:
        ``directory``.
    """
    torch.manual_seed(0)
    auto = AutoModelForImageTextToText if family.multimodal else AutoModelForCausalLM
    with of_transformers():
        model = auto.from_config(AutoConfig.for_model(**family.config)).to(torch.bfloat16)
    scale(model)
    model.save_pretrained(directory)
    tiny_llama.tokenizer().save_pretrained(directory)
    file = directory / "model.safetensors"
    kinds: dict[str, Kind] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in _by_expert(family, _renamed(family, load_file(file))):
        tensors |= _quantized(family, name, tensor, kinds)
    save_file(tensors, file, metadata={"format": "pt"})
    _set_config(family, directory, kinds)
    if family.surround:
        family.surround(directory)
    return directory


def _renamed(family: Family, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, replacement in family.renamed.items():
            name = re.sub(pattern, replacement, name)
        if name:
            renamed[name] = tensor
    return renamed


def _by_expert(family: Family, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by name; stacks of experts are split, unless the format stacks experts too."""
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if tensor.ndim != 3 or last not in ("gate_up_proj", "down_proj") or family.stacked:
            yield name, tensor
            continue
        for expert, weight in enumerate(tensor):
            if last == "down_proj":
                yield f"{prefix}.{expert}.down_proj.weight", weight
                continue
            for shard, half in zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True):
                yield f"{prefix}.{expert}.{shard}.weight", half


def _quantized(
    family: Family, name: str, tensor: Tensor, kinds: dict[str, Kind]
) -> dict[str, Tensor]:
    """Tensors on disk for one weight; ``kinds`` records the kind of a linear layer's weight."""
    module = name.removesuffix(".weight")
    is_stack = tensor.ndim == 3 and (name.endswith(_STACKS) or ".moe." in name)
    if any(part in name for part in _NEVER) or not (
        is_stack or (tensor.ndim == 2 and module != name)
    ):
        return {name: tensor}
    kind = kinds[module] = family.kind(module)
    if kind is Kind.UNQUANTIZED:
        return {name: tensor}
    if is_stack:
        if module != name:
            scales = [f"{module}.weight_scale", f"{module}.weight_scale_2"]
            inputs = torch.full((len(tensor),), _FP4_INPUT)
            extra = {f"{module}.input_scale": inputs} if kind is Kind.NVFP4 else {}
            return _nvfp4_rows(name, tensor, scales) | extra
        if name.endswith("_proj"):
            return _nvfp4_stack(name, tensor, kind)
        return _nvfp4_rows(name, tensor, [f"{name}.scale", f"{name}.scale2"])
    modelopt = family.format == "modelopt"
    if kind.is_nvfp4:
        input_scale = torch.tensor(_FP4_INPUT) if kind is Kind.NVFP4 else None
        weight = quantize_weight(tensor.float())
        parts = mixed_checkpoints.nvfp4_tensors(weight, input_scale, modelopt=modelopt)
    else:
        parts = mixed_checkpoints.quantize(kind, tensor, modelopt=modelopt).tensors
        if kind is Kind.FP8:
            scale = torch.tensor(_FP8_INPUT)
            parts = parts | {"input_scale": scale if modelopt else scale.view(1)}
    if family.fp8_kv and module.endswith((".k_proj", ".v_proj")) and "self_attn" in module:
        parts = parts | {f"{module[-6]}_scale": torch.tensor(1.0)}
    return {f"{module}.{part}": t.contiguous() for part, t in parts.items()}


def _nvfp4_stack(name: str, weights: Tensor, kind: Kind) -> dict[str, Tensor]:
    """Tensors on disk for Llama 4's stack ``(E, K, N)``: codes along K, scales ``(E, K/16, N)``."""
    each = [quantize_weight(w.float().T.contiguous()) for w in weights]
    inputs = {f"{name}_input_scale": torch.full((len(each),), _FP4_INPUT)}
    return {
        name: torch.stack([w.data.T for w in each]).contiguous(),
        f"{name}_weight_scale": torch.stack([w.scales.T for w in each]).contiguous(),
        f"{name}_weight_scale_2": torch.stack([w.global_scale for w in each]),
        **(inputs if kind is Kind.NVFP4 else {}),
    }


def _nvfp4_rows(name: str, weights: Tensor, scales: list[str]) -> dict[str, Tensor]:
    """Tensors of ``(E, N, K)``: codes along K, scales ``(E, N, K/16)`` named by ``scales``."""
    each = [quantize_weight(w.float()) for w in weights]
    parts = [(w.data, w.scales, w.global_scale) for w in each]
    stacked = [torch.stack(part) for part in zip(*parts, strict=True)]
    return dict(zip([name, *scales], stacked, strict=True))


def _set_config(family: Family, directory: Path, kinds: Mapping[str, Kind]) -> None:
    quantised = {m: kind for m, kind in kinds.items() if kind is not Kind.UNQUANTIZED}
    if family.format == "modelopt":
        quantization = _modelopt(family, quantised)
    else:
        quantization = _compressed_tensors(family, quantised)
    file = directory / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": quantization}
    config["model_type"] = family.config["model_type"]  # which vLLM may have set for the class
    if family.architecture:
        config["architectures"] = [family.architecture]
    for path, value in family.fields.items():
        *objects, name = path.split(".")
        reduce(getitem, objects, config)[name] = value
    file.write_text(json.dumps(config, indent=2))


def _modelopt(family: Family, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    algorithms = {mixed_checkpoints.ALGORITHMS[kind] for kind in kinds.values()}
    config: dict[str, Any] = {
        "quant_method": "modelopt",
        "group_size": 16,
        "ignore": family.excluded,
        "producer": {"name": "modelopt"},
    }
    if family.fp8_kv:
        config["kv_cache_scheme"] = _KV_FP8
    if len(algorithms) == 1:
        return config | {"quant_algo": algorithms.pop()}
    layers = {module: _algorithm(kind) for module, kind in kinds.items()}
    return config | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def _algorithm(kind: Kind) -> dict[str, Any]:
    size = {"group_size": 16} if kind.is_nvfp4 else {}
    return {"quant_algo": mixed_checkpoints.ALGORITHMS[kind], **size}


def _compressed_tensors(family: Family, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    present = list(dict.fromkeys(kinds.values()))
    groups: dict[str, Any] = {}
    for number, kind in enumerate(present):
        targets = ["Linear"] if len(present) == 1 else _targets(family, kind, kinds)
        groups[f"group_{number}"] = mixed_checkpoints.group(kind) | {"targets": targets}
    formats = [group["format"] for group in groups.values()]
    return {
        "quant_method": "compressed-tensors",
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": [_regex(pattern) for pattern in family.excluded],
        "kv_cache_scheme": None,
    }


def _targets(family: Family, kind: Kind, kinds: Mapping[str, Kind]) -> list[str]:
    patterns = [p for p, k in family.kinds.items() if k is kind and p != "*"]
    if patterns:
        return [_regex(pattern) for pattern in patterns]
    # The remaining layers have no pattern of their own, so their modules are listed by name.
    return [module for module, k in kinds.items() if k is kind]


def _regex(pattern: str) -> str:
    """Pattern of the catalogue in compressed-tensors' notation; plain names are left unchanged."""
    if "*" not in pattern:
        return pattern
    regex = re.escape(pattern).replace(r"\*", ".*").replace(r"\[", "[").replace(r"\]", "]")
    return f"re:{regex}$"
