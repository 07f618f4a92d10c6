"""Input and cache scales equal the ranges of a plain, completely loaded model."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    LlamaConfig,
    Qwen3Config,
)

from tests import tiny_llama
from tests.test_quantizer.checkpoints import (
    LINEARS,
    SHAPE,
    change_tensors,
    read_config,
    read_tensors,
    save_checkpoint,
)
from vllm_fp4_plugin.quantizer import calibration, calibration_text
from vllm_fp4_plugin.quantizer.calibration_text import read_sequences
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint
from vllm_fp4_plugin.quantizer.errors import QuantizerError

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Each model computes something at construction that is not in its checkpoint.
MODELS: dict[str, Any] = {
    "Llama, scaled rotary embedding": LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "Qwen3, normalised keys": Qwen3Config(**SHAPE),
    "Gemma2, scaled embedding, tied, sliding window": Gemma2Config(**SHAPE, sliding_window=16),
}


def expected_sequences(text: Path, seq_len: int, tokens: int) -> Tensor:
    """Rows of BOS and ``seq_len - 1`` bytes: the tokenizer's ids are the sorted byte alphabet."""
    from tokenizers import pre_tokenizers

    order = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = [order.index("Ġ" if c == " " else c) for c in text.read_text()]
    rows = range(min(tokens // seq_len, len(ids) // (seq_len - 1)))
    return torch.tensor([[256, *ids[i * (seq_len - 1) : (i + 1) * (seq_len - 1)]] for i in rows])


@torch.no_grad()
def direct_ranges(src: Path, batches: list[Tensor]) -> dict[str, Tensor]:
    """Ranges in a loaded model: max|input| of each linear, max|key|, max|value| of each layer."""
    model = AutoModelForCausalLM.from_pretrained(src, dtype=torch.bfloat16).eval()
    found: dict[str, list[Tensor]] = {}
    for name in LINEARS:
        model.get_submodule(name).register_forward_pre_hook(
            lambda m, args, name=name: found.setdefault(name, []).append(args[0].abs().max())
        )
    for batch in batches:
        cache = DynamicCache()
        model(batch, past_key_values=cache, use_cache=True)
        for layer, (key, value, _) in enumerate(cache):
            attention = f"model.layers.{layer}.self_attn"
            found.setdefault(f"{attention}.k", []).append(key.abs().max())
            found.setdefault(f"{attention}.v", []).append(value.abs().max())
    return {name: torch.stack(values).max().float() for name, values in found.items()}


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
def test_scales_equal_a_plain_model_s(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, config: Any, format: str
):
    monkeypatch.setattr(calibration, "_BATCH_TOKENS", 4 * 32)
    src = save_checkpoint(tmp_path / "src", config)
    summary = quantize_checkpoint(
        src,
        tmp_path / "dst",
        format=format,
        calibrate=text,
        calibration_tokens=10 * 32 + 5,
        seq_len=32,
        kv_cache_scheme="fp8",
    )

    assert summary.calibration_tokens == 10 * 32
    sequences = expected_sequences(text, seq_len=32, tokens=10 * 32)
    amax = direct_ranges(src, list(sequences.split(4)))
    after = read_tensors(tmp_path / "dst")
    for name in LINEARS:
        if format == "modelopt":
            stored, expected = after[f"{name}.input_scale"], amax[name] / 2688
        else:
            stored, expected = after[f"{name}.input_global_scale"], (2688 / amax[name])[None]
        assert stored.dtype == torch.float32
        assert torch.equal(stored, expected)
    for layer in (0, 1):
        attention = f"model.layers.{layer}.self_attn"
        for part in "kv":
            expected = amax[f"{attention}.{part}"] / 448
            if format == "modelopt":
                stored = after[f"{attention}.{part}_proj.{part}_scale"]
            else:
                stored, expected = after[f"{attention}.{part}_scale"], expected[None]
            assert torch.equal(stored, expected)
    assert read_config(tmp_path / "dst")["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8


def test_fused_linears_share_their_input_scale(llama: Path, text: Path, tmp_path: Path):
    quantize_checkpoint(llama, tmp_path / "dst", calibrate=text, seq_len=64)

    after = read_tensors(tmp_path / "dst")
    for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                  ("mlp.gate_proj", "mlp.up_proj")):  # fmt: skip
        scales = [after[f"model.layers.1.{part}.input_scale"].item() for part in group]
        assert len(set(scales)) == 1
    assert not any(name.endswith(("k_scale", "v_scale")) for name in after)
    assert "kv_cache_scheme" not in read_config(tmp_path / "dst")["quantization_config"]


def test_ignored_linears_get_no_input_scale(llama: Path, text: Path, tmp_path: Path):
    options: dict[str, Any] = {"calibrate": text, "seq_len": 64, "ignore": ["mlp"]}
    quantize_checkpoint(llama, tmp_path / "dst", **options)
    names = {n for n in read_tensors(tmp_path / "dst") if n.endswith(".input_scale")}
    assert names == {f"{n}.input_scale" for n in LINEARS if ".mlp." not in n}


class Tokenizer:
    """Tokenizer with one token for each character, preceded by BOS 0 if ``adds_bos``."""

    bos_token_id = 0

    def __init__(self, adds_bos: bool):
        self.adds_bos = adds_bos
        self.given: list[str] = []

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> Any:
        self.given.append(text)
        bos = [0] if self.adds_bos and add_special_tokens else []
        return type("Encoding", (), {"input_ids": [*bos, *map(ord, text)]})


def test_jsonl_is_read_as_one_stream(tmp_path: Path):
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps({"text": t, "id": 1}) + "\n" for t in ("abc", "", "dé")))
    assert read_sequences(file, Tokenizer(False), 100, 2).tolist() == [[97, 98], [99, 100]]
    assert read_sequences(file, Tokenizer(True), 100, 3).tolist() == [[0, 97, 98], [0, 99, 100]]


