"""Reference of a tiny checkpoint: transformers' model with the decoded weights, in float32."""

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nvfp4_kernels.formats.nvfp4 import Nvfp4Tensor, quantize_activation
from tests.catalogue import nemotron_vl
from tests.catalogue.hub_classes import of_transformers
from tests.mixed_checkpoints import round_input
from vllm_fp4_plugin.formats.kind import Kind

Rounding = Callable[[Tensor], Tensor]
_PARTS = ("weight_scale", "weight_scale_2", "weight_global_scale", "input_scale")
_PARTS += ("input_global_scale", "k_scale", "v_scale")
# Suffixes of the tensors beside Llama 4's stacks.
_STACKED_PARTS = ("_weight_scale", "_weight_scale_2", "_input_scale")
_STACKED = ("qwen3_vl_moe",)  # types whose experts transformers reads from stacks alone
_EXPERT = re.compile(r"(.+\.experts)\.\d\.(\w+)\.weight")  # of at most ten, so in order


def even_out(model: Any) -> None:
    """Scale a fresh model so that every layer counts and no layer multiplies rounding errors.

    Rows of activations keep their magnitude; log-probabilities differ by about 1.
    """
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    gains = {"k_proj": 1.4, "v_proj": 0.8, "up_proj": 1.3, "gate_proj": 0.9, "in_proj_a": 4.0}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 or ".experts." in name:
            gain = next((g for key, g in gains.items() if key in name), 1.0)
            width = 1 if "embed_tokens" in name and not tied else parameter.shape[-1]
            parameter.data.normal_(std=gain * width**-0.5)
    for module in model.modules():
        # Here only learnt norms keep a softmax from choosing a single key.
        if hasattr(module, "q_norm") and hasattr(module, "scaling"):
            module.q_norm.weight.data.mul_(module.head_dim**-0.5 / module.scaling)


def decode(checkpoint: Path, directory: Path) -> dict[str, Rounding]:
    """Write the decoded values of a checkpoint as a float32 checkpoint.

    Args:
        checkpoint: checkpoint with NVFP4 and FP8 layers, in ModelOpt's or compressed-tensors'
            format.
        directory: directory of the new checkpoint, which must not exist.

    Returns:
        Rounding of the input of each layer that quantises its input, by the module's name on disk.
    """
    shutil.copytree(checkpoint, directory)
    stored = load_file(checkpoint / "model.safetensors")
    values: dict[str, Tensor] = {}
    roundings: dict[str, Rounding] = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part in _PARTS or name.endswith(_STACKED_PARTS):
            continue
        if f"{name}_weight_scale" in stored:
            values[name] = _stacked_weight(name, stored)
            continue
        if part == "weight_packed" or (part == "weight" and f"{module}.weight_scale" in stored):
            beside = {p: stored.get(f"{module}.{p}") for p in _PARTS}
            values[f"{module}.weight"] = _weight(tensor, beside)
            rounding = _rounding(tensor, beside)
            if rounding is not None:
                roundings[module] = rounding
        else:
            values[name] = tensor.float()
    file = directory / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]
    if config["model_type"] in _STACKED:
        values = _stack(values)
    if "llm_config" in config:  # that of the text model, which alone transformers has a class of
        config, start = config["llm_config"], nemotron_vl.PREFIX
        values = {n.removeprefix(start): v for n, v in values.items() if n.startswith(start)}
    save_file(values, directory / "model.safetensors", metadata={"format": "pt"})
    file.write_text(json.dumps(config))
    return roundings


def _stacked_weight(name: str, stored: Mapping[str, Tensor]) -> Tensor:
    """Values of Llama 4's expert stack ``(E, K, N)``, whose codes lie along K."""
    parts = (stored[f"{name}{part}"] for part in ("", *_STACKED_PARTS[:2]))
    data, scale, factor = parts
    each = zip(data.mT.contiguous(), scale.mT.contiguous(), factor, strict=True)
    return torch.stack([Nvfp4Tensor(*of_one).dequantize().T for of_one in each]).contiguous()


def _stack(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with all experts in one stack; the gate rows precede the up rows."""
    stacked: dict[str, Tensor] = {}
    experts: dict[str, dict[str, list[Tensor]]] = {}
    for name, value in values.items():
        found = _EXPERT.fullmatch(name)
        if found:
            experts.setdefault(found[1], {}).setdefault(found[2], []).append(value)
        else:
            stacked[name] = value
    for layer, weights in experts.items():
        gate, up, down = (torch.stack(weights[f"{each}_proj"]) for each in ("gate", "up", "down"))
        stacked |= {f"{layer}.gate_up_proj": torch.cat([gate, up], 1), f"{layer}.down_proj": down}
    return stacked


def _weight(data: Tensor, beside: Mapping[str, Tensor | None]) -> Tensor:
    scale, factor = beside["weight_scale"], beside["weight_scale_2"]
    assert scale is not None
    if data.dtype == torch.uint8:
        if factor is None:
            inverse = beside["weight_global_scale"]
            assert inverse is not None
            factor = inverse.reciprocal().view(())
        if data.ndim == 3:  # of all experts
            each = zip(data, scale, factor, strict=True)
            return torch.stack([Nvfp4Tensor(*parts).dequantize() for parts in each])
        return Nvfp4Tensor(data, scale, factor).dequantize()
    if scale.ndim == 1 and scale.numel() > 1:
        scale = scale.unsqueeze(1)
    return data.float() * scale


def _rounding(data: Tensor, beside: Mapping[str, Tensor | None]) -> Rounding | None:
    scale, inverse = beside["input_scale"], beside["input_global_scale"]
    if data.dtype != torch.uint8:
        kind = Kind.FP8 if scale is not None else Kind.FP8_CHANNEL
        return partial(round_input, kind, scale=scale)
    if scale is None and inverse is None:
        return None
    return partial(_round_nvfp4, scale if inverse is None else inverse.reciprocal().view(()))


def _round_nvfp4(scale: Tensor, x: Tensor) -> Tensor:
    rows = x.flatten(0, -2)
    codes, scales = quantize_activation(rows, scale)
    return Nvfp4Tensor(codes, scales, scale).dequantize().view_as(x)


def logprobs(
    model: nn.Module, prompts: Sequence[Sequence[int]], **inputs: Any
) -> list[list[float]]:
    """Log-probabilities of each prompt's tokens, except the first token."""
    scored = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            logits = model(input_ids=ids, **inputs).logits
        scores = logits.float().log_softmax(-1)[0, :-1]
        scored.append(scores.gather(-1, ids[0, 1:, None]).flatten().tolist())
    return scored


def load(auto: Any, directory: Path, roundings: Mapping[str, Rounding]) -> nn.Module:
    """Model of a decoded checkpoint whose layers round their inputs by ``roundings``.

    Raises:
        AssertionError: the checkpoint lacks tensors of the model, or has others.
    """
    with of_transformers():
        model, told = auto.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not told["missing_keys"], told["missing_keys"]
    assert not told["unexpected_keys"], told["unexpected_keys"]
    modules = dict(model.named_modules())
    for name, rounding in roundings.items():
        _module(modules, name).register_forward_pre_hook(
            lambda _, given, rounding=rounding: (rounding(given[0]).to(given[0].dtype),)
        )
    return model.eval()


def _module(modules: Mapping[str, nn.Module], name: str) -> nn.Module:
    """Module of a name on disk; the prefix of its name in memory may differ."""
    while name not in modules:
        head, _, name = name.partition(".")
        assert name, head
        ends = [known for known in modules if known.endswith(f".{name}")]
        if len(ends) == 1:
            return modules[ends[0]]
    return modules[name]
