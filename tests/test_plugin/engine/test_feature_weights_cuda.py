"""Weights replaced under CUDA graphs on a real GPU, and sleeping engines.

The answers equal those of an engine started on the new weights, also in CUDA graphs.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests import limits, moe_checkpoints, tiny_llama
from tests.sleeping_engine import ASKED
from tests.test_plugin.engine.test_feature_weights import Pair, changed
from vllm_fp4_plugin.formats.kind import Kind
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pairs(
    bf16: Path, calibration: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("pairs")
    other = changed(bf16, folder / "bf16")

    def quantised(kind: str, **settings: Any) -> Pair:
        paths = folder / f"{kind}-1", folder / f"{kind}-2"
        for model, path in zip((bf16, other), paths, strict=True):
            quantize_checkpoint(model, path, **settings)
        return Pair(*paths)

    def experts() -> Pair:
        first = moe_checkpoints.save_random(
            folder / "moe", moe_checkpoints.qwen3(moe_intermediate_size=256)
        )
        models = first, changed(first, folder / "moe-changed")
        paths = []
        for number, model in enumerate(models, 1):
            (made := folder / f"experts-{number}").mkdir()
            kinds = {"experts": Kind.NVFP4_A16}
            paths.append(moe_checkpoints.write(made, model, kinds).path)
        return Pair(*paths)

    return {
        "16 bits": Pair(bf16, other),
        "weights": quantised("weights"),
        "activations": quantised("activations", calibrate=calibration, seq_len=128),
        "head of 64": _heads_of_64(folder),
        "experts": experts(),
    }


def _heads_of_64(folder: Path) -> Pair:
    """Checkpoints with heads of 64 elements, which the decode attention kernel supports."""
    plain = tiny_llama.save(folder / "heads", head_dim=64)
    models = plain, changed(plain, folder / "heads-changed")
    paths = folder / "heads-1", folder / "heads-2"
    for model, path in zip(models, paths, strict=True):
        quantize_checkpoint(model, path)
    return Pair(*paths)


@pytest.mark.parametrize("kind", ["16 bits", "weights", "activations", "head of 64", "experts"])
def test_reload_and_sleep(kind: str, pairs: dict[str, Pair]) -> None:
    """Engines load other weights and the first again, sleep at each level, and reload awake."""
    pair = pairs[kind]
    command = [sys.executable, "-m", "tests.sleeping_engine", str(pair.first), str(pair.second)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=limits.PROCESS, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line for line in done.stdout.splitlines() if line in ASKED] == list(ASKED)
