"""Real engines on a small trained model: every kind of checkpoint, and every execution mode.

Bounds are on the mean absolute difference of log-probabilities. Two runs of the same arithmetic
differ by the rounding of bfloat16 between layers (the compiled model rounds elsewhere); with 4-bit
activations such a difference can move a value to the next E2M1 step. The bounds are about three
times the differences seen, and well below the effect of a wrong scale.
"""

import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import limits, preloaded
from tests.engine import Run, dequantized, distance, run
from vllm_fp4_plugin import kernel_weight
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

pytestmark = pytest.mark.slow

SAME_W4A16 = 0.012
SAME_W4A4 = 0.09
QUANTISED = 0.2  # from the 16-bit model
WRONG = 0.3

GEMM = "nvfp4_gemm/reference (cpu)"
GEMM_W4A16 = "nvfp4_gemm_w4a16/reference (cpu)"


@pytest.fixture(scope="session")
def compressed_tensors(
    bf16: Path, calibration: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    dst = tmp_path_factory.mktemp("compressed") / "model"
    quantize_checkpoint(
        bf16,
        dst,
        format="compressed-tensors",
        calibrate=calibration,
        seq_len=128,
        kv_cache_scheme="fp8",
    )
    return dst


@pytest.fixture(scope="session")
def engine() -> Callable[..., Run]:
    """Function ``run``, cached by model and arguments."""
    seen: dict[str, Run] = {}

    def cached(model: Path, **engine_args: Any) -> Run:
        key = json.dumps([str(model), engine_args], sort_keys=True)
        if key not in seen:
            seen[key] = run(str(model), **engine_args)
        return seen[key]

    return cached


@pytest.fixture(scope="session")
def reference(bf16: Path, engine: Callable[..., Run]) -> Run:
    return engine(bf16, quantization=None)


def test_the_model_is_worth_comparing(reference: Run) -> None:
    """The model has learnt something: its loss is far below ln 256, the loss of guessing."""
    assert -sum(reference.logprobs) / len(reference.logprobs) < 0.5 * math.log(256)


def test_weight_only_equals_the_dequantised_model(
    weight_only: Path, engine: Callable[..., Run]
) -> None:
    """The reference is transformers' model with weights that the tests dequantise by themselves."""
    served = engine(weight_only)
    assert distance(served, dequantized(weight_only)) < SAME_W4A16
    assert served.report[0] == f"qkv_proj ×2: {GEMM_W4A16}, W4A16"


def in_terms(terms: int) -> dict[str, Any]:
    """Engine arguments for activations that are sums of ``terms`` NVFP4 terms."""
    return {"additional_config": {"nvfp4_tc": {"activation_terms": terms}}}


def test_weight_only_in_terms(weight_only: Path, engine: Callable[..., Run]) -> None:
    """Three terms are as good as 16 bits; one term is as good as any W4A4 model."""
    expected = dequantized(weight_only)
    apart = {}
    for terms, arithmetic in ((1, "W4A4"), (3, "W4A4×3")):
        served = engine(weight_only, **in_terms(terms))
        apart[terms] = distance(served, expected)
        told = f"qkv_proj ×2: {GEMM}, {arithmetic} per-token, activation_terms is {terms}"
        assert served.report[0] == told
    sixteen = distance(engine(weight_only), expected)
    print(f"mean |Δ log-probability|: 16-bit {sixteen:.4f}, terms {apart}")
    assert apart[3] < SAME_W4A16 < apart[1] < SAME_W4A4


def test_compiled_in_terms(weight_only: Path, engine: Callable[..., Run]) -> None:
    compiled = engine(weight_only, enforce_eager=False, **in_terms(3))
    assert distance(engine(weight_only, **in_terms(3)), compiled) < SAME_W4A16


def test_calibrated_scales_serve_all_terms(modelopt: Path, engine: Callable[..., Run]) -> None:
    """Three terms recover the loss of rounded activations, not the loss of rounded weights."""
    served, expected = engine(modelopt, **in_terms(3)), dequantized(modelopt)
    assert served.report[0] == f"qkv_proj ×2: {GEMM}, W4A4×3 static, activation_terms is 3"
    assert distance(served, expected) < distance(engine(modelopt), expected) / 2


def test_modelopt(modelopt: Path, reference: Run, engine: Callable[..., Run]) -> None:
    served = engine(modelopt)
    assert distance(served, reference) < QUANTISED
    assert served.report[:5] == [
        f"qkv_proj ×2: {GEMM}, W4A4 static",
        f"o_proj ×2: {GEMM}, W4A4 static",
        "attn ×2: nvfp4_paged_attention_fp8_kv/reference (cpu), fp8_e4m3 KV cache, by default; "
        "queries and keys rotated; result quantised for o_proj",
        "gate_up_proj ×2: nvfp4_silu_mul_gemm/reference (cpu), W4A4 static, "
        "result quantised for down_proj",
        f"down_proj ×2: {GEMM}, W4A4 static",
    ]


def test_modelopt_legacy_config(modelopt: Path, engine: Callable[..., Run], tmp_path: Path) -> None:
    """ModelOpt's config file up to 0.29, which the quantising tool also writes, is enough."""
    legacy = shutil.copytree(modelopt, tmp_path / "legacy")
    config = json.loads((legacy / "config.json").read_text())
    del config["quantization_config"]
    (legacy / "config.json").write_text(json.dumps(config))
    assert engine(legacy).logprobs == engine(modelopt).logprobs


def test_nvfp4_checkpoints_need_no_flag_on_cpu(modelopt: Path, engine: Callable[..., Run]) -> None:
    detected = engine(modelopt, quantization=None)
    assert detected.report == engine(modelopt).report
    assert detected.logprobs == engine(modelopt).logprobs


def test_compressed_tensors(
    compressed_tensors: Path, modelopt: Path, engine: Callable[..., Run]
) -> None:
    """The two formats hold the same model except for ties that their divisions round apart."""
    assert distance(engine(compressed_tensors), engine(modelopt)) < SAME_W4A4


def test_fused_equals_unfused(
    weight_only: Path, modelopt: Path, engine: Callable[..., Run]
) -> None:
    off = {"additional_config": {"nvfp4_tc": {"fuse_mlp": False}}}
    assert distance(engine(weight_only), engine(weight_only, **off)) < SAME_W4A16
    unfused = engine(modelopt, **off)
    assert distance(engine(modelopt), unfused) < SAME_W4A4
    assert (
        f"gate_up_proj ×2: {GEMM}, W4A4 static, not fused: switched off (fuse_mlp)"
        in unfused.report
    )


def test_compiled_equals_eager(weight_only: Path, engine: Callable[..., Run]) -> None:
    compiled = engine(weight_only, enforce_eager=False)
    assert distance(engine(weight_only), compiled) < SAME_W4A16


def test_compiled_w4a4(modelopt: Path, engine: Callable[..., Run]) -> None:
    assert distance(engine(modelopt), engine(modelopt, enforce_eager=False)) < SAME_W4A4


def test_fp8_kv_cache(modelopt: Path, engine: Callable[..., Run]) -> None:
    """The checkpoint declares an FP8 KV cache; a requested 16-bit cache differs slightly."""
    fp8, bf16_kv = engine(modelopt), engine(modelopt, kv_cache_dtype="bfloat16")
    assert 0 < distance(fp8, bf16_kv) < SAME_W4A4


@pytest.mark.parametrize("producer", ["modelopt", "compressed_tensors"])
def test_kv_scales_are_read(
    producer: str, request: pytest.FixtureRequest, reference: Run, tmp_path: Path
) -> None:
    """Value scales a hundred times too small saturate FP8, and the answer is wrong."""
    model: Path = request.getfixturevalue(producer)

    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        scales = [name for name in tensors if name.endswith(".v_scale")]
        assert len(scales) == 2
        for name in scales:
            tensors[name] /= 100

    saturated = run(str(damaged(model, tmp_path, shrink)))
    assert distance(saturated, reference) > WRONG


@pytest.mark.parametrize("scales", ["absmax", "sweep", "four-over-six"])
def test_online(scales: str, bf16: Path, reference: Run, engine: Callable[..., Run]) -> None:
    served = engine(bf16, additional_config={"nvfp4_tc": {"scales": scales}})
    assert 0 < distance(served, reference) < QUANTISED
    assert served.report[0] == f"qkv_proj ×2: {GEMM}, W4A4 per-token"


def test_online_weight_only_equals_the_tools(
    bf16: Path, weight_only: Path, engine: Callable[..., Run]
) -> None:
    """Quantising at load and the tool give bit-identical weights."""
    online = engine(bf16, additional_config={"nvfp4_tc": {"activation": "16-bit"}})
    assert online.logprobs == engine(weight_only).logprobs


def test_online_ignore(bf16: Path, engine: Callable[..., Run]) -> None:
    served = engine(
        bf16, additional_config={"nvfp4_tc": {"ignore": ["model.layers.0", "*.down_proj"]}}
    )
    assert f"qkv_proj ×1: {GEMM}, W4A4 per-token" in served.report
    assert "qkv_proj ×1: unquantized (vLLM), 16-bit, ignored by 'model.layers.0'" in served.report
    assert "down_proj ×1: unquantized (vLLM), 16-bit, ignored by '*.down_proj'" in served.report


def test_dummy_weights(modelopt: Path, engine: Callable[..., Run]) -> None:
    assert len(engine(modelopt, load_format="dummy").generated) == 8


def test_one_scale_for_all_shards_is_caught(
    modelopt: Path, reference: Run, engine: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant: all shards get the largest of their scales, as in some engines."""
    right = distance(engine(modelopt), reference)
    exact = kernel_weight.kernel_weight

    def largest(data: Any, scales: Any, weight_global: Any, *rest: Any, **named: Any) -> Any:
        return exact(data, scales, weight_global.max().expand_as(weight_global), *rest, **named)

    monkeypatch.setattr(kernel_weight, "kernel_weight", largest)
    assert distance(run(str(modelopt)), reference) > 2 * right


@pytest.fixture(scope="module")
def parallel(bf16: Path, modelopt: Path, weight_only: Path) -> dict[str, Run]:
    """Answers of two ranks, quantised at load and from checkpoints, in a separate process."""
    online = {"additional_config": {"nvfp4_tc": {"activation": "16-bit"}}}
    kinds = {
        "online": (bf16, online),
        "modelopt": (modelopt, {}),
        "terms": (weight_only, in_terms(3)),
    }
    given: list[str | Path] = []
    for model, arguments in kinds.values():
        given += [model, json.dumps({"tensor_parallel_size": 2, **arguments})]
    environment = {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles a mask even of an eager embedding
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # one memory node, two workers
    }
    done = subprocess.run(
        preloaded.command("tests.engine", "--fork", *given),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=limits.PROCESS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = [line for line in done.stdout.splitlines() if line.startswith('{"logprobs"')]
    runs = (Run(report=[], **json.loads(line)) for line in told)
    return dict(zip(kinds, runs, strict=True))


@pytest.mark.feature(
    "tensor parallelism",
    "works",
    "two ranks match one; quantising at load takes a 16-bit weight's scales over both ranks",
)
@pytest.mark.parametrize("kind", ["online", "modelopt", "terms"])
def test_tensor_parallel(
    kind: str,
    weight_only: Path,
    modelopt: Path,
    engine: Callable[..., Run],
    parallel: dict[str, Run],
) -> None:
    """Two ranks, each with half of every layer, agree with a single rank.

    Quantising at load takes each shard's scale over both ranks, so its weights are those of the
    weight-only checkpoint, bit for bit.
    """
    single, bound = {
        "online": (weight_only, SAME_W4A16),
        "modelopt": (modelopt, SAME_W4A4),
        "terms": (weight_only, SAME_W4A16),  # one of 16-bit activations
    }[kind]
    assert distance(engine(single), parallel[kind]) < bound


# --- refused at start, with nothing served ----------------------------------------------------


def damaged(
    model: Path, directory: Path, change: Callable[[dict[str, torch.Tensor]], None]
) -> Path:
    copy = shutil.copytree(model, directory / "damaged")
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_nan_scale_stops_the_engine(modelopt: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight_scale_2"
    copy = damaged(modelopt, tmp_path, lambda t: t[name].fill_(torch.nan))
    with pytest.raises(ValueError, match=rf"model\.safetensors: {name}: holds nan, global scales"):
        run(str(copy))


def test_missing_tensor_stops_the_engine(modelopt: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.input_scale"
    copy = damaged(modelopt, tmp_path, lambda t: t.pop(name))
    with pytest.raises(ValueError, match=rf"{name}: is missing beside"):
        run(str(copy))


def test_truncated_file_stops_the_engine(modelopt: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(modelopt, tmp_path / "truncated")
    file = copy / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(ValueError, match=r"model\.safetensors: is truncated"):
        run(str(copy))


def test_foreign_quantization_stops_the_engine(modelopt: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(modelopt, tmp_path / "foreign")
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"]["quant_algo"] = "FP8"
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quant_algo: is 'FP8', must be NVFP4"):
        run(str(copy))
