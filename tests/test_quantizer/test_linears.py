"""Choice of the linears to quantise, and refusals."""

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from nvfp4_kernels.formats.nvfp4 import GLOBAL_RANGE
from tests.test_quantizer.checkpoints import (
    LINEARS,
    SHAPE,
    change_config,
    change_tensors,
    read_config,
    read_tensors,
    save_checkpoint,
)
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint
from vllm_fp4_plugin.quantizer.errors import QuantizerError


def quantized_in(folder: Path) -> set[str]:
    names = read_tensors(folder)
    return {n.removesuffix(".weight_scale") for n in names if n.endswith(".weight_scale")}


@pytest.mark.parametrize(
    ("ignore", "kept"),
    [
        ([], []),
        (["lm_head"], []),
        (["model.layers.1.mlp.down_proj"], ["model.layers.1.mlp.down_proj"]),
        (["*.o_proj"], ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"]),
        (["model.layers.0"], LINEARS[:7]),
        (["re:.*layers.1.*(gate|up)_proj"], LINEARS[11:13]),
        (["*.0.mlp.*", "*.0.self_attn.*"], LINEARS[:7]),
    ],
    ids=str,
)
def test_ignore(llama: Path, tmp_path: Path, ignore: list[str], kept: list[str]):
    summary = quantize_checkpoint(llama, tmp_path / "dst", ignore=ignore)

    assert quantized_in(tmp_path / "dst") == set(LINEARS) - set(kept)
    assert (summary.quantized, summary.kept) == (len(LINEARS) - len(kept), 1 + len(kept))
    quantization = read_config(tmp_path / "dst")["quantization_config"]
    assert quantization["ignore"] == [*kept, "lm_head"]
    before, after = read_tensors(llama), read_tensors(tmp_path / "dst")
    for name in kept:
        assert torch.equal(after[f"{name}.weight"], before[f"{name}.weight"])


def test_lm_head_on_demand(llama: Path, text: Path, tmp_path: Path):
    """The head's input scale is measured after the decoder's last norm."""
    quantize_checkpoint(llama, tmp_path / "dst", lm_head=True, calibrate=text, seq_len=64)
    assert quantized_in(tmp_path / "dst") == {*LINEARS, "lm_head"}
    assert read_config(tmp_path / "dst")["quantization_config"]["ignore"] == []
    tensors = read_tensors(tmp_path / "dst")
    # No value after an RMSNorm exceeds its gain times the root of the width.
    largest, gain = tensors["lm_head.input_scale"] * GLOBAL_RANGE, tensors["model.norm.weight"]
    assert 1.0 < largest <= gain.float().abs().max() * SHAPE["hidden_size"] ** 0.5


def test_tied_lm_head_cannot_be_quantised(tmp_path: Path):
    src = save_checkpoint(tmp_path / "src", LlamaConfig(**SHAPE, tie_word_embeddings=True))
    with pytest.raises(QuantizerError, match=r"lm_head: is the embedding .* leave out --lm-head"):
        quantize_checkpoint(src, tmp_path / "dst", lm_head=True)


def test_tied_lm_head_is_ignored_though_not_stored(tmp_path: Path):
    src = save_checkpoint(tmp_path / "src", LlamaConfig(**SHAPE, tie_word_embeddings=True))
    assert "lm_head.weight" not in read_tensors(src)
    quantize_checkpoint(src, tmp_path / "dst")

    assert quantized_in(tmp_path / "dst") == set(LINEARS)
    assert read_config(tmp_path / "dst")["quantization_config"]["ignore"] == ["lm_head"]


def test_biases_are_kept(tmp_path: Path):
    src = save_checkpoint(tmp_path / "src", LlamaConfig(**SHAPE, attention_bias=True))
    bias = torch.arange(64).bfloat16()
    change_tensors(src, {"model.layers.0.self_attn.q_proj.bias": bias})
    quantize_checkpoint(src, tmp_path / "dst")

    assert torch.equal(read_tensors(tmp_path / "dst")["model.layers.0.self_attn.q_proj.bias"], bias)


REFUSED = {
    "a pattern that covers nothing": (["q_projj"], r"ignore: 'q_projj' covers no linear"),
    "part of a fused matrix": (
        ["model.layers.1.self_attn.k_proj"],
        r"ignore: covers model\.layers\.1\.self_attn\.k_proj but not .*q_proj, which engines fuse",
    ),
    "no regex": (["re:["], r"ignore: 're:\[' is no regular expression"),
    "everything": (["model"], r"no linear to quantise among 15 of LlamaForCausalLM"),
}


@pytest.mark.parametrize(("ignore", "message"), REFUSED.values(), ids=REFUSED)
def test_ignore_refused(llama: Path, tmp_path: Path, ignore, message):
    with pytest.raises(QuantizerError, match=message):
        quantize_checkpoint(llama, tmp_path / "dst", ignore=ignore)


def test_k_must_hold_whole_blocks_or_be_ignored(tmp_path: Path):
    src = save_checkpoint(tmp_path / "src", LlamaConfig(**SHAPE | {"intermediate_size": 72}))
    with pytest.raises(
        QuantizerError, match=r"^model.*\.down_proj\.weight: K is 72, .* 16; .*--ignore down_proj$"
    ):
        quantize_checkpoint(src, tmp_path / "dst")

    quantize_checkpoint(src, tmp_path / "dst", ignore=["down_proj"])
    assert quantized_in(tmp_path / "dst") == {n for n in LINEARS if "down_proj" not in n}


def test_layers_that_config_does_not_count_are_refused(src: Path, tmp_path: Path):
    change_config(src, num_hidden_layers=1)
    with pytest.raises(
        QuantizerError,
        match=r"^model\.layers\.1\..*: the checkpoint has it, config\.json asks for 1 of model",
    ):
        quantize_checkpoint(src, tmp_path / "dst")


def test_layers_that_predict_further_tokens_are_kept(src: Path, tmp_path: Path):
    change_config(src, num_hidden_layers=1, num_nextn_predict_layers=1)
    quantize_checkpoint(src, tmp_path / "dst")
    assert quantized_in(tmp_path / "dst") == set(LINEARS[:7])


def test_an_architecture_without_linears_is_refused(tmp_path: Path):
    config = GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=320)
    src = save_checkpoint(tmp_path / "src", config)
    with pytest.raises(QuantizerError, match=r"no linear to quantise among 1 of GPT2LMHeadModel"):
        quantize_checkpoint(src, tmp_path / "dst")


def test_an_unknown_architecture_is_refused(src: Path, tmp_path: Path):
    change_config(src, model_type="perpetuum", architectures=["PerpetuumForCausalLM"])
    with pytest.raises(QuantizerError, match=r"transformers cannot build the model .*perpetuum"):
        quantize_checkpoint(src, tmp_path / "dst")


def test_a_checkpoint_that_does_not_fit_its_config_is_refused(src: Path, tmp_path: Path):
    change_config(src, intermediate_size=128)
    with pytest.raises(
        QuantizerError, match=r"gate_proj\.weight: shape is \(96, 64\), config\.json .* \(128, 64\)"
    ):
        quantize_checkpoint(src, tmp_path / "dst")
    change_config(src, intermediate_size=96, num_hidden_layers=3)
    with pytest.raises(
        QuantizerError, match=r"layers\.2\.self_attn\.q_proj\.weight: the model has it, the check"
    ):
        quantize_checkpoint(src, tmp_path / "dst")
