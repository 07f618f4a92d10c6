"""Tiny random checkpoints, and helpers that read quantised checkpoints."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}
LINEARS = [
    f"model.layers.{layer}.{part}"
    for layer in range(2)
    for part in (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    )
]


def save_checkpoint(
    folder: Path,
    config: Any = None,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: str = "1GB",
) -> Path:
    """Save a random model with a byte-level tokenizer that starts every text with BOS."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config or LlamaConfig(**SHAPE), dtype=dtype)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter *= 1 + number % 5  # no two shards of a fused matrix share their maximum
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """Save a byte-level tokenizer that starts every text with BOS."""
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary | {"<s>": 256}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for shard in folder.glob("*.safetensors") for n, t in load_file(shard).items()}


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def change_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(read_config(folder) | changes))


def change_tensors(folder: Path, changes: dict[str, torch.Tensor]) -> None:
    """Replace or add tensors in a single-file checkpoint."""
    save_file(load_file(folder / "model.safetensors") | changes, folder / "model.safetensors")
