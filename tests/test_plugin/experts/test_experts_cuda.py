"""Quantised experts on a real GPU, on the plugin's kernels and by vLLM's own methods.

Bounds are those of ``test_experts_engine``. vLLM gives an expert's gate and up one global scale;
models that vLLM's methods serve have such a joint scale, except in the test of differing scales.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip(f"needs sm_90, {torch.cuda.get_device_name()} is not", allow_module_level=True)

from tests import moe_checkpoints, moe_reference
from tests.engine import distance
from tests.moe_reference import Moe
from tests.test_plugin.engine.test_engine_cuda import serve
from vllm_fp4_plugin.formats.kind import Kind

pytestmark = pytest.mark.slow

SAME = 0.03
SAME_FP8 = 0.2  # the reference does not round what goes into experts, which moves it by .06

MODELS = {
    "qwen3": moe_checkpoints.qwen3(moe_intermediate_size=256),
    "glm4": moe_checkpoints.glm4(moe_intermediate_size=256),
    "mixtral": moe_checkpoints.mixtral(intermediate_size=256),
}


def written(directory: Path, model: str, kinds: Mapping[str, Kind], **settings: Any) -> Moe:
    return moe_checkpoints.write(directory, MODELS[model], kinds, **settings)


def decoded(model: Moe) -> Moe:
    """Model as served by a GPU that cannot multiply NVFP4 activations: inputs stay in 16 bits."""
    return Moe(model.path, model.decoded, {})


OWN = "nvfp4_grouped_silu_mul_gemm_w4a16/wgmma (sm_90), W4A16"
FP8_OWN = "nvfp4_grouped_silu_mul_gemm_w4a8/fp8_wgmma (sm_90), W4A8"
FP8 = {"additional_config": {"nvfp4_tc": {"activation": "fp8"}}}
BY_VLLM = {"additional_config": {"nvfp4_tc": {"experts": "vllm"}}}
MARLIN = {"moe_backend": "marlin"}  # vLLM prefers Humming where it is installed
FORMATS = pytest.mark.parametrize("modelopt", [True, False], ids=["modelopt", "compressed-tensors"])


@pytest.mark.parametrize("model", MODELS)
@FORMATS
def test_weight_only(model: str, modelopt: bool, tmp_path: Path) -> None:
    """Gate and up have separate global scales; the engine runs in CUDA graphs."""
    moe = written(tmp_path, model, {"experts": Kind.NVFP4_A16}, modelopt=modelopt)
    served, log = serve(moe.path, enforce_eager=False)
    assert OWN in log
    assert distance(served, moe_reference.said(moe)) < SAME


def test_sizes_of_no_tile(tmp_path: Path) -> None:
    config = moe_checkpoints.qwen3()  # of 96 between the products
    moe = moe_checkpoints.write(tmp_path, config, {"experts": Kind.NVFP4_A16})
    served, log = serve(moe.path)
    assert OWN in log
    assert distance(served, moe_reference.said(moe)) < SAME


@FORMATS
def test_with_activations(modelopt: bool, tmp_path: Path) -> None:
    moe = written(tmp_path, "qwen3", {"experts": Kind.NVFP4}, modelopt=modelopt)
    served, log = serve(moe.path)
    assert f"{OWN}, sm_90 has no W4A4 kernel, activations stay 16-bit" in log
    assert distance(served, moe_reference.said(decoded(moe))) < SAME


@pytest.mark.parametrize("kind", [Kind.NVFP4, Kind.NVFP4_A16], ids=["static", "per token"])
@pytest.mark.parametrize("model", MODELS)
def test_fp8_activations(model: str, kind: Kind, tmp_path: Path) -> None:
    """FP8 activations move the result by .06 to .09 on a CPU."""
    moe = written(tmp_path, model, {"experts": kind})
    served, log = serve(moe.path, enforce_eager=False, **FP8)
    assert f"{FP8_OWN} {'static' if kind is Kind.NVFP4 else 'per-token'}, activation is fp8" in log
    assert distance(served, moe_reference.said(decoded(moe))) < SAME_FP8


@pytest.mark.parametrize("model", MODELS)
@FORMATS
def test_by_vllm(model: str, modelopt: bool, tmp_path: Path) -> None:
    kinds = {"experts": Kind.NVFP4_A16}
    moe = written(tmp_path, model, kinds, modelopt=modelopt, joined=True)
    served, log = serve(moe.path, enforce_eager=False, **BY_VLLM)
    assert ": nvfp4 (vLLM: " in log
    assert "global scales of gate and up differ" not in log
    assert distance(served, moe_reference.said(moe)) < SAME


@FORMATS
def test_with_activations_by_vllm(modelopt: bool, tmp_path: Path) -> None:
    moe = written(tmp_path, "qwen3", {"experts": Kind.NVFP4}, modelopt=modelopt, joined=True)
    served, log = serve(moe.path, **BY_VLLM, **MARLIN)
    assert "MARLIN), W4A16, MARLIN leaves activations in 16 bits" in log
    assert distance(served, moe_reference.said(decoded(moe))) < SAME


@FORMATS
def test_scales_that_vllm_joins(modelopt: bool, tmp_path: Path) -> None:
    """Gate and up have separate global scales, which vLLM's own configs serve wrongly."""
    moe = written(tmp_path, "qwen3", {"experts": Kind.NVFP4_A16}, modelopt=modelopt)
    served, log = serve(moe.path, **BY_VLLM, **MARLIN)
    assert "global scales of gate and up differ in 8 of 8 experts" in log
    assert "down's makes up for it" in log
    expected = moe_reference.said(moe)
    assert distance(served, expected) < SAME
    vllms = "modelopt_fp4" if modelopt else "compressed-tensors"
    theirs, _ = serve(moe.path, quantization=vllms, **MARLIN)
    assert distance(theirs, expected) > 3 * SAME


def test_mixed_precision(tmp_path: Path) -> None:
    """FP8 experts run by vLLM's method in a model whose attention layers are NVFP4."""
    moe = written(tmp_path, "qwen3", {"experts": Kind.FP8, "self_attn": Kind.NVFP4_A16})
    served, log = serve(moe.path)
    assert "experts ×2: fp8 (vLLM: ModelOptFp8MoEMethod" in log
    assert "o_proj ×2: nvfp4_gemm_w4a16/wgmma (sm_90), W4A16" in log
    assert distance(served, moe_reference.said(moe)) < SAME_FP8


@pytest.mark.parametrize("expert_parallel", [False, True], ids=["tensors", "experts"])
def test_two_gpus(expert_parallel: bool, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    moe = written(tmp_path, "qwen3", {"experts": Kind.NVFP4_A16}, joined=True)
    served, _ = serve(moe.path, tensor_parallel_size=2, enable_expert_parallel=expert_parallel)
    assert distance(served, moe_reference.said(moe)) < SAME


def test_a_missing_expert_stops_the_engine(tmp_path: Path) -> None:
    moe = written(tmp_path, "qwen3", {"experts": Kind.NVFP4_A16}, joined=True)
    name = "model.layers.1.mlp.experts.5.up_proj"

    def without(tensors: dict[str, torch.Tensor]) -> None:
        for each in [each for each in tensors if each.startswith(name)]:
            del tensors[each]

    moe_checkpoints.change(moe.path, without)
    with pytest.raises(AssertionError, match=rf"holds no {name}\.weight"):
        serve(moe.path)
