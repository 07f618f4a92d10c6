"""Every fault of the input is named, and no output is left behind."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.test_quantizer.checkpoints import change_config, change_tensors, read_tensors
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint
from vllm_fp4_plugin.quantizer.errors import QuantizerError

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
SHARD = "model-00002-of-00005.safetensors"


def remove(name: str) -> Callable[[Path], None]:
    return lambda src: (src / name).unlink()


def truncate(name: str, nbytes: int) -> Callable[[Path], None]:
    return lambda src: os.truncate(src / name, nbytes)


def set_weight(value: float) -> Callable[[Path], None]:
    def change(src: Path) -> None:
        weight = read_tensors(src)[Q_PROJ]
        weight[-1, -1] = value
        change_tensors(src, {Q_PROJ: weight})

    return change


def set_dtype(dtype: torch.dtype) -> Callable[[Path], None]:
    return lambda src: change_tensors(src, {Q_PROJ: torch.ones(64, 64).to(dtype)})


ONE_FILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (remove("config.json"), r"src: .*src has no config\.json; give a Hugging Face"),
    "config is not JSON": (
        lambda src: (src / "config.json").write_text("{"),
        r"src: config\.json is not valid JSON",
    ),
    "config is a list": (
        lambda src: (src / "config.json").write_text("[]"),
        r"src: config\.json holds list, must hold a JSON object; give a Hugging Face",
    ),
    "config is null": (
        lambda src: (src / "config.json").write_text("null"),
        r"src: config\.json holds NoneType, must hold a JSON object",
    ),
    "longest sequence is no number": (
        lambda src: change_config(src, max_position_embeddings="abc"),
        r"src: max_position_embeddings is 'abc', must be a positive number; mend config\.json",
    ),
    "longest sequence is negative": (
        lambda src: change_config(src, max_position_embeddings=-1),
        r"src: max_position_embeddings is -1, must be a positive number",
    ),
    "config of wrong types": (
        lambda src: change_config(src, hidden_size="wide"),
        r"transformers cannot build the model",
    ),
    "no safetensors": (remove("model.safetensors"), r"src: .*src holds no safetensors"),
    "truncated": (
        truncate("model.safetensors", 50_000),
        r"src: .*model\.safetensors: is truncated or no safetensors file",
    ),
    "empty file": (truncate("model.safetensors", 0), r"model\.safetensors: is truncated"),
    "NaN": (set_weight(float("nan")), rf"^{Q_PROJ}: holds NaN or infinity, must be finite"),
    "infinity": (set_weight(float("-inf")), rf"^{Q_PROJ}: holds NaN or infinity"),
    "int8": (set_dtype(torch.int8), rf"^{Q_PROJ}: dtype is I8, must be BF16, F16, F32"),
    "fp8": (set_dtype(torch.float8_e4m3fn), rf"^{Q_PROJ}: dtype is F8_E4M3, must be BF16"),
    "exotic": (set_dtype(torch.complex64), rf"^{Q_PROJ}: dtype is C64, must be one of F64"),
    "quantised": (
        lambda src: change_config(src, quantization_config={"quant_method": "fp8"}),
        r"src: .*src is quantised already; give the 16-bit checkpoint",
    ),
    "quantised text part": (
        lambda src: change_config(src, text_config={"quantization_config": {}}),
        r"src is quantised already",
    ),
    "quantised by an older ModelOpt": (
        lambda src: (src / "hf_quant_config.json").write_text("{}"),
        r"src is quantised already",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), ONE_FILE.values(), ids=ONE_FILE)
def test_source(src: Path, tmp_path: Path, spoil, message):
    spoil(src)
    with pytest.raises(QuantizerError, match=message):
        quantize_checkpoint(src, tmp_path / "dst")
    assert os.listdir(tmp_path) == ["src"]


SHARDED = {
    "missing shard": (
        remove(SHARD),
        rf"src: .*{SHARD}: is missing, but model\.safetensors\.index\.json names it",
    ),
    "truncated shard": (truncate(SHARD, 30_000), rf"src: .*{SHARD}: is truncated"),
    "index is not JSON": (
        truncate("model.safetensors.index.json", 9),
        r"index\.json: is no JSON",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), SHARDED.values(), ids=SHARDED)
def test_sharded_source(sharded_src: Path, tmp_path: Path, spoil, message):
    spoil(sharded_src)
    with pytest.raises(QuantizerError, match=message):
        quantize_checkpoint(sharded_src, tmp_path / "dst")
    assert os.listdir(tmp_path) == ["src"]


def test_missing_source(tmp_path: Path):
    with pytest.raises(QuantizerError, match=r"src: .*absent: is no directory, must be that of"):
        quantize_checkpoint(tmp_path / "absent", tmp_path / "dst")


OPTIONS = {
    "format": ({"format": "gguf"}, r"format: is 'gguf', must be one of modelopt, compressed"),
    "scales": ({"scales": "best"}, r"scales: is 'best', must be one of absmax, sweep, four"),
    "kv scheme": (
        {"kv_cache_scheme": "int8", "calibrate": "text"},
        r"kv_cache_scheme: is 'int8', must be one of fp8",
    ),
    "kv scheme alone": ({"kv_cache_scheme": "fp8"}, r"kv_cache_scheme: .*; give --calibrate"),
    "seq_len": ({"seq_len": 1, "calibrate": "text"}, r"seq_len: is 1, must be at least 2"),
    "seq_len alone": ({"seq_len": 64}, r"seq_len: is 64, but without a text nothing is measured"),
    "tokens alone": ({"calibration_tokens": 512}, r"calibration_tokens: is 512, but without a te"),
    "too few tokens": (
        {"calibration_tokens": 100, "calibrate": "text"},
        r"calibration_tokens: is 100, must be at least seq_len, 256",
    ),
}


@pytest.mark.parametrize(("options", "message"), OPTIONS.values(), ids=OPTIONS)
def test_options(llama: Path, tmp_path: Path, options, message):
    with pytest.raises(QuantizerError, match=message):
        quantize_checkpoint(llama, tmp_path / "dst", **options)
    assert os.listdir(tmp_path) == []


DESTINATIONS = {
    "exists": ("taken", r"dst: .*taken exists; choose another folder or remove it"),
    "is a broken link": ("broken", r"dst: .*broken exists"),
    "is the source": ("src", r"dst: .*src and .*src lie within each other; choose another"),
    "lies in the source": ("src/dst", r"lie within each other"),
    "holds the source": (".", r"lie within each other"),
    "lies in a file": ("taken/b/dst", r"dst: .*dst cannot be made, as .*taken is no folder; ch"),
    "lies in a broken link": ("broken/dst", r"dst: .*dst cannot be made, as .*broken is no fol"),
}


@pytest.mark.parametrize(("dst", "message"), DESTINATIONS.values(), ids=DESTINATIONS)
def test_destination(src: Path, tmp_path: Path, dst: str, message: str):
    (tmp_path / "taken").write_text("precious")
    (tmp_path / "broken").symlink_to("nowhere")
    with pytest.raises(QuantizerError, match=message):
        quantize_checkpoint(src, tmp_path / dst)
    assert sorted(os.listdir(tmp_path)) == ["broken", "src", "taken"]
    assert (tmp_path / "taken").read_text() == "precious"


TEXTS: dict[str, tuple[str, bytes | None, str]] = {
    "missing": ("t.txt", None, r"calibrate: .*t\.txt is not a file; give a text or \.jsonl"),
    "empty": ("t.txt", b"", r"calibrate: .*t\.txt has 0 tokens, one sequence takes 63; give more"),
    "too short": ("t.txt", b"x" * 62, r"has 62 tokens, one sequence takes 63"),
    "binary": ("t.txt", b"\0" * 100_000, r"calibrate: .*t\.txt holds NUL characters, must be text"),
    "not UTF-8": ("t.txt", b"abc\xff" * 100, r"calibrate: .*t\.txt is not UTF-8"),
    "not JSON": ("t.jsonl", b'{"text": "a"}\nhello\n', r"line 2 of .* is not an object with a"),
    "no text": ("t.jsonl", b'{"texts": "a"}\n', r"line 1 of .* is not an object with a string"),
    "text is no string": ("t.jsonl", b'{"text": 1}\n', r"line 1 of .* is not an object"),
}


@pytest.mark.parametrize(("name", "content", "message"), TEXTS.values(), ids=TEXTS)
def test_text(llama: Path, tmp_path: Path, name, content, message):
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(QuantizerError, match=message):
        quantize_checkpoint(llama, tmp_path / "dst", calibrate=file, seq_len=64)
    assert not (tmp_path / "dst").exists()


def test_source_without_tokenizer(src: Path, text: Path, tmp_path: Path):
    for file in src.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(QuantizerError, match=r"(?s)src holds no tokenizer .* leave out --calib"):
        quantize_checkpoint(src, tmp_path / "dst", calibrate=text)


def test_tokenizer_of_another_model(src: Path, text: Path, tmp_path: Path):
    embedding = torch.ones(200, 64).bfloat16()
    names = ("model.embed_tokens.weight", "lm_head.weight")
    change_tensors(src, dict.fromkeys(names, embedding) | {names[1]: embedding.clone()})
    change_config(src, vocab_size=200)
    with pytest.raises(QuantizerError, match=r"its tokenizer gives token 256, its model knows 200"):
        quantize_checkpoint(src, tmp_path / "dst", calibrate=text)


def test_sequences_longer_than_the_model_takes(llama: Path, text: Path, tmp_path: Path):
    with pytest.raises(QuantizerError, match=r"seq_len: is 512, the model takes at most 256"):
        quantize_checkpoint(llama, tmp_path / "dst", calibrate=text, seq_len=512)


def test_the_error_of_weights_whose_squares_float32_has_not_is_a_number(src: Path, tmp_path: Path):
    weight = read_tensors(src)[Q_PROJ].float()
    change_tensors(src, {Q_PROJ: (weight * (1e21 / weight.abs().amax())).bfloat16()})
    summary = quantize_checkpoint(src, tmp_path / "dst")
    assert 0 < summary.relative_mse_by_type["q_proj"] < 1
