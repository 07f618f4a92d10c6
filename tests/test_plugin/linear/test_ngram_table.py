"""Qwen4Exp's n-gram table: refused where vLLM would read its codes as values."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_fp4_plugin import formats
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.linear import ngram_table

ARCHITECTURE = "Qwen4ExpForConditionalGeneration"
TABLE = "model.language_model.layers.0.ple_embedding.ngram_embedding"
NVFP4 = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
TABLES = {
    "FP8 shards": {f"{TABLE}.shard_1.weight": torch.zeros(4, 16, dtype=torch.float8_e4m3fn)},
    "FP8": {f"{TABLE}.weight": torch.zeros(4, 16, dtype=torch.float8_e4m3fn)},
    "NVFP4": {f"{TABLE}.shard_0.weight": torch.zeros(4, 8, dtype=torch.uint8)},
    "NVFP4 of compressed-tensors": {f"{TABLE}.weight_packed": torch.zeros(4, 8, dtype=torch.uint8)},
}  # fmt: skip
SCALES = {f"{TABLE}.{name}": torch.tensor(1.0) for name in ("weight_scale", "input_scale")}
FP8 = TABLES["FP8"] | SCALES
PLAIN = {f"{TABLE}.shard_0.weight": torch.zeros(4, 16, dtype=torch.bfloat16)}


def read(directory: Path, tensors: dict[str, torch.Tensor], hf_config: Any) -> None:
    """Read a checkpoint's config and headers as vLLM does before any process loads tensors."""
    from vllm_fp4_plugin.config import Nvfp4TcConfig

    module = "model.language_model.layers.0.mlp.down_proj"
    linear = {
        f"{module}.weight": torch.zeros(16, 8, dtype=torch.uint8),
        f"{module}.weight_scale": torch.ones(16, 1).to(torch.float8_e4m3fn),
        f"{module}.weight_scale_2": torch.tensor(1.0),
    }
    save_file(linear | tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": NVFP4}))
    config = Nvfp4TcConfig(formats.parse(NVFP4))
    config.maybe_update_config(str(directory), hf_config)


def hf(**fields: Any) -> Any:
    return SimpleNamespace(architectures=[ARCHITECTURE], text_config=SimpleNamespace(**fields))


@pytest.fixture(autouse=True)
def newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_table, "vllm_release", lambda: "0.33")


def test_vllm_0_32_takes_fp8_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_table, "vllm_release", lambda: "0.32")
    with pytest.raises(UnsupportedCheckpoint, match=r"with vLLM 0\.32, .*; install vLLM 0\.33"):
        read(tmp_path, PLAIN, hf())
    read(tmp_path, FP8, hf(ple_embedding_dtype="float8_e4m3fn"))
    read(tmp_path, {}, hf())


@pytest.mark.parametrize("case", TABLES)
def test_a_quantised_table(case: str, tmp_path: Path) -> None:
    message = (
        rf"ngram_embedding.* is (U8|F8_E4M3), must be BF16 or F16: {ARCHITECTURE}'s table .* "
        r"where config.json has no ple_embedding_dtype; serve"
    )
    with pytest.raises(UnsupportedCheckpoint, match=message):
        read(tmp_path, TABLES[case], hf(ple_embedding_dtype=None))


@pytest.mark.parametrize(
    ("tensors", "hf_config"),
    [
        (PLAIN, hf()),
        (FP8, hf(ple_embedding_dtype="float8_e4m3fn")),
        (FP8, SimpleNamespace(architectures=["OtherForCausalLM"])),
        (FP8, None),
    ],
    ids=["in 16 bits", "told by the config", "of another model", "without a config"],
)
def test_other_tables(tensors: dict[str, torch.Tensor], hf_config: Any, tmp_path: Path) -> None:
    read(tmp_path, tensors, hf_config)
