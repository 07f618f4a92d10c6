"""Parts of Qwen3.8-Flash-Next outside its text model: an FP8 n-gram table, the MTP's experts."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.mixed_checkpoints import quantize
from vllm_fp4_plugin.formats.kind import Kind

_TABLE = ".ngram_embedding.shard_"
_MTP = "mtp.layers.0.mlp.experts"
_EXPERTS, _HIDDEN, _INNER = 4, 128, 64


def surround(directory: Path) -> None:
    """Store the n-gram table's shards in FP8 with one shared scale, and add the MTP's experts."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if _TABLE in name]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name.partition(_TABLE)[0]}.ngram_embedding.weight_scale"] = torch.tensor(1.0)
    shapes = {"gate": (_INNER, _HIDDEN), "up": (_INNER, _HIDDEN), "down": (_HIDDEN, _INNER)}
    for expert in range(_EXPERTS):
        for projection, shape in shapes.items():
            parts = quantize(Kind.FP8_BLOCK, torch.randn(shape), modelopt=False).tensors
            module = f"{_MTP}.{expert}.{projection}_proj"
            tensors[f"{module}.weight"] = parts["weight"]
            tensors[f"{module}.weight_scale_inv"] = parts["weight_scale"].bfloat16()
    save_file(tensors, file, metadata={"format": "pt"})
    file = directory / "config.json"
    config = json.loads(file.read_text())
    quantization = config["quantization_config"]
    quantization["quant_algo"] = "MIXED_PRECISION"
    nvfp4 = {"quant_algo": "NVFP4", "group_size": 16}
    layers = config["text_config"]["num_hidden_layers"]
    listed = {f"model.language_model.layers.{i}.mlp.experts": nvfp4 for i in range(layers)}
    listed[_MTP] = {"quant_algo": "FP8_BLOCK_SCALES", "group_size": 128}
    quantization["quantized_layers"] = listed
    file.write_text(json.dumps(config, indent=2))
