"""Train a Llama, or a mixture of experts, on one device within a budget of seconds."""

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW, Muon, Optimizer
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

MAX_POSITIONS = 1024

DecoderModel: TypeAlias = LlamaForCausalLM | Qwen3MoeForCausalLM


@dataclass(frozen=True)
class TrainSettings:
    """All settings of a training run, except its text.

    Attributes:
        seconds: wall-clock budget; the learning-rate schedule spans the budget, so that every run
            ends with the cooldown.
        steps: number of optimizer steps, instead of a time budget: makes the result reproducible.
        threads: CPU threads.
        device: training device, ``cpu`` or ``cuda``.
        compile: whether to compile the decoder layer, before the budget begins.
        seed: seed of the weights and of the order of the text.
        hidden, intermediate, layers, heads, kv_heads, head_dim: the model's sizes.
        experts: number of experts of a layer, shaped like Qwen3-MoE's; 0 for a Llama.
        experts_per_token: top-k of the router; divides ``intermediate`` for an expert's size.
        batch, sequence: sequences per step, tokens per sequence.
        matrix_rate: peak learning rate of Muon, for the layers' matrices.
        other_rate: peak learning rate of AdamW, for embeddings and norms.
        expert_rate: peak learning rate of AdamW, for experts and routers.
        momentum: momentum of Muon.
        warmup, cooldown: shares of the run in which the rates rise to their peaks and fall to 0.
    """

    seconds: float = 150
    steps: int | None = None
    threads: int = 2
    device: str = "cpu"
    compile: bool = False
    seed: int = 0
    hidden: int = 256
    intermediate: int = 768
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 0
    experts_per_token: int = 2
    batch: int = 8
    sequence: int = 256
    matrix_rate: float = 0.02
    other_rate: float = 0.02
    expert_rate: float = 0.004
    momentum: float = 0.9
    warmup: float = 0.02
    cooldown: float = 0.7


@dataclass(frozen=True)
class Progress:
    """Progress of a run: ``done`` from 0 to 1, steps and tokens so far, smoothed loss in nats."""

    done: float
    steps: int
    tokens: int
    loss: float
    tokens_per_second: float


def train(
    settings: TrainSettings,
    tokens: np.ndarray,
    tokenizer: PreTrainedTokenizerFast,
    on_step: Callable[[Progress], None] = lambda progress: None,
) -> tuple[DecoderModel, Progress]:
    """Train from scratch.

    Args:
        settings: sizes, budget and rates.
        tokens: the text as one stream of ids, ``(tokens,)``.
        tokenizer: tokenizer of the ids.
        on_step: called after every step.

    Returns:
        The model on ``settings.device``, parameters in float32, and the last progress.

    Raises:
        ValueError: the text is too short for a batch.
    """
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    model = build_model(settings, tokenizer).to(settings.device)
    optimizers = _optimizers(model, settings)
    schedule = [(group, group["lr"]) for o in optimizers for group in o.param_groups]
    batches = _batches(tokens, settings)
    if settings.compile:
        _compile_layers(model, next(_batches(tokens, settings)))
    smoothed = torch.zeros((), device=settings.device)
    start, steps = time.monotonic(), 0
    while True:
        passed = time.monotonic() - start
        done = steps / settings.steps if settings.steps else passed / settings.seconds
        if steps:
            seen = steps * settings.batch * settings.sequence
            debiased = float(smoothed) / (1 - 0.95**steps)
            progress = Progress(min(done, 1.0), steps, seen, debiased, seen / passed)
            on_step(progress)
            if done >= 1:
                return model, progress
        for group, peak in schedule:
            group["lr"] = peak * learning_rate_share(done, settings.warmup, settings.cooldown)
        smoothed = 0.95 * smoothed + 0.05 * _step(model, next(batches), optimizers)
        steps += 1


