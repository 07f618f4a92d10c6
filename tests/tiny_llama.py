"""Tiny random Llama checkpoint with a byte tokenizer, for engine and tool tests."""

import argparse
import ast
import hashlib
import inspect
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = "def main() -> None:\n    for name in sorted(os.environ):\n        print(name)\n"


def config(**changes: Any) -> LlamaConfig:
    """Config with two layers, grouped-query attention, and widths divisible by 32 on two ranks."""
    settings: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 352,  # neither it nor its half is a multiple of 128 rows
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 320,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**(settings | changes))


def model(**changes: Any) -> LlamaForCausalLM:
    """Llama with random, amplified bfloat16 weights."""
    torch.manual_seed(0)
    llama = LlamaForCausalLM(config(**changes)).to(torch.bfloat16)
    amplify(llama)
    return llama


def amplify(random: torch.nn.Module) -> None:
    """Scale a fresh model so that every layer counts and the shards differ in gain."""
    gains = {"k_proj": 4.0, "up_proj": 8.0, "gate_proj": 2.0, "lm_head": 12.0, "embed": 8.0}
    for name, parameter in random.named_parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(next((g for key, g in gains.items() if key in name), 2.0))


def save(directory: Path, **changes: Any) -> Path:
    """Write the checkpoint with its tokenizer; returns ``directory``."""
    model(**changes).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte tokenizer: one token per byte and three special tokens."""
    alphabet = ["<s>", "</s>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytes_only = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def trained(directory: Path, **changes: Any) -> Path:
    """Checkpoint trained for some seconds on bytes of Python source, made once.

    A random network amplifies every rounding error; a trained network, like the served ones, damps
    them, so that a comparison of log-probabilities tells a defect from rounding.
    """

    def write(unfinished: Path) -> None:
        torch.manual_seed(0)
        llama = LlamaForCausalLM(config(**changes))
        learn(llama, training_text(), steps=200, batch=16, rate=4e-3)
        llama.bfloat16().save_pretrained(unfinished)
        tokenizer().save_pretrained(unfinished)

    return made_once(directory, write)


def made_once(directory: Path, write: Callable[[Path], object]) -> Path:
    """Directory that ``write`` makes, under a temporary name, if it is missing.

    A lock makes this safe for several processes.
    """
    with FileLock(f"{directory}.lock"):
        if not directory.exists():
            unfinished = directory.with_name(f"{directory.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was ended
            write(unfinished)
            unfinished.rename(directory)
    return directory


def version() -> str:
    """Hash of everything that determines the trained checkpoint: this module, the training text."""
    recipe = inspect.getsource(sys.modules[__name__]) + training_text()
    return hashlib.sha256(recipe.encode()).hexdigest()[:12]


def training_text() -> str:
    """Text of some modules of the standard library."""
    return "".join(inspect.getsource(module) for module in (argparse, inspect, ast))


def learn(model: Any, text: str, steps: int, batch: int, rate: float) -> None:
    """Train a transformers model on windows of a text, on one thread.

    Args:
        model: model to train in place.
        text: training text.
        steps: optimizer steps.
        batch: windows of 64 bytes in each step.
        rate: peak learning rate.
    """
    tokens = torch.tensor(tokenizer().encode(text))
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads wait for each other on a busy machine
    for _ in range(steps):
        starts = torch.randint(len(tokens) - 65, (batch, 1), generator=generator)
        windows = tokens[starts + torch.arange(64)]
        model(input_ids=windows, labels=windows, use_cache=False).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
