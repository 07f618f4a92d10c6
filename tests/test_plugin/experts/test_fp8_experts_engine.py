"""Engines on a CPU whose experts take FP8 activations.

Distances are mean absolute differences of log-probabilities.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels.formats.nvfp4 import Nvfp4Tensor
from tests import limits, moe_checkpoints, moe_reference, preloaded
from tests.engine import Run, distance, run, started
from tests.moe_reference import Moe
from tests.test_plugin.experts.test_experts_engine import (
    DP,
    EP,
    QUANTISED,
    SAME,
    TP,
    next_expert,
    plain,
    quantised,
)
from tests.test_plugin.linear.test_fp8_layers import hard_to_fold
from vllm_fp4_plugin.formats import UnsupportedCheckpoint

pytestmark = pytest.mark.slow

SAME_FP8 = 0.02  # one E4M3 rounding more or less
W4A8 = "nvfp4_grouped_silu_mul_gemm_w4a8/reference (cpu), W4A8"
W4A16 = "nvfp4_grouped_silu_mul_gemm_w4a16/reference (cpu), W4A16"
WHY = "activation is fp8"
HARD = "model.layers.1.mlp.experts.2.up_proj"
FP8: dict[str, Any] = {"additional_config": {"nvfp4_tc": {"activation": "fp8"}}}
AT_LOAD: dict[str, Any] = {
    "additional_config": {"nvfp4_tc": {"activation": "fp8", "ignore": ["*self_attn*"]}}
}

__all__ = ["plain", "quantised"]


def rows(found: Run) -> list[str]:
    return [line for line in found.report if line.startswith("experts")]


def exactly(moe: Moe) -> Run:
    """Log-probabilities with the checkpoint's weights and unrounded activations."""
    return moe_reference.says(moe_reference.opened(moe, rounds=False))


def harden(tensors: dict[str, Tensor]) -> None:
    """Make a row of one expert's projection such that it does not fold."""
    weight, scales, of_all = f"{HARD}.weight", f"{HARD}.weight_scale", f"{HARD}.weight_scale_2"
    hard = hard_to_fold(Nvfp4Tensor(tensors[weight], tensors[scales], tensors[of_all]))
    tensors[weight], tensors[scales] = hard.data, hard.scales


@pytest.fixture(scope="module")
def bad(quantised: Callable[..., Moe], tmp_path_factory: pytest.TempPathFactory) -> Moe:
    """Calibrated model with one expert that does not fold."""
    folder = tmp_path_factory.mktemp("bad")
    shutil.copytree(quantised("Qwen3", "modelopt", calibrated=True).path, folder / "model")
    moe_checkpoints.change(folder / "model", harden)
    return moe_reference.decoded(folder / "model", folder / "decoded")


@pytest.mark.parametrize("family", ["Qwen3", "DeepSeek V3"])
def test_calibrated(family: str, quantised: Callable[..., Moe]) -> None:
    """FP8 activations are nearer to unrounded ones than the NVFP4 that the checkpoint asks for."""
    moe = quantised(family, "modelopt", calibrated=True)
    found, four, exact = run(str(moe.path), **FP8), run(str(moe.path)), exactly(moe)
    near, far = distance(found, exact), distance(four, exact)
    print(f"from unrounded activations: W4A8 {near}, W4A4 {far}")
    assert 0 < near < far < QUANTISED
    [row] = rows(found)
    assert row.partition(": ")[2] == f"{W4A8} static, {WHY}"
    assert found.generated == exact.generated
    wrong = moe_reference.with_experts(moe_reference.opened(moe, rounds=False), next_expert)
    assert distance(found, wrong) > 2 * far


@pytest.mark.parametrize("at_load", [False, True], ids=["on disk", "at load"])
def test_a_scale_per_token(
    at_load: bool, quantised: Callable[..., Moe], plain: Callable[[str], Path]
) -> None:
    moe = quantised("Qwen3", "modelopt", calibrated=False)
    found = run(str(plain("Qwen3") if at_load else moe.path), **(AT_LOAD if at_load else FP8))
    exact = moe_reference.said(moe)
    away = distance(found, exact)
    print(f"from unrounded activations: {away}")
    assert SAME / 4 < away < SAME_FP8
    assert rows(found) == [f"experts ×2: {W4A8} per-token, {WHY}"]