def keep_freed_memory() -> None:
    """Tell glibc, for this whole process, to reuse large blocks.

    Mapping the blocks anew in every step costs a third of the training speed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_mmap_max = -1, -4
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)


def build_model(settings: TrainSettings, tokenizer: PreTrainedTokenizerFast) -> DecoderModel:
    """A model with fresh weights and tied embeddings: a Llama, or a mixture of experts."""
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": settings.hidden,
        "intermediate_size": settings.intermediate,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads,
        "head_dim": settings.head_dim,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if not settings.experts:
        return LlamaForCausalLM(LlamaConfig(**common))
    config = Qwen3MoeConfig(
        **common,
        num_experts=settings.experts,
        num_experts_per_tok=settings.experts_per_token,
        moe_intermediate_size=settings.intermediate // settings.experts_per_token,
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,
    )
    return Qwen3MoeForCausalLM(config)


def learning_rate_share(done: float, warmup: float, cooldown: float) -> float:
    """Fraction of the peak learning rate after ``done`` (0 to 1) of the run."""
    return max(0.0, min(1.0, (done + 1e-3) / warmup, (1 - done) / cooldown))


def _compile_layers(model: DecoderModel, batch: Tensor) -> None:
    """Compile the decoder layers, which share the compiled code, by a pass over ``batch``."""
    for layer in model.model.layers:
        layer.compile()
    _loss(model, batch).backward()
    model.zero_grad()


def _loss(model: DecoderModel, batch: Tensor) -> Tensor:
    with torch.autocast(batch.device.type, torch.bfloat16):
        if isinstance(model, LlamaForCausalLM):
            balance: Tensor | float = 0.0
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        else:
            out = model(input_ids=batch[:, :-1], use_cache=False, output_router_logits=True)
            # Without this loss a few experts take all tokens.
            balance, logits = model.router_aux_loss_coef * out.aux_loss, out.logits
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()) + balance


def _step(model: DecoderModel, batch: Tensor, optimizers: list[Optimizer]) -> Tensor:
    loss = _loss(model, batch)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def _optimizers(model: DecoderModel, settings: TrainSettings) -> list[Optimizer]:
    layers = dict(model.model.layers.named_parameters())
    # Muon takes matrices; experts are stacks of matrices.
    routed = [p for name, p in layers.items() if settings.experts and ".mlp." in name]
    matrices = [p for p in layers.values() if p.ndim == 2 and not _holds(routed, p)]
    others = [p for p in model.parameters() if not _holds([*matrices, *routed], p)]
    adam: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.0, "fused": True}
    optimizers: list[Optimizer] = [
        Muon(matrices, lr=settings.matrix_rate, weight_decay=0.0, momentum=settings.momentum),
        AdamW(others, lr=settings.other_rate, **adam),
    ]
    return [*optimizers, *([AdamW(routed, lr=settings.expert_rate, **adam)] if routed else [])]


def _holds(parameters: Sequence[Tensor], parameter: Tensor) -> bool:
    return any(parameter is each for each in parameters)


def _batches(tokens: np.ndarray, settings: TrainSettings) -> Iterator[Tensor]:
    """Batches of windows of the text, int64 ``(batch, sequence + 1)``, without end.

    Every epoch cuts the text into windows at another offset and shuffles the windows.
    """
    window = settings.sequence + 1
    if len(tokens) < window * (settings.batch + 1):
        raise ValueError(
            f"tokens: are {len(tokens)}, must be at least {window * (settings.batch + 1)}; "
            "give more text or a smaller batch"
        )
    stream = torch.from_numpy(tokens.astype(np.int64)).to(settings.device)
    draws = np.random.default_rng(settings.seed)
    while True:
        starts = np.arange(draws.integers(window), len(tokens) - window + 1, window)
        draws.shuffle(starts)
        for first in range(0, len(starts) - settings.batch + 1, settings.batch):
            chosen = starts[first : first + settings.batch]
            yield torch.stack([stream[start : start + window] for start in chosen])
