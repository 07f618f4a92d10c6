"""Engines of two ranks whose norms all-reduce partial sums, against single-rank engines.

FlashInfer is replaced by ``tests.fake_flashinfer``, below vLLM's own wrapper.
"""

import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import launch_counts, limits, preloaded
from tests.engine import Run, distance, run
from tests.modelled.launches import TODAY, Kind, launches
from tests.test_plugin.engine.test_engine import SAME_W4A4

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

FLASHINFER = {"flashinfer_tokens": 1000}
COMPILED = {"enforce_eager": False}
ENGINES: dict[str, dict[str, Any]] = {
    "apart": {"counts": True},
    "in one op": {"counts": True} | FLASHINFER,
    "in one op, up to 2 tokens": {"flashinfer_tokens": 2},
    "compiled, apart": COMPILED,
    "compiled, in one op": COMPILED | FLASHINFER,
    "compiled in pieces": COMPILED | FLASHINFER | {"pieces": True},
    "by vLLM": {"additional_config": {"nvfp4_tc": {"fuse_norm": False}}},
}
WITHOUT = "by an all-reduce before it (flashinfer's op: none on cpu)"
WITH = "in flashinfer's op (untried on a GPU) up to 1000 tokens, by an all-reduce before it above"


@pytest.fixture(scope="module")
def ranks(modelopt: Path) -> dict[str, dict[str, Any]]:
    """Results of the first rank of each engine, after a check that both ranks agree."""
    models_and_arguments: list[str] = []
    for arguments in ENGINES.values():
        given = json.dumps({"tensor_parallel_size": 2} | arguments)
        models_and_arguments += [str(modelopt), given]
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        preloaded.command("tests.ranks", *models_and_arguments), env=environment,
        capture_output=True, text=True, check=False, timeout=limits.PROCESS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[{")]
    for first, second in said:
        assert first == second
    return dict(zip(ENGINES, (first for first, _ in said), strict=True))


@pytest.fixture(scope="module")
def alone(modelopt: Path) -> Run:
    return run(str(modelopt))


@pytest.mark.parametrize("name", ENGINES)
def test_two_ranks_say_what_one_says(
    name: str, ranks: dict[str, dict[str, Any]], alone: Run
) -> None:
    found = ranks[name]
    apart = distance(Run(found["logprobs"], [], []), alone)
    print(f"log-probabilities differ by {apart} in the mean")
    assert apart < SAME_W4A4
    assert found["generated"] == alone.generated


@pytest.mark.parametrize("name", ["by vLLM", "in one op", "in one op, up to 2 tokens"])
def test_to_the_bit(name: str, ranks: dict[str, dict[str, Any]]) -> None:
    """Sums are rounded where vLLM's all-reduce rounds them, so results are bit-identical."""
    assert ranks[name]["logprobs"] == ranks["apart"]["logprobs"]


def test_compiled_in_pieces_is_the_same(ranks: dict[str, dict[str, Any]]) -> None:
    pieces, whole = ranks["compiled in pieces"], ranks["compiled, in one op"]
    assert pieces["logprobs"] == whole["logprobs"]


@pytest.mark.parametrize(("name", "how"), [("apart", WITHOUT), ("compiled, in one op", WITH)])
def test_the_report(name: str, how: str, ranks: dict[str, dict[str, Any]]) -> None:
    lines = [line.partition(", A4 static, ") for line in ranks[name]["report"] if "norm ×" in line]
    kernel = "nvfp4_add_rms_norm_quantize/reference (cpu)"
    first = "all-reduce before it: no decoder layer of this rank comes before it"
    assert [(head, said) for head, _, said in lines] == [
        (f"input_layernorm ×1: {kernel}", f"quantises for qkv_proj; {first}"),
        (
            f"post_attention_layernorm ×2: {kernel}",
            f"quantises for gate_up_proj; adds up o_proj's result, {how}",
        ),
        (
            f"input_layernorm ×1: {kernel}",
            f"quantises for qkv_proj; adds up down_proj's result, {how}",
        ),
    ]


@pytest.mark.parametrize(("name", "fused", "count"), [("in one op", True, 7), ("apart", False, 9)])
def test_launches_of_a_layer(
    name: str, fused: bool, count: int, ranks: dict[str, dict[str, Any]]
) -> None:
    found = launch_counts.of_a_layer(Counter(ranks[name]["launches"]))
    steps = launches(TODAY, Kind(ranks=2, fused_all_reduce=fused))
    assert found == Counter(launch_counts.OPS.get(step.name, step.name) for step in steps)
    assert sum(found.values()) == count
