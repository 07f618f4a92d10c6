"""The training command: files, settings, the compiled path, and refusals."""

import json
import shutil
from dataclasses import replace
from functools import partialmethod
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from examples.demo.corpus import STANDARD_LIBRARY, is_held_out
from examples.demo.tokenizer import train_tokenizer
from examples.demo.train import TrainSettings, build_model, train
from examples.train_llama.__main__ import app
from examples.train_llama.held_out import held_out_perplexity
from examples.train_llama.sizes import SIZES

OPTIONS = ["--size", "tiny", "--device", "cpu", "--threads", "1"]


def run(out, *options):
    return CliRunner().invoke(app, ["--out", str(out), *OPTIONS, *options], env={"COLUMNS": "400"})


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Folder with some dozens of the standard library's modules."""
    folder = tmp_path_factory.mktemp("root")
    for path in STANDARD_LIBRARY.glob("[a-g]*.py"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, root):
    out = tmp_path_factory.mktemp("trained")
    result = run(out, "--root", str(root), "--steps", "12")
    assert result.exit_code == 0, result.output
    return out


def test_checkpoint_and_tokenizer_load(trained):
    model = AutoModelForCausalLM.from_pretrained(trained / "bf16", dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(trained / "bf16")
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == len(tokenizer) == SIZES["tiny"].vocabulary
    assert tokenizer("x").input_ids[0] == tokenizer.bos_token_id


def test_texts_are_of_their_own_side(trained, root):
    sources = {path.name: path.read_text() for path in root.glob("*.py")}
    held_out, calibration = (
        (trained / name).read_text() for name in ("held_out.txt", "calibration.txt")
    )
    found = {path for path, text in sources.items() if len(text) > 200 and text in held_out}
    begun = {
        path for path, text in sources.items() if len(text) > 200 and text[:200] in calibration
    }
    assert found
    assert all(is_held_out(path) for path in found)
    assert begun
    assert not any(is_held_out(path) for path in begun)


def test_record_tells_the_run(trained):
    record = json.loads((trained / "training.json").read_text())
    settings = record["settings"]
    assert {name: settings[name] for name in SIZES["tiny"].settings} == SIZES["tiny"].settings
    assert record["steps"] == 12
    assert record["tokens_seen"] == 12 * settings["batch"] * settings["sequence"]
    assert record["text"]["files"] > 20
    assert record["loss_curve"][0]["loss"] > record["loss_curve"][-1]["loss"] == record["loss"]
    assert record["held_out"]["perplexity"] < SIZES["tiny"].vocabulary
    assert record["versions"]["torch"]


def test_perplexity_is_that_of_the_written_checkpoint(trained):
    tokenizer = AutoTokenizer.from_pretrained(trained / "bf16")
    model = AutoModelForCausalLM.from_pretrained(trained / "bf16", dtype="auto")
    tokens = np.array(tokenizer((trained / "held_out.txt").read_text()).input_ids)[:256]
    found, count = held_out_perplexity(trained / "bf16", tokens, length=128, device="cpu")
    windows = torch.tensor(tokens).view(2, 128)
    assert count == 2 * 127
    assert np.log(found) == pytest.approx(model(windows, labels=windows).loss.item(), abs=1e-2)


def test_time_and_text_are_bounded(tmp_path, root, monkeypatch):
    """The clock reads 0 s at the start and a quarter of a second more at each step."""
    clock = SimpleNamespace(monotonic=count(0, 0.25).__next__)
    monkeypatch.setattr("examples.demo.train.time", clock)
    result = run(tmp_path, "--root", str(root), "--seconds", "1", "--megabytes", "0.8")
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["seconds"]["training, compiling included"] > 0
    assert record["steps"] == 3
    assert 400_000 < record["text"]["characters"] < 800_000


def test_layers_compile_once_and_compute_the_same(monkeypatch):
    """The compiler backend generates no code: the compiled regions are under test."""
    compile = partialmethod(torch.nn.Module.compile, backend="aot_eager")
    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    tokenizer = train_tokenizer(["some text\n"], vocabulary=270)
    tokens = np.random.default_rng(0).integers(256, size=2000).astype(np.uint16)
    tiny = TrainSettings(steps=3, threads=1, hidden=32, intermediate=64, layers=4, heads=2,
                         kv_heads=1, head_dim=16, batch=2, sequence=16)  # fmt: skip
    torch._dynamo.utils.counters.clear()
    model, compiled = train(replace(tiny, compile=True), tokens, tokenizer)
    assert all(layer._compiled_call_impl for layer in model.model.layers)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    _, eager = train(tiny, tokens, tokenizer)
    assert compiled.loss == pytest.approx(eager.loss, abs=1e-3)


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_what_they_say_and_split_into_blocks(name):
    size = SIZES[name]
    settings = TrainSettings(**size.settings)
    tokenizer = train_tokenizer(["some text\n"], vocabulary=270)
    with torch.device("meta"):
        model = build_model(settings, tokenizer)
    for path, module in model.model.layers.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert module.in_features % 64 == 0, path
    missing = (size.vocabulary - len(tokenizer)) * settings.hidden
    millions = (model.num_parameters() + missing) / 1e6
    assert millions == pytest.approx(0.7 if name == "tiny" else float(name[:-1]), rel=0.05)


def unwrapped(output):
    """Output without the line breaks that a terminal's width inserts."""
    return " ".join(output.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "7b"], "size: is '7b', must be tiny, 20m, 125m, 250m"),
        (["--device", "tpu"], "device: is 'tpu', must be cuda or cpu"),
        (["--root", "/absent"], "root: /absent is not a folder"),
        (["--out", __file__], "is a file; name another folder"),
    ],
    ids=["size", "device", "root", "out"],
)
def test_bad_options_are_named(tmp_path, options, message):
    out = tmp_path / "out"
    result = run(out, "--steps", "1", *options)
    assert result.exit_code == 1
    assert message in unwrapped(result.output)
    assert not out.exists()


def test_a_model_is_not_overwritten(trained):
    result = run(trained, "--steps", "1")
    assert result.exit_code == 1
    message = "bf16 exists; choose another folder or remove it"
    assert message in unwrapped(result.output)


def test_compiling_needs_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    result = run(tmp_path / "out", "--steps", "1", "--compile")
    assert result.exit_code == 1
    assert "compile: needs a C compiler" in unwrapped(result.output)
