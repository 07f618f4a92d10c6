"""Engines of several processes: pipeline stages, with and without tensor parallelism; replicas."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import limits, preloaded
from tests.engine import Run, distance

pytestmark = pytest.mark.slow

SAME = 0.09  # W4A4 over two ranks, which add up their parts in bfloat16; seen: .024


@pytest.fixture(scope="module")
def said(bf16: Path, modelopt: Path) -> dict[str, dict[str, Any]]:
    models = {"bf16": bf16, "modelopt": modelopt}
    given = json.dumps({name: str(path) for name, path in models.items()})
    environment = {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    done = subprocess.run(
        preloaded.command("tests.features.parallel", given),
        env={**os.environ, **environment}, capture_output=True, text=True, check=False,
        timeout=limits.PROCESS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"engine"')]
    found = (json.loads(line) for line in lines)
    return {each["engine"]: each for each in found} | {"log": {"text": done.stderr + done.stdout}}


def run_of(said: dict[str, Any]) -> Run:
    return Run(said["logprobs"], said["generated"], [])


@pytest.mark.feature(
    "pipeline parallelism",
    "works",
    "two stages are bit-identical to one process, 2 × 2 with tensor parallelism matches; the "
    "test allocates the stages' receive buffers",
)
def test_stages(said: dict[str, dict[str, Any]]) -> None:
    one, stages, grid = (run_of(said[f"modelopt, {name}"]) for name in ("one", "stages", "grid"))
    assert stages == one
    assert distance(grid, one) < SAME
    assert run_of(said["bf16, stages"]) == run_of(said["bf16, one"]) != one


@pytest.mark.feature(
    "pipeline parallelism",
    "not in vLLM on a CPU",
    "also without `nvfp4-tc`: vLLM allocates the stages' receive buffers in its warm-up, which "
    "its CPU worker skips in eager mode",
)
def test_stages_unprepared(said: dict[str, dict[str, Any]]) -> None:
    assert "error" in said["unprepared"]
    assert "assert self.intermediate_tensors is not None" in said["log"]["text"]


@pytest.mark.feature(
    "data parallelism",
    "works",
    "two replicas behind vLLM's load balancer, both used; identical answers",
)
def test_replicas(said: dict[str, dict[str, Any]]) -> None:
    one, two = said["balanced, 1"], said["balanced, 2"]
    if "error" in two and "allowed_memory_nodes[0]" in said["log"]["text"]:
        pytest.skip("vLLM 0.33 gives each replica a memory node of its own, and there is one")
    assert two["answers"] == one["answers"]
    assert set(two["asked"]) == {0, 1}
    assert not one["asked"]
