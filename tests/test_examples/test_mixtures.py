"""Mixtures of experts in the examples for dense models, and in rounding weights one by one."""

from pathlib import Path

import pytest

from examples.accuracy.rounding import round_checkpoint
from examples.sensitivity.subject import open_subject
from tests import moe_checkpoints
from tests.test_quantizer.checkpoints import read_tensors
from tests.test_quantizer.mixtures import save_mixture, stack
from vllm_fp4_plugin.quantizer.errors import QuantizerError


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    return save_mixture(tmp_path / "src", moe_checkpoints.qwen3())


def test_sensitivity_measures_dense_models(mixture: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("held-out text " * 50)
    with pytest.raises(
        ValueError, match=r"model: .*src is a mixture of experts \(model\.layers\.0"
    ):
        open_subject(
            mixture, text, None, calibration_tokens=64, windows=2, window_length=32, device="cpu",
            dtype="float32",
        )  # fmt: skip


def test_experts_are_rounded_one_by_one_and_stacks_refused(mixture: Path, tmp_path: Path) -> None:
    round_checkpoint(mixture, tmp_path / "rounded")
    before, after = read_tensors(mixture), read_tensors(tmp_path / "rounded")
    changed = {name for name in before if not before[name].equal(after[name])}
    assert sum(".experts." in name for name in changed) == 2 * 8 * 3
    stack(mixture)
    with pytest.raises(
        QuantizerError, match=r"experts\.0\.\w+: lies in the stack model\.layers\.0"
    ):
        round_checkpoint(mixture, tmp_path / "again")
