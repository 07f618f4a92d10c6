"""Mixtures of NVFP4 experts in real engines, against transformers on the decoded weights.

Bounds on the mean absolute difference of log-probabilities, about twice what was seen. The models
are random: what bfloat16 rounds moves 4-bit steps of W4A4, and now and then a choice of experts.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import limits, moe_checkpoints
from tests.engine import Run, distance, run, started
from vllm_fp4_plugin.experts import base
from vllm_fp4_plugin.experts.plan import ExpertsPlan
from vllm_fp4_plugin.experts.weights import KernelExperts, StoredExperts
from vllm_fp4_plugin.formats import UnsupportedCheckpoint
from vllm_fp4_plugin.kind import Kind

pytestmark = pytest.mark.slow

SAME = 0.03  # W4A16: .011, with gate's scale for up .66
SAME_W4A4 = 0.25  # .13, with gate's scale for up .64

SAME_FP8 = 0.1  # .045: FP8 layers round their inputs, the reference does not

W4A16 = "nvfp4_grouped_silu_mul_gemm_w4a16/reference (cpu), W4A16"
W4A4 = "nvfp4_grouped_silu_mul_gemm/reference (cpu), W4A4"
MLP = ("experts", "shared_experts", "gate_proj", "up_proj", "down_proj")


def test_qwen3_w4a16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up have scales of their own: with one for both the model says something else."""
    model = moe_checkpoints.write(tmp_path, moe_checkpoints.qwen3(), {"experts": Kind.NVFP4_A16})
    expected = moe_checkpoints.said(model)
    found = run(str(model.path))
    assert f"experts ×2: {W4A16}" in found.report
    assert distance(found, expected) < SAME

    right = base.kernel_experts

    def with_gates_scale(stored: StoredExperts, plan: ExpertsPlan) -> KernelExperts:
        gates = stored.w13_global[:, :1].expand(-1, 2)
        return right(stored._replace(w13_global=gates), plan)

    monkeypatch.setattr(base, "kernel_experts", with_gates_scale)
    assert distance(run(str(model.path)), expected) > 3 * SAME


def test_qwen3_w4a4(tmp_path: Path) -> None:
    config = moe_checkpoints.qwen3()
    model = moe_checkpoints.write(tmp_path, config, {"experts": Kind.NVFP4}, modelopt=False)
    found = run(str(model.path))
    assert f"experts ×2: {W4A4} static" in found.report
    assert distance(found, moe_checkpoints.said(model)) < SAME_W4A4


@pytest.mark.parametrize("lacking", ["an expert's scales", "all experts"])
def test_reload(lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = moe_checkpoints.write(tmp_path, moe_checkpoints.qwen3(), {"experts": Kind.NVFP4_A16})
    start = "model.layers.1.mlp.experts." + ("5.up_proj.w" if "scales" in lacking else "")
    copy = tmp_path / "copy"
    shutil.copytree(model.path, copy)

    def without(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(start)]:
            del tensors[name]

    moe_checkpoints.change(copy, without)

    def reload(worker: Any) -> None:
        experts = worker.model_runner.model.get_submodule("model.layers.1.mlp.experts")
        before = experts.routed_experts.w13_weight.clone()
        worker.reload_weights(weights_path=str(model.path))
        assert torch.equal(experts.routed_experts.w13_weight, before)
        with pytest.raises(UnsupportedCheckpoint, match=rf"{copy}: holds no {start}"):
            worker.reload_weights(weights_path=str(copy))

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    with started(str(model.path)) as llm:
        llm.collective_rpc(reload)


@pytest.mark.parametrize("parallel", ["half of every expert", "half of the experts"])
def test_two_ranks(parallel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has what ``parallel`` says."""
    config = moe_checkpoints.qwen3()
    model = moe_checkpoints.write(tmp_path, config, {"experts": Kind.NVFP4_A16})
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # one memory node, two workers
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    whole = parallel == "half of the experts"
    arguments = json.dumps({"tensor_parallel_size": 2, "enable_expert_parallel": whole})
    command = [sys.executable, "-m", "tests.engine", str(model.path), arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=limits.PROCESS, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = Run(report=[], **json.loads(done.stdout.strip().splitlines()[-1]))
    assert distance(found, moe_checkpoints.said(model)) < SAME


def test_glm4_of_mixed_precision(tmp_path: Path) -> None:
    """A dense layer, experts beside a shared one, FP8 attention by vLLM's methods."""
    kinds = dict.fromkeys(MLP, Kind.NVFP4_A16) | {"self_attn": Kind.FP8_CHANNEL}
    model = moe_checkpoints.write(tmp_path, moe_checkpoints.glm4(), kinds)
    found = run(str(model.path))
    assert f"experts ×1: {W4A16}" in found.report
    assert "gate_up_proj ×2: nvfp4_silu_mul_gemm_w4a16/reference (cpu), W4A16" in found.report
    assert "qkv_proj ×2: fp8 (vLLM: ModelOptLinearMethod), W8A8 dynamic" in found.report
    assert distance(found, moe_checkpoints.said(model)) < SAME_FP8


def test_mixtral_compiled(tmp_path: Path) -> None:
    config = moe_checkpoints.mixtral()
    model = moe_checkpoints.write(tmp_path, config, {"experts": Kind.NVFP4_A16}, modelopt=False)
    found = run(str(model.path), enforce_eager=False)
    assert f"experts ×2: {W4A16}" in found.report
    assert distance(found, moe_checkpoints.said(model)) < SAME


def online(tmp_path: Path, **options: Any) -> tuple[Run, list[str]]:
    """A 16-bit checkpoint served with its experts quantised at load, and lines on experts."""
    moe_checkpoints.write(tmp_path, moe_checkpoints.qwen3(), {"experts": Kind.NVFP4_A16})
    found = run(str(tmp_path / "plain"), additional_config={"nvfp4_tc": options})
    return found, [line for line in found.report if line.startswith("experts")]


def test_experts_of_a_16_bit_checkpoint(tmp_path: Path) -> None:
    """Quantised at load as the quantised checkpoint is: its weights are made of these."""
    options = {"activation": "16-bit", "ignore": ["*self_attn*"]}
    found, rows = online(tmp_path, **options)
    assert rows == [f"experts ×2: {W4A16}"]
    model = moe_checkpoints.write(
        tmp_path / "again", moe_checkpoints.qwen3(), {"experts": Kind.NVFP4_A16}
    )
    assert distance(found, moe_checkpoints.said(model)) < SAME


def test_experts_that_stay_in_16_bits(tmp_path: Path) -> None:
    _, rows = online(tmp_path, ignore=["*.1.mlp.experts"])
    row = "experts ×1: unquantized (vLLM), 16-bit, ignored by '*.1.mlp.experts'"
    assert rows == [f"experts ×1: {W4A4} per-token", row]
