"""Checkpoints that declare an NVFP4 KV cache: served with another cache dtype and a warning."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine import Run, report_command, run, verify_command

pytestmark = pytest.mark.slow

SCHEME = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
LAYERS = (0, 1)
NOTE = "the checkpoint declares NVFP4, whose scales are ignored"


def declaring(model: Path, directory: Path, **scales: torch.Tensor) -> Path:
    """Copy of a checkpoint that declares an NVFP4 cache, with ``scales`` in each layer."""
    copy = shutil.copytree(model, directory / "model")
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = SCHEME
    (copy / "config.json").write_text(json.dumps(config))
    legacy = json.loads((copy / "hf_quant_config.json").read_text())
    legacy["quantization"]["kv_cache_quant_algo"] = "NVFP4"
    (copy / "hf_quant_config.json").write_text(json.dumps(legacy))
    tensors = load_file(copy / "model.safetensors")
    for layer in LAYERS:
        prefix = f"model.layers.{layer}.self_attn"
        tensors |= {f"{prefix}.{name.replace('__', '.')}": x.clone() for name, x in scales.items()}
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


SCALES = {
    # As scales of an FP8 cache, these values would saturate every key and value.
    "of ModelOpt": {"k_proj__k_scale": torch.tensor(1e-5), "v_proj__v_scale": torch.tensor([1e-5])},
    "of compressed-tensors": {
        "k_scale": torch.full((2, 1, 1), 1e-5),
        "v_scale": torch.full((1,), 1e-5),
        "k_global_scale": torch.tensor([3e3]),
        "v_global_scale": torch.tensor([3e3]),
    },
    "none": {},
}


@pytest.fixture(scope="module")
def served() -> Callable[..., Run]:
    """Answers of an engine, cached by arguments."""
    found: dict[str, Run] = {}

    def say(model: Path, dtype: str) -> Run:
        key = f"{model} {dtype}"
        if key not in found:
            found[key] = run(str(model), kv_cache_dtype=dtype)
        return found[key]

    return say


@pytest.mark.parametrize(
    ("scales", "dtype", "cache"),
    [
        ("of ModelOpt", "auto", "bfloat16"),
        ("of ModelOpt", "fp8", "fp8_e4m3"),
        ("of compressed-tensors", "fp8", "fp8_e4m3"),
    ],
)
def test_it_is_served_as_one_that_declares_none(
    scales: str,
    dtype: str,
    cache: str,
    weight_only: Path,
    tmp_path: Path,
    served: Callable[..., Run],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm_fp4_plugin.engine import nvfp4_cache

    warnings: list[str] = []
    monkeypatch.setattr(nvfp4_cache.logger, "warning", lambda line, *of: warnings.append(line % of))
    copy = declaring(weight_only, tmp_path, **SCALES[scales])
    said, plain = run(str(copy), kv_cache_dtype=dtype), served(weight_only, dtype)
    assert (said.logprobs, said.generated) == (plain.logprobs, plain.generated)
    [attention] = [line for line in said.report if line.startswith("attn ")]
    assert f"{cache} KV cache, by default; {NOTE}" in attention
    assert not any(NOTE in line for line in plain.report)
    told = "bfloat16" if dtype == "auto" else dtype
    [warning] = [line for line in warnings if "NVFP4" in line]
    assert f"declares an NVFP4 KV cache, which is not served: it is {told} instead" in warning


def test_report_and_verify(weight_only: Path, tmp_path: Path) -> None:
    copy = declaring(weight_only, tmp_path, **SCALES["of compressed-tensors"])
    told = report_command(copy)
    assert told.exit_code == 0, told.output
    words = re.sub(r"[\s│]+", " ", told.output)
    assert "bfloat16 KV cache" in words
    assert "NVFP4" in words.partition("bfloat16 KV cache")[2]
    assert verify_command(copy).exit_code == 0


@pytest.mark.parametrize("declares", [True, False])
@pytest.mark.parametrize("dtype", ["nvfp4", "nvfp4_4over6"])
def test_one_that_is_asked_for(
    declares: bool, dtype: str, weight_only: Path, tmp_path: Path
) -> None:
    """A requested NVFP4 cache is refused: vLLM's CPU attention would read 4-bit rows as 16-bit."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    from vllm_fp4_plugin.options import InvalidOption

    load_general_plugins()
    model = declaring(weight_only, tmp_path) if declares else weight_only
    args: dict[str, Any] = {"quantization": "nvfp4-tc", "kv_cache_dtype": dtype}
    with pytest.raises(InvalidOption, match=rf"--kv-cache-dtype: is '{dtype}', which nvfp4-tc"):
        EngineArgs(model=str(model), **args).create_engine_config()


def test_other_methods_get_what_the_checkpoint_declares() -> None:
    from types import SimpleNamespace

    from vllm.engine import arg_utils
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    hf = SimpleNamespace(
        quantization_config={"quant_method": "modelopt", "kv_cache_scheme": SCHEME}
    )
    for method, expected in (("nvfp4-tc", "auto"), ("modelopt_fp4", "nvfp4")):
        model = SimpleNamespace(hf_config=hf, quantization=method)
        assert arg_utils.resolve_kv_cache_dtype_string("auto", model) == expected
        assert arg_utils.resolve_kv_cache_dtype_string("nvfp4", model) == "nvfp4"
