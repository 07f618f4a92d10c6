"""The destination is complete or absent, however the run ends."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests import limits
from tests.test_quantizer.checkpoints import change_tensors, read_tensors
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint
from vllm_fp4_plugin.quantizer.errors import QuantizerError
from vllm_fp4_plugin.quantizer.tensor_file import TensorWriter
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
import signal, sys, time
from vllm_fp4_plugin.__main__ import app
from vllm_fp4_plugin.quantizer.weights import WeightQuantizer

quantize, done = WeightQuantizer.quantize, []

def stall(self, name):
    if len(done) == 3:
        print("stalled", flush=True)
        time.sleep(60)
    done.append(name)
    return quantize(self, name)

WeightQuantizer.quantize = stall
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
app()
"""


@contextmanager
def stalled(src: Path, dst: Path) -> Iterator[subprocess.Popen[str]]:
    """Process of the command that has begun to write and stalls."""
    command = [sys.executable, "-c", STALLING, "quantize", src, dst]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            assert process.stdout is not None
            assert "stalled\n" in process.stdout
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGINT, "interrupted: nothing has been left at {}"),
        (signal.SIGTERM, "ended by a signal: nothing has been left at {}"),
        (signal.SIGHUP, "ended by a signal: nothing has been left at {}"),
    ],
)
def test_a_signal_leaves_nothing(src: Path, tmp_path: Path, number: signal.Signals, said: str):
    with stalled(src, tmp_path / "dst") as process:
        process.send_signal(number)
        _, errors = process.communicate(timeout=limits.PROCESS)
    assert process.returncode == 128 + number
    assert errors.replace("\n", "").endswith(said.format(tmp_path / "dst")), errors
    assert os.listdir(tmp_path) == ["src"]


def test_what_a_killed_run_left_is_removed_by_the_next(
    src: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    dst = tmp_path / "dst"
    with stalled(src, dst) as process:
        (left,) = tmp_path.glob(".dst.*.partial")
        with pytest.raises(QuantizerError, match=rf"dst: {left} is there, of another run that is"):
            quantize_checkpoint(src, dst)
        assert left.exists()
        process.kill()
        process.wait(timeout=limits.PROCESS)
    assert left.exists()
    assert not dst.exists()
    quantize_checkpoint(src, dst, console=Console(width=300))
    assert f"{left}: left by a run that was killed, removed" in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == ["dst", "src"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS], ids=errno.errorcode.get)
def test_a_disk_that_fills_up_is_named(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    def full(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(TensorWriter, "write", full)
    said = rf"^dst: {tmp_path} cannot be written to \({os.strerror(code)}\); make room there, or"
    with pytest.raises(QuantizerError, match=said):
        quantize_checkpoint(src, tmp_path / "dst")
    assert os.listdir(tmp_path) == ["src"]


def test_a_folder_that_may_not_be_written_to_is_named(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def denied(path, *_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "mkdir", denied)  # the superuser may write anywhere
    with pytest.raises(QuantizerError, match=rf"^dst: {tmp_path} cannot be written to \(Perm"):
        quantize_checkpoint(src, tmp_path / "dst")


def test_a_source_that_cannot_be_read_is_not_taken_for_the_destination(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(self, name):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(src / "model.safetensors"))

    monkeypatch.setattr(WeightQuantizer, "quantize", broken)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        quantize_checkpoint(src, tmp_path / "dst")


def test_folders_above_are_made(llama: Path, tmp_path: Path):
    quantize_checkpoint(llama, tmp_path / "a" / "b" / "dst", dry_run=True)
    assert os.listdir(tmp_path) == []
    quantize_checkpoint(llama, tmp_path / "a" / "b" / "dst")
    assert os.listdir(tmp_path / "a" / "b") == ["dst"]


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another file"])
def test_of_folders_above_a_failure_leaves_what_it_did_not_make(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
):
    def fail(self, name):
        if beside:
            (tmp_path / "a" / "b" / "other").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(WeightQuantizer, "quantize", fail)
    (tmp_path / "a").mkdir()
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(src, tmp_path / "a" / "b" / "c" / "dst")
    assert sorted(os.listdir(tmp_path)) == ["a", "src"]
    assert os.listdir(tmp_path / "a") == (["b"] if beside else [])
    assert not beside or os.listdir(tmp_path / "a" / "b") == ["other"]


def test_a_folder_above_that_cannot_be_made_is_named(
    src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def denied(path, *_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "mkdir", denied)  # the superuser may write anywhere
    with pytest.raises(QuantizerError, match=rf"^dst: {tmp_path}/a cannot be written to \(Perm"):
        quantize_checkpoint(src, tmp_path / "a" / "dst")


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
