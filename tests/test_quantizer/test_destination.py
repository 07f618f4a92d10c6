"""The destination is complete or not there, whatever ends the run."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import limits
from tests.test_quantizer.checkpoints import change_tensors, read_tensors
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint
from vllm_fp4_plugin.quantizer.errors import QuantizerError
from vllm_fp4_plugin.quantizer.weights import WeightQuantizer

pytestmark = pytest.mark.processes

LAST = "model.layers.1.mlp.up_proj.weight"


def test_a_late_failure_leaves_nothing(src: Path, tmp_path: Path):
    weight = read_tensors(src)[LAST]
    weight[3, 5] = float("nan")
    change_tensors(src, {LAST: weight})
    with pytest.raises(QuantizerError, match=rf"^{LAST}: holds NaN or infinity"):
        quantize_checkpoint(src, tmp_path / "dst")
    assert os.listdir(tmp_path) == ["src"]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, OSError("disk full")], ids=repr)
def test_an_interrupt_leaves_nothing(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupt
):
    quantize = WeightQuantizer.quantize

    def interrupted(self, name):
        partial = next(tmp_path.glob(".dst.*.partial"))
        assert (partial / "config.json").exists()
        if name == "model.layers.1.mlp.down_proj":
            raise interrupt
        return quantize(self, name)

    monkeypatch.setattr(WeightQuantizer, "quantize", interrupted)
    with pytest.raises(type(interrupt) if isinstance(interrupt, Exception) else interrupt):
        quantize_checkpoint(src, tmp_path / "dst")
    assert os.listdir(tmp_path) == ["src"]


STALLING = """
import sys, time
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint
from vllm_fp4_plugin.quantizer.weights import WeightQuantizer

quantize, done = WeightQuantizer.quantize, []

def stall(self, name):
    if len(done) == 3:
        print("stalled", flush=True)
        time.sleep(60)
    done.append(name)
    return quantize(self, name)

WeightQuantizer.quantize = stall
quantize_checkpoint(sys.argv[1], sys.argv[2])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_leaves_nothing_to_be_taken_for_a_checkpoint(
    src: Path, tmp_path: Path, number: signal.Signals
):
    command = [sys.executable, "-c", STALLING, src, tmp_path / "dst"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stalled\n"
        process.send_signal(number)
        process.wait(timeout=limits.PROCESS)

    left = sorted(set(os.listdir(tmp_path)) - {"src"})
    if number == signal.SIGKILL:
        assert process.returncode == -number
        assert [name.startswith(".dst.") and name.endswith(".partial") for name in left] == [True]
    else:
        assert process.returncode == 128 + number
        assert left == []


def test_handlers_are_restored(llama: Path, tmp_path: Path):
    before = signal.getsignal(signal.SIGTERM)
    quantize_checkpoint(llama, tmp_path / "dst")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_destination_made_meanwhile_is_not_replaced(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    quantize = WeightQuantizer.quantize

    def make_it(self, name):
        (tmp_path / "dst").mkdir(exist_ok=True)
        return quantize(self, name)

    monkeypatch.setattr(WeightQuantizer, "quantize", make_it)
    with pytest.raises(QuantizerError, match=r"dst: .*dst exists"):
        quantize_checkpoint(src, tmp_path / "dst")
    assert sorted(os.listdir(tmp_path)) == ["dst", "src"]
    assert os.listdir(tmp_path / "dst") == []


def test_permissions_are_the_user_s_default(llama: Path, tmp_path: Path):
    quantize_checkpoint(llama, tmp_path / "dst")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "file").touch()
    assert (tmp_path / "dst").stat().st_mode == (tmp_path / "plain").stat().st_mode
    mode = (tmp_path / "plain" / "file").stat().st_mode
    assert (tmp_path / "dst" / "model.safetensors").stat().st_mode == mode


def test_a_full_disk_is_noticed_before_writing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(QuantizerError, match=r"dst: .* has 0\.0 GB free, 0\.0 GB are needed"):
        quantize_checkpoint(llama, tmp_path / "dst")
    assert os.listdir(tmp_path) == []
