"""``python -m vllm_fp4_plugin verify``: its findings, or a refusal in one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import terminal
from tests.catalogue import checkpoint, facts
from tests.engine import report_command as report
from tests.engine import verify_command as verify

pytestmark = pytest.mark.slow


def changed(model: Path, directory: Path, name: str, value: float | None) -> Path:
    """Copy of a checkpoint without a tensor, or with another last value in that tensor."""
    copy = shutil.copytree(model, directory / "changed")
    tensors = load_file(copy / "model.safetensors")
    if value is None:
        del tensors[name]
    else:
        tensors[name].view(-1)[-1] = value
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_summary(modelopt: Path) -> None:
    done = verify(modelopt, "--values")
    assert done.exit_code == 0, done.stderr
    tensors = len(load_file(modelopt / "model.safetensors"))
    assert done.stdout.splitlines() == [
        f"{modelopt}: complete, {tensors} tensors in 1 file",
        "modelopt: 14 NVFP4 layers, 32 global scales within bounds",
        "values: finite, block scales positive",
    ]


@pytest.mark.parametrize("how", [[], ["--values"]], ids=["headers", "values"])
def test_json_tells_what_the_text_tells(
    how: list[str], modelopt: Path, bf16_checkpoint: Path
) -> None:
    for model, format in ((modelopt, "modelopt"), (bf16_checkpoint, None)):
        text, done = verify(model, *how), verify(model, *how, "--json")
        assert text.exit_code == done.exit_code == 0, done.stderr
        found = json.loads(done.stdout)
        lines = [f"{found['directory']}: complete, {found['tensors']} tensors in 1 file"]
        layers, scales = found["nvfp4_layers"], found["global_scales"]
        if format is None:
            assert layers is scales is None
        else:
            lines.append(f"{format}: {layers} NVFP4 layers, {scales} global scales within bounds")
        assert text.stdout.splitlines()[: len(lines)] == lines
        assert found["format"] == format
        assert found["files"] == 1
        assert found["values_checked"] == bool(how) == ("values: finite" in text.stdout)


def test_a_refusal_leaves_no_document(modelopt: Path, tmp_path: Path) -> None:
    copy = changed(modelopt, tmp_path, "model.norm.weight", None)
    done = verify(copy, "--json")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "holds no model.norm.weight" in done.stderr


def test_a_narrow_terminal_and_a_pipe(modelopt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    piped = verify(modelopt, "--values").stdout
    monkeypatch.setenv("COLUMNS", "300")
    assert verify(modelopt, "--values").stdout == piped
    terminal.narrow(monkeypatch, 50)
    narrow = verify(modelopt, "--values").stdout
    assert terminal.words(narrow) == terminal.words(piped)
    assert len(narrow.splitlines()) > len(piped.splitlines())


def test_a_checkpoint_that_is_not_quantised(bf16_checkpoint: Path) -> None:
    done = verify(bf16_checkpoint)
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"{bf16_checkpoint}: complete, 21 tensors in 1 file\n"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.norm.weight", None, "{copy}: holds no model.norm.weight, which the model needs"),
        (
            "model.layers.0.mlp.up_proj.input_scale",
            1e30,
            "{copy}/model.safetensors: model.layers.0.mlp.up_proj.input_scale: holds ",
        ),
    ],
    ids=["missing", "scale"],
)
def test_refusal_is_one_line_and_a_status(
    name: str, value: float | None, message: str, modelopt: Path, tmp_path: Path
) -> None:
    copy = changed(modelopt, tmp_path, name, value)
    done = verify(copy)
    assert done.exit_code == 1
    assert done.stdout == ""
    [line] = [line for line in done.stderr.splitlines() if str(copy) in line]
    assert line.startswith(f"error: {message.format(copy=copy)}")


def test_values_are_read_on_demand(modelopt: Path, tmp_path: Path) -> None:
    copy = changed(modelopt, tmp_path, "model.norm.weight", torch.nan)
    assert verify(copy).exit_code == 0
    done = verify(copy, "--values")
    assert done.exit_code == 1
    assert "model.norm.weight: holds 1 NaN or infinite values" in done.stderr


@pytest.mark.parametrize("content", [None, {}], ids=["no directory", "no files"])
def test_what_is_no_checkpoint(content: dict[str, str] | None, tmp_path: Path) -> None:
    model = tmp_path if content is not None else tmp_path / "nothing"
    done = verify(model)
    assert done.exit_code == 1
    expected = "is no directory, must be" if content is None else "holds no safetensors files"
    assert done.stderr.startswith(f"error: {model}: {expected}")


def test_a_buffer_that_the_checkpoint_lacks(tmp_path: Path) -> None:
    """A missing layer scalar would make Gemma 4 multiply a layer's output by 1."""
    path = checkpoint.write(facts.named("Gemma 4 (dense, vision)"), tmp_path / "whole")
    assert verify(path, "--values").exit_code == 0
    name = "model.language_model.layers.1.layer_scalar"
    copy = changed(path, tmp_path, name, None)
    # A GPU, as without AVX-512 vLLM 0.33's CPU attention refuses the checkpoint's FP8 cache.
    for done in (verify(copy), verify(copy, "--values"), report(copy, "--arch", "sm_100")):
        assert done.exit_code == 1
        assert f"{copy}: holds no {name}, which the model needs" in done.stderr


@pytest.mark.parametrize("family", ["Gemma 4 (dense, vision)", "MiniMax M2"])
@pytest.mark.usefixtures("cpu_without_fp8_cache")
def test_files_are_judged_and_not_this_machine(family: str, tmp_path: Path) -> None:
    """This CPU serves neither: for want of an FP8 cache, and for its router."""
    path = checkpoint.write(facts.named(family), tmp_path)
    for how in ([], ["--arch", "cpu"]):
        assert report(path, *how).exit_code == 1
    done = verify(path)
    assert done.exit_code == 0, done.stderr
    assert report(path).exit_code == 1  # also after the files were verified


def test_code_of_a_checkpoint_and_what_its_model_skips(tmp_path: Path) -> None:
    """Layer scales of RADIO's tower are in no checkpoint of the model, which skips them."""
    family = facts.named("Nemotron Nano 2 VL (Mamba-2 hybrid, vision)")
    path = checkpoint.write(family, tmp_path)
    refused = verify(path)
    assert refused.exit_code == 1
    assert "trust_remote_code=True" in refused.stderr
    done = verify(path, "--trust-remote-code")
    assert done.exit_code == 0, done.stderr
    planned = report(path, "--trust-remote-code")
    assert planned.exit_code == 0, planned.stderr
    bias = "vision_model.radio_model.model.blocks.3.attn.qkv.bias"
    lacking = verify(changed(path, tmp_path, bias, None), "--trust-remote-code")
    assert f"holds no {bias}, which the model needs" in lacking.stderr
