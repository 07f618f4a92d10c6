"""Reference of a mixture of experts: transformers' model with the decoded weights, in float32.

Where the checkpoint quantises inputs, the layers and experts of the model round their inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from nvfp4_kernels.formats.nvfp4 import Nvfp4Tensor, quantize_activation
from tests import tiny_llama
from tests.catalogue import reference
from tests.engine import NEW_TOKENS, Run

_EXPERTS = ".experts."
_SECOND = ("down_proj", "w2")


@dataclass(frozen=True)
class Moe:
    """Checkpoint with NVFP4 experts.

    Attributes:
        path: directory of the checkpoint.
        decoded: directory of the same model with its values in float32.
        input_scales: scales for the quantisation of inputs, by the projections' names; {} if
            activations stay in 16 bits.
    """

    path: Path
    decoded: Path
    input_scales: dict[str, Tensor]


def decoded(path: Path, directory: Path) -> Moe:
    """Decode an NVFP4 checkpoint into a new directory."""
    reference.decode(path, directory)
    scales: dict[str, Tensor] = {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if name.endswith("input_global_scale"):
            scales[name.removesuffix(".input_global_scale")] = tensor.reciprocal().view(())
        elif name.endswith("input_scale"):
            scales[name[: -len(".input_scale")]] = tensor  # or Llama 4's: _input_scale
    return Moe(path, directory, scales)


def opened(moe: Moe, *, rounds: bool = True) -> Any:
    """Open the model of a checkpoint; ``rounds``: whether layers round their inputs."""
    scales = moe.input_scales if rounds else {}
    linears = {n: partial(_rounded, scale) for n, scale in scales.items() if _EXPERTS not in n}
    model = reference.load(
        auto_class(AutoConfig.from_pretrained(moe.decoded)), moe.decoded, linears
    )
    for name, module in model.named_modules() if scales else ():
        if name.endswith(".experts"):
            first, second = _of_layer(scales, name)
            forward = _stacked if "Llama4" in type(module).__name__ else _experts
            module.forward = partial(forward, module, first, second)
    return model


def auto_class(config: Any) -> Any:
    """Class of transformers that opens the models of a config."""
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def said(moe: Moe) -> Run:
    """Log-probabilities of the text by a checkpoint's model, with its greedy continuation."""
    return says(opened(moe))


def says(model: Any) -> Run:
    """Log-probabilities of the text by ``model``, and its greedy continuation."""
    text = tiny_llama.tokenizer().encode(tiny_llama.TEXT)
    ids = torch.tensor([text])
    scores = torch.empty(())
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            scores = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[0]
            ids = torch.cat([ids, scores[-1].argmax().view(1, 1)], 1)
    of_text = scores[: len(text) - 1].gather(-1, ids[0, 1 : len(text), None])
    return Run(of_text.flatten().tolist(), ids[0, len(text) :].tolist(), [])


def _of_layer(scales: dict[str, Tensor], experts: str) -> tuple[Tensor, list[Tensor]]:
    """Input scale that a layer's first products share, and the scales of the second products."""
    first, second = [], {}
    for name, scale in scales.items():
        layer, _, rest = name.partition(_EXPERTS)
        number, _, projection = rest.rpartition(".")
        if not rest or layer_number(layer) != layer_number(experts):
            continue
        if projection not in _SECOND:
            first.append(scale.amax())
        elif number:
            second[int(number)] = scale
        else:  # of a stack
            second |= dict(enumerate(scale))
    return torch.stack(first).amax(), [second[number] for number in range(len(second))]


def _experts(
    module: Any,
    first: Tensor,
    second: list[Tensor],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Result of transformers' experts for rounded inputs, computed token by token."""
    flat = hidden_states.flatten(0, -2)
    out = torch.zeros_like(flat)
    rounded = _rounded(first, flat)
    for token, experts in enumerate(top_k_index.tolist()):
        for slot, expert in enumerate(experts):
            gate, up = (module.gate_up_proj[expert] @ rounded[token]).chunk(2)
            hidden = _rounded(second[expert], (silu(gate) * up)[None])[0]
            out[token] += top_k_weights[token, slot] * (module.down_proj[expert] @ hidden)
    return out.view_as(hidden_states)


def _stacked(module: Any, first: Tensor, second: list[Tensor], hidden_states: Tensor) -> Tensor:
    """Result of Llama 4's experts, one after the other on all tokens, with weighted inputs."""
    out = []
    for expert, x in enumerate(hidden_states.chunk(len(second))):
        gate, up = (_rounded(first, x) @ module.gate_up_proj[expert]).chunk(2, -1)
        hidden = _rounded(second[expert], silu(gate) * up)
        out.append(hidden @ module.down_proj[expert])
    return torch.cat(out)


def _rounded(scale: Tensor, x: Tensor) -> Tensor:
    rows = x.flatten(0, -2)
    codes, scales = quantize_activation(rows, scale)
    return Nvfp4Tensor(codes, scales, scale).dequantize().view_as(x)


def layer_number(name: str) -> str:
    """Number of the layer that contains a module."""
    return next(part for part in name.split(".") if part.isdecimal())


def with_experts(model: Any, edit: Callable[[Any], None]) -> Run:
    """Log-probabilities of a model after ``edit`` was applied to each of its modules of experts."""
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            edit(module)
    return says(model)
