"""Checkpoints of random NVFP4 weights in a built-in shape.

vLLM's dummy weights would send all tokens to the same few experts, and leave the codes
uninitialised and the block scales rounded to zero. A GPU that multiplies zeros draws less power and
keeps a higher clock.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE
from vllm_fp4_plugin.formats.format import Format

_CODE_RMS = 2.93  # RMS of E2M1 values with random bits
_SCALES = (0.5, 1.0)  # range of the random block scales


def write_checkpoint(folder: Path, config: dict[str, Any], format: Format) -> Path:
    """Write a W4A4 checkpoint unless it exists; returns ``folder``.

    All layers hold the same random weights, which preserve the magnitude of the activations.

    Args:
        folder: folder to make, in an existing parent.
        config: config of a Llama or, in ModelOpt's format only, of a mixture of experts.
        format: format of the files.
    """
    if (folder / "config.json").exists():
        return folder
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    layer = dict(_layer(config, format, generator))
    count = config["num_hidden_layers"]
    for number in range(count):
        tensors = {f"model.layers.{number}.{name}": tensor for name, tensor in layer.items()}
        save_file(tensors, folder / f"model-{number + 1:05}-of-{count + 1:05}.safetensors")
    table = (config["vocab_size"], config["hidden_size"])
    ends = {
        "model.embed_tokens.weight": _normal(table, 1.0, generator),
        "lm_head.weight": _normal(table, config["hidden_size"] ** -0.5, generator),
        "model.norm.weight": torch.ones(config["hidden_size"], dtype=torch.bfloat16),
    }
    save_file(ends, folder / f"model-{count + 1:05}-of-{count + 1:05}.safetensors")
    kept = ["lm_head", *(["model.layers.*.mlp.gate"] if "num_experts" in config else [])]
    quantization = format.config(kept, weight_only=False, fp8_kv=False)
    text = json.dumps(config | {"quantization_config": quantization}, indent=2)
    (folder / "config.json").write_text(text + "\n")
    return folder


def _layer(
    config: dict[str, Any], format: Format, generator: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    linears = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
    }
    experts = config.get("num_experts", 0)
    inner = config["moe_intermediate_size" if experts else "intermediate_size"]
    for mlp in [f"mlp.experts.{expert}" for expert in range(experts)] or ["mlp"]:
        linears |= {
            f"{mlp}.gate_proj": (inner, hidden),
            f"{mlp}.up_proj": (inner, hidden),
            f"{mlp}.down_proj": (hidden, inner),
        }
    for name, (n, k) in linears.items():
        for part, tensor in _nvfp4(n, k, format, generator).items():
            yield f"{name}.{part}", tensor
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if experts:
        yield "mlp.gate.weight", _normal((experts, hidden), hidden**-0.5, generator)
        norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head}  # as in Qwen 3
    for norm, width in norms.items():
        yield f"{norm}.weight", torch.ones(width, dtype=torch.bfloat16)


def _nvfp4(n: int, k: int, format: Format, generator: torch.Generator) -> dict[str, Tensor]:
    """Tensors, by name, of an ``(n, k)`` NVFP4 matrix; the values' RMS is about ``k ** -0.5``."""
    low, high = _SCALES
    scales = torch.empty(n, k // BLOCK_SIZE).uniform_(low, high, generator=generator)
    factors = 1 / (_CODE_RMS * math.sqrt(k) * (low + high) / 2), 2.0**-9
    weight_global, input_global = (
        torch.full(format.scalar, 1 / each if format.reciprocal else each) for each in factors
    )
    names = format.names
    return {
        names.weight: torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator),
        names.block_scale: scales.to(torch.float8_e4m3fn),
        names.weight_global: weight_global,
        names.input_global: input_global,
    }


def _normal(shape: tuple[int, int], deviation: float, generator: torch.Generator) -> Tensor:
    return (torch.randn(shape, generator=generator) * deviation).bfloat16()