def peak() -> int:
    """Peak memory of this process, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


@pytest.mark.processes
def test_a_file_of_one_long_line_takes_little_memory(tmp_path: Path):
    unit, count = "def main(): return 1; ", 5_000_000  # 110 MB
    plain = tmp_path / "t.txt"
    plain.write_text(unit * count)
    lines = tmp_path / "t.jsonl"
    lines.write_text(f'{{"text": "{unit * count}"}}')
    tokenizer = tiny_llama.tokenizer()
    # Linux resets the peak to the present size here.
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    assert read_sequences(plain, tokenizer, 65_536, 512).shape == (128, 512)
    message = r"line 1 of .*t\.jsonl has more than 16,777,216 characters; divide its text among"
    with pytest.raises(QuantizerError, match=message):
        read_sequences(lines, tokenizer, 65_536, 512)
    assert peak() - before < 500e6  # 210e6 seen; of the file as a whole some 10e9


def test_a_long_text_of_a_line_is_read_by_pieces(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(calibration_text, "_PIECE_CHARACTERS", 2)
    file = tmp_path / "t.jsonl"
    file.write_text('{"text": "abcdefg"}\nno JSON')
    tokenizer = Tokenizer(False)
    assert read_sequences(file, tokenizer, 4, 2).tolist() == [[97, 98], [99, 100]]
    assert tokenizer.given[1:] == ["ab", "cd"]


def test_no_more_text_is_read_than_needed(tmp_path: Path):
    file = tmp_path / "t.jsonl"
    file.write_text('{"text": "abcdef"}\nthis line is never reached\n')
    assert read_sequences(file, Tokenizer(False), 7, 3).tolist() == [[97, 98, 99], [100, 101, 102]]


def test_a_linear_that_sees_no_input_is_named(
    llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from transformers.models.llama.modeling_llama import LlamaMLP

    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: self.up_proj(x) @ x.new_ones(96, 64))
    with pytest.raises(
        QuantizerError, match=r"^model\.layers\.0\.mlp\.gate_proj: saw no input .*--ignore model"
    ):
        quantize_checkpoint(llama, tmp_path / "dst", calibrate=text, seq_len=64)


@pytest.mark.parametrize(
    ("weight", "value", "message"),
    [
        ("input_layernorm", 0.0, r"layers\.1\.self_attn\.q_proj: .* seen .* is 0\.0, must be pos"),
        ("input_layernorm", float("nan"), r"layers\.1\.self_attn\.q_proj: .* is nan, must be"),
        ("post_attention_layernorm", float("inf"), r"layers\.1\.mlp\.gate_proj: .* is (inf|nan),"),
    ],
)
def test_useless_ranges_are_refused(src: Path, text: Path, tmp_path: Path, weight, value, message):
    change_tensors(src, {f"model.layers.1.{weight}.weight": torch.full((64,), value).bfloat16()})
    with pytest.raises(QuantizerError, match=message):
        quantize_checkpoint(src, tmp_path / "dst", calibrate=text, seq_len=64)
    assert not (tmp_path / "dst").exists()
