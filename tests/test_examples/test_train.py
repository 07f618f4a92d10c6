"""Training: reproducible by steps, bounded by time, shapes that NVFP4 and TP=2 accept."""

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from examples.demo.export import save_checkpoint
from examples.demo.tokenizer import train_tokenizer
from examples.demo.train import (
    TrainSettings,
    _optimizers,
    build_model,
    learning_rate_share,
    train,
)
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

TINY = TrainSettings(
    steps=3,
    threads=1,
    hidden=32,
    intermediate=64,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=16,
    batch=2,
    sequence=16,
)
TINY_MOE = replace(TINY, experts=4)
TOKENS = np.random.default_rng(0).integers(256, size=2000).astype(np.uint16)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["some text to learn from\n"], vocabulary=270)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


BOTH = pytest.mark.parametrize("settings", [TINY, TINY_MOE], ids=["dense", "experts"])


@BOTH
def test_same_steps_and_seed_give_the_same_model(settings, tokenizer):
    first, progress = train(settings, TOKENS, tokenizer)
    second, _ = train(settings, TOKENS, tokenizer)
    other, _ = train(replace(settings, seed=1), TOKENS, tokenizer)
    assert torch.equal(weights(first), weights(second))
    assert not torch.equal(weights(first), weights(other))
    assert (progress.steps, progress.tokens, progress.done) == (3, 3 * 2 * 16, 1.0)


@BOTH
def test_training_learns(settings, tokenizer):
    pattern = np.tile(np.arange(10, 20, dtype=np.uint16), 200)
    seen = []
    train(replace(settings, steps=30), pattern, tokenizer, lambda step: seen.append(step.loss))
    assert seen[0] > 5  # log(270) is 5.6
    assert seen[-1] < 4.5


def test_time_budget_is_kept(tokenizer, monkeypatch):
    """The clock advances a quarter of a second per reading: at the start, then at every step."""
    clock = SimpleNamespace(monotonic=count(0, 0.25).__next__)
    monkeypatch.setattr("examples.demo.train.time", clock)
    done = []
    timed = replace(TINY, steps=None, seconds=1)
    train(timed, TOKENS, tokenizer, lambda progress: done.append(progress.done))
    assert done == [0.5, 0.75, 1.0]


def test_learning_rate_rises_then_falls_to_zero():
    shares = np.array([learning_rate_share(i / 100, 0.1, 0.4) for i in range(111)])
    assert 0 < shares[0] < 0.1
    assert (np.diff(shares[:10]) > 0).all()
    assert (shares[10:61] == 1).all()
    assert (np.diff(shares[61:101]) < 0).all()
    assert (shares[100:] == 0).all()


def test_text_shorter_than_a_batch_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"tokens: are 50, must be at least 51"):
        train(TINY, TOKENS[:50], tokenizer)


def test_every_linear_splits_into_nvfp4_blocks_on_two_ranks(tokenizer):
    with torch.device("meta"):
        model = build_model(TrainSettings(), tokenizer)
    for name, module in model.model.layers.named_modules():
        if isinstance(module, torch.nn.Linear):
            ranks = 2 if name.endswith(("o_proj", "down_proj")) else 1
            assert module.in_features % (32 * ranks) == 0, name
    vocabulary = 10_240 - len(tokenizer)  # rows missing from this short tokenizer
    parameters = model.num_parameters() + vocabulary * TrainSettings().hidden
    assert 5e6 <= parameters <= 10e6


@BOTH
def test_checkpoint_is_bf16_tied_and_knows_its_end(settings, tokenizer, tmp_path):
    model, _ = train(replace(settings, steps=1), TOKENS, tokenizer)
    save_checkpoint(model, tokenizer, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    torch.testing.assert_close(weights(loaded), weights(model), rtol=0, atol=0)
    generation = GenerationConfig.from_pretrained(tmp_path)
    assert generation.eos_token_id == tokenizer.eos_token_id == loaded.config.eos_token_id
    assert generation.bos_token_id == tokenizer.bos_token_id


def test_every_part_of_a_mixture_is_trained(tokenizer):
    """Experts, routers, attention, norms and the embedding are trained, each by one optimizer."""
    torch.manual_seed(TINY_MOE.seed)
    before = dict(build_model(TINY_MOE, tokenizer).named_parameters())
    after, _ = train(TINY_MOE, TOKENS, tokenizer)
    changed = {n for n, p in after.named_parameters() if not torch.equal(p, before[n])}
    assert changed == before.keys()
    held = [p for o in _optimizers(after, TINY_MOE) for g in o.param_groups for p in g["params"]]
    assert len(held) == len({id(p) for p in held}) == len(before)


def test_experts_of_a_mixture_share_the_work_of_a_dense_layer(tokenizer):
    with torch.device("meta"):
        model = build_model(TrainSettings(experts=8), tokenizer)
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.shape == (8, 768, 256)  # two of them are one of 768
    assert model.config.num_experts_per_tok == 2


def test_the_tool_quantises_a_mixture(tokenizer, tmp_path):
    model, _ = train(replace(TINY_MOE, steps=1), TOKENS, tokenizer)
    save_checkpoint(model, tokenizer, tmp_path / "bf16")
    summary = quantize_checkpoint(tmp_path / "bf16", tmp_path / "nvfp4")
    assert summary.quantized == 4 + 4 * 3  # attention, experts
    assert set(summary.relative_mse_by_type) >= {"q_proj", "experts.down_proj"}