@pytest.mark.parametrize("calibrated", [True, False], ids=["static", "per token"])
def test_compiled(calibrated: bool, quantised: Callable[..., Moe]) -> None:
    path = str(quantised("Mixtral", "compressed-tensors", calibrated=calibrated).path)
    compiled, eager = run(path, enforce_eager=False, **FP8), run(path, **FP8)
    assert distance(compiled, eager) < SAME_FP8
    assert compiled.report == eager.report
    assert compiled.generated == eager.generated


def test_an_expert_that_does_not_fold(bad: Moe) -> None:
    """A layer with such an expert keeps 16-bit activations, the other layer does not."""
    found = run(str(bad.path), **FP8)
    served, kept = sorted(rows(found), key=lambda row: "W4A16" in row)
    assert served == f"experts ×1: {W4A8} static, {WHY}"
    start = f"experts ×1: {W4A16}, activations stay 16-bit: {HARD}: FP8 changes a row of its weight"
    assert kept.startswith(start)
    assert distance(found, exactly(bad)) < SAME_FP8


def test_reload(quantised: Callable[..., Moe], bad: Moe, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantised("Qwen3", "modelopt", calibrated=True)

    def reload(worker: Any) -> None:
        experts = worker.model_runner.model.get_submodule("model.layers.1.mlp.experts")
        before = {name: each.clone() for name, each in experts.named_parameters()}
        held = {name: each.data_ptr() for name, each in experts.named_parameters()}
        assert before["routed_experts.w13_weight_scale"].dtype == torch.int32
        worker.reload_weights(weights_path=str(model.path))
        after = dict(experts.named_parameters())
        assert all(torch.equal(after[name], each) for name, each in before.items())
        # CUDA graphs refer to these addresses.
        assert {name: each.data_ptr() for name, each in after.items()} == held
        with pytest.raises(UnsupportedCheckpoint, match=rf"{HARD}: FP8 .* as at start; start the"):
            worker.reload_weights(weights_path=str(bad.path))

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    with started(str(model.path), **FP8) as llm:
        llm.collective_rpc(reload)


@pytest.mark.thorough
def test_two_ranks(quantised: Callable[..., Moe], plain: Callable[[str], Path], bad: Moe) -> None:
    """Factors of rows are divided as rows and experts are; ranks agree on a layer in 16 bits."""
    calibrated = quantised("Qwen3", "modelopt", calibrated=True)
    served = {
        "half of every expert": (calibrated.path, TP | FP8, exactly(calibrated)),
        "half of the experts": (calibrated.path, TP | EP | FP8, exactly(calibrated)),
        "quantised at load": (
            plain("Qwen3"), TP | EP | AT_LOAD,
            moe_reference.said(quantised("Qwen3", "modelopt", calibrated=False)),
        ),
        "half of the tokens": (bad.path, DP | EP | FP8, exactly(bad)),
        "one does not fold": (bad.path, TP | EP | FP8, exactly(bad)),
    }  # fmt: skip
    given = [part for path, how, _ in served.values() for part in (str(path), json.dumps(how))]
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        preloaded.command("tests.ranks", *given), env=environment,
        capture_output=True, text=True, check=False, timeout=limits.PROCESS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[{")]
    for (name, (_, _, exact)), (first, second) in zip(served.items(), said, strict=True):
        if name == "half of the tokens":  # the other rank's text is shorter
            assert first["report"] == second["report"]
        else:
            assert first == second
        moved = distance(Run(first["logprobs"], [], []), exact)
        print(f"{name}: {moved}")
        assert moved < QUANTISED
        expert_rows = [line for line in first["report"] if line.startswith("experts")]
        assert any(W4A8 in row for row in expert_rows)
        assert any(f"{W4A16}, activations stay 16-bit: {HARD}" in r for r in expert_rows) == (
            name in ("half of the tokens", "one does not fold")
        )
