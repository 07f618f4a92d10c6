"""Command line of the tool: output, exit status, and a quick ``--help``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.test_quantizer.checkpoints import LINEARS, read_config, read_tensors
from vllm_fp4_plugin.quantizer.command import quantize

app = typer.Typer()
app.command()(quantize)


def test_every_option(llama: Path, text: Path, tmp_path: Path):
    dst = tmp_path / "dst"
    arguments = [llama, dst, "--format", "compressed-tensors", "--scales", "four-over-six",
                 "--calibrate", text, "--ignore", "*.down_proj", "--ignore", "re:.*[.]o_proj",
                 "--kv-cache-scheme", "fp8", "--calibration-tokens", "300", "--seq-len", "64",
                 "--shared-fused-scale"]  # fmt: skip
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])

    assert result.exit_code == 0, result.output
    assert "weight-only" not in result.output
    assert "10 quantised, 5 kept" in result.output
    assert "NVFP4, measured on 256 tokens" in result.output
    assert str(dst) in result.output
    ignore = read_config(dst)["quantization_config"]["ignore"]
    assert ignore == [n for n in LINEARS if n.endswith(("down_proj", "o_proj"))] + ["lm_head"]
    tensors = read_tensors(dst)
    assert "model.layers.0.self_attn.k_scale" in tensors
    gate, up = (tensors[f"model.layers.0.mlp.{n}_proj.weight_global_scale"] for n in ("gate", "up"))
    assert gate == up


def test_ignore_file_adds_to_ignore(llama: Path, tmp_path: Path):
    listed = tmp_path / "ignore.txt"
    listed.write_text("# costly\n*.down_proj\n\nre:.*1[.].*[.]o_proj # one\n", encoding="utf-8")
    dst = tmp_path / "dst"
    arguments = [llama, dst, "--ignore-file", listed, "--ignore", "model.layers.0.self_attn.o_proj"]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    ignore = read_config(dst)["quantization_config"]["ignore"]
    assert ignore == [n for n in LINEARS if n.endswith(("down_proj", "o_proj"))] + ["lm_head"]


def test_fused_linears_of_an_ignore_file_stay_together(llama: Path, tmp_path: Path):
    listed = tmp_path / "ignore.txt"
    listed.write_text("model.layers.0.self_attn.k_proj\n")
    arguments = [str(llama), str(tmp_path / "dst"), "--ignore-file", str(listed)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "ignore both or neither" in result.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "error: ignore_file: {file} is not a file; give a list of patterns"),
        (b"# nothing\n\n", "error: ignore_file: {file} holds no pattern; write one a line"),
        (b"\xff\n", "error: ignore_file: {file} is not UTF-8"),
        (b"absent_proj\n", "error: ignore: 'absent_proj' covers no linear"),
    ],
    ids=["missing", "empty", "encoding", "pattern"],
)
def test_bad_ignore_files_are_named(llama: Path, tmp_path: Path, content, message):
    file = tmp_path / "ignore.txt"
    if content is not None:
        file.write_bytes(content)
    arguments = [str(llama), str(tmp_path / "dst"), "--ignore-file", str(file)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith(message.format(file=file))
    assert not (tmp_path / "dst").exists()


def test_weight_only_is_said(llama: Path, tmp_path: Path):
    result = CliRunner().invoke(app, [str(llama), str(tmp_path / "dst")])
    assert result.exit_code == 0, result.output
    assert "no --calibrate: weight-only, activations stay in 16 bits" in result.output
    assert "16-bit (weight-only)" in result.output


@pytest.mark.parametrize("calibrated", [False, True], ids=["weight-only", "calibrated"])
def test_a_dry_run_tells_what_a_run_would_and_writes_nothing(
    llama: Path, text: Path, tmp_path: Path, calibrated: bool
):
    more = ["--calibrate", str(text), "--seq-len", "64"] if calibrated else []
    dry, wet = (
        CliRunner().invoke(app, [str(llama), str(tmp_path / "dst"), *more, *dry])
        for dry in (["--dry-run"], [])
    )
    assert dry.exit_code == 0, dry.output
    rows, written = (
        {row.split("│")[1].strip(): row.split("│")[2].strip() for row in lines if "│" in row}
        for lines in (dry.output.splitlines(), wet.output.splitlines())
    )
    same = "linears", "size", "bits per quantised weight"
    assert {name: rows[name] for name in same} == {name: written[name] for name in same}
    assert rows["nothing written to"] == str(tmp_path / "dst")
    assert rows["time to quantise, about"].startswith("0:0")
    assert ("to be measured on" in rows["activations"]) == calibrated
    assert rows["time to quantise, about"].endswith("time to calibrate") == calibrated


def test_a_dry_run_leaves_no_folder_and_refuses_as_a_run_does(llama: Path, tmp_path: Path):
    for more in ([], ["--format", "gguf"], ["--ignore", "absent"]):
        dry = CliRunner().invoke(app, [str(llama), str(tmp_path / "dst"), "--dry-run", *more])
        assert dry.exit_code == bool(more)
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--format", "gguf"], "error: format: is 'gguf', must be one of modelopt, compressed"),
        (["--ignore", "[/red]"], "error: ignore: '[/red]' covers no linear"),
        (["--calibrate", "absent.txt"], "error: calibrate: absent.txt is not a file"),
    ],
    ids=["choice", "markup", "file"],
)
def test_errors_have_no_traceback(llama: Path, tmp_path: Path, arguments, message):
    result = CliRunner().invoke(app, [str(llama), str(tmp_path / "dst"), *arguments])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith(message)
    assert os.listdir(tmp_path) == []


@pytest.mark.processes
def test_importing_the_command_is_cheap():
    code = (
        "import sys, vllm_fp4_plugin.quantizer.command;"
        "print([m for m in ('torch', 'transformers', 'safetensors', 'vllm') if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    shown = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout == "[]\n"


@pytest.mark.processes
def test_nothing_imports_vllm():
    code = (
        "import sys, vllm_fp4_plugin.quantizer.checkpoint;"
        "print([m for m in ('vllm', 'compressed_tensors') if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    shown = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout == "[]\n"
