"""LoRA adapter on NVFP4 layers, compared with vLLM's LoRA on the same values and merged weights.

Distances are means of |Δ log-probability| over the whole vocabulary after 14 prompts. The adapter
changes log-probabilities by .44.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

from nvfp4_kernels.formats.nvfp4 import Nvfp4Tensor
from tests import tiny_llama
from tests.catalogue import checkpoint
from tests.catalogue.facts import named
from tests.engine import started
from vllm_fp4_plugin.formats import UnsupportedCheckpoint

pytestmark = pytest.mark.slow

SAME = 0.03  # the same values: roundings of bfloat16
QUANTISED = 0.15  # of the 16-bit model: .05 with W4A16, .12 with W4A4
RANK = 8
VOCABULARY = 320
PREFIXES = [tiny_llama.TEXT[:n] for n in range(4, 70, 5)]


class Scores(NamedTuple):
    """Log-probabilities ``(prompts, vocabulary)`` with and without the adapter, and the report."""

    plain: Tensor
    adapted: Tensor
    report: list[str]


def random_adapter() -> dict[str, tuple[Tensor, Tensor]]:
    """Factors B and A for every linear layer of the trained model, by layer name."""
    generator = torch.Generator().manual_seed(3)
    linears = {n: m for n, m in tiny_llama.model().named_modules() if n.endswith("_proj")}
    return {
        name: (
            torch.randn(linear.out_features, RANK, generator=generator) * 0.1,
            torch.randn(RANK, linear.in_features, generator=generator) * linear.in_features**-0.5,
        )
        for name, linear in linears.items()
    }


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adapter")
    tensors = {}
    for name, (b, a) in random_adapter().items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    save_file(tensors, path / "adapter_model.safetensors")
    leaves = sorted({name.rpartition(".")[2] for name in random_adapter()})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": leaves}
    (path / "adapter_config.json").write_text(json.dumps(config | {"bias": "none"}))
    return path


@pytest.fixture(scope="module")
def served(adapter: Path) -> Callable[..., Scores]:
    """Scores of an engine without and with the adapter, cached by arguments."""
    seen: dict[str, Scores] = {}

    def serve(model: Path, **arguments: Any) -> Scores:
        key = json.dumps([str(model), arguments])
        if key not in seen:
            seen[key] = scores(model, adapter, **arguments)
        return seen[key]

    return serve


def scores(model: Path, adapter: Path, **arguments: Any) -> Scores:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1)
    lora = {"enable_lora": True, "max_lora_rank": RANK} if arguments.pop("lora", True) else {}

    def ask(engine: Any, request: Any) -> Tensor:
        outputs = engine.generate(PREFIXES, sampling, use_tqdm=False, lora_request=request)
        rows = (output.outputs[0].logprobs[0] for output in outputs)
        return torch.tensor([[row[token].logprob for token in range(VOCABULARY)] for row in rows])

    with started(str(model), max_logprobs=-1, **lora, **arguments) as engine:
        plain = ask(engine, None)
        adapted = ask(engine, LoRARequest("adapter", 1, str(adapter))) if lora else plain
        assert torch.equal(ask(engine, None), plain)  # it goes as it came
        quant = engine.llm_engine.vllm_config.quant_config
        report = quant.startup.report.lines() if quant is not None else []
        del engine
    return Scores(plain, adapted, report)


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().mean())


def rewritten(model: Path, path: Path, values: dict[str, Tensor]) -> Path:
    """Copy of a 16-bit checkpoint with other values."""
    shutil.copytree(model, path)
    tensors = {name: value.bfloat16() for name, value in values.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def decoded(bf16: Path, weight_only: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weight-only checkpoint decoded into 16 bits."""
    stored, values = load_file(weight_only / "model.safetensors"), {}
    for name in load_file(bf16 / "model.safetensors"):
        values[name] = stored[name]
        if f"{name}_scale" in stored:
            parts = stored[name], stored[f"{name}_scale"], stored[f"{name}_scale_2"]
            values[name] = Nvfp4Tensor(*parts).dequantize()
    return rewritten(bf16, tmp_path_factory.mktemp("decoded") / "model", values)


@pytest.fixture(scope="module")
def merged(bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of the 16-bit model with the adapter added to its weights."""
    values = load_file(bf16 / "model.safetensors")
    for name, (b, a) in random_adapter().items():
        values[f"{name}.weight"] = values[f"{name}.weight"].float() + b @ a
    return rewritten(bf16, tmp_path_factory.mktemp("merged") / "model", values)


@pytest.mark.feature(
    "LoRA",
    "works",
    "W4A16, adapter on all linear layers: matches vLLM's own LoRA on the decoded weights",
)
def test_as_vllms_own(weight_only: Path, decoded: Path, served: Callable[..., Scores]) -> None:
    ours, theirs = served(weight_only), served(decoded, quantization=None)
    print(f"plain {apart(ours.plain, theirs.plain)}, adapted {apart(ours.adapted, theirs.adapted)}")
    assert apart(ours.plain, theirs.plain) < SAME
    assert apart(ours.adapted, theirs.adapted) < SAME
    assert apart(ours.adapted, ours.plain) > 2 * QUANTISED


@pytest.mark.parametrize("fixture", ["weight_only", "modelopt"])
@pytest.mark.feature(
    "LoRA",
    "works",
    "W4A16 and W4A4: matches the 16-bit model with the adapter merged, up to quantisation error",
)
def test_as_merged_into_16_bits(
    fixture: str, merged: Path, served: Callable[..., Scores], request: pytest.FixtureRequest
) -> None:
    ours = served(request.getfixturevalue(fixture))
    expected = served(merged, quantization=None, lora=False).plain
    print(f"from merged: adapted {apart(ours.adapted, expected)}")
    assert apart(ours.adapted, expected) < QUANTISED < 2 * QUANTISED < apart(ours.plain, expected)


@pytest.mark.feature(
    "LoRA",
    "works",
    "ops are not fused, since the adapter adds to 16-bit results; the report says so",
)
def test_nothing_is_fused(modelopt: Path, served: Callable[..., Scores]) -> None:
    report = served(modelopt).report
    for line in (
        "gate_up_proj ×2: nvfp4_gemm/reference (cpu), W4A4 static, not fused: LoRA is enabled",
        "input_layernorm ×2: vLLM, 16-bit, LoRA is enabled",
        "post_attention_layernorm ×2: vLLM, 16-bit, LoRA is enabled",
    ):
        assert line in report
    assert any(line.endswith("result in 16 bits: LoRA is enabled") for line in report)


@pytest.mark.feature(
    "LoRA", "refused", "on a CPU, adapters beside NVFP4 experts: before any weight is loaded"
)
def test_experts_are_refused(tmp_path: Path) -> None:
    path = checkpoint.write(named("Qwen 3 (experts)"), tmp_path / "model")
    args = EngineArgs(
        model=str(path), quantization="nvfp4-tc", enforce_eager=True, enable_lora=True
    )
    load_general_plugins()
    with pytest.raises(UnsupportedCheckpoint, match=r"LoRA is enabled, must not be for NVFP4 exp"):
        args.create_engine_config()
