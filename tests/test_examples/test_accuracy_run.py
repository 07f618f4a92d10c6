"""The accuracy comparison as a command, on a stand-in for vLLM: measurements and server starts."""

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from examples.accuracy import run as running
from examples.accuracy import serving
from examples.accuracy.__main__ import app
from examples.accuracy.harness import HarnessError, TaskScore
from examples.accuracy.markdown import markdown
from examples.accuracy.results import Results
from tests import limits, tiny_llama
from tests.test_examples.fake_recording_vllm import logits_of, logprobs_of
from vllm_fp4_plugin.quantizer.errors import QuantizerError

FAKE = Path(__file__).with_name("fake_recording_vllm.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_llama.save(tmp_path_factory.mktemp("tiny") / "bf16")
    return folder


@pytest.fixture
def variant(model, tmp_path):
    """Maker of a checkpoint whose server has a given behaviour; returns the variant's option."""

    def make(name, **behaviour):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        for file in model.iterdir():
            if not (folder / file.name).exists():
                os.link(file, folder / file.name)
        (folder / "behaviour.json").write_text(json.dumps(behaviour))
        return f"{name}={folder}"

    return make


@pytest.fixture
def started(monkeypatch):
    """Folders for which servers were started, in order."""
    started = []

    def fake_vllm(checkpoint, port, method, options):
        assert options[0] == "--worker-extension-cls"
        started.append(
            checkpoint.parent.name if checkpoint.name == "checkpoint" else checkpoint.name
        )
        return [sys.executable, str(FAKE), str(port), str(checkpoint)]

    monkeypatch.setattr(serving, "vllm_command", fake_vllm)
    # Noise of the size that the format has; its rounding is tested elsewhere.
    monkeypatch.setattr("examples.accuracy.checkpoints.round_checkpoint", _noisy)
    return started


def _noisy(source, target):
    target.mkdir()
    (target / "behaviour.json").write_text('{"noise": 0.1}')


@pytest.fixture
def measure(model, tmp_path, started):
    text = tmp_path / "text.txt"
    text.write_text(tiny_llama.training_text()[:400])

    def measure(*variants, windows=4, more=()):
        result = CliRunner().invoke(app, [
            "measure", str(model), "--text", str(text), "--variants", ",".join(variants),
            "--out", str(tmp_path / "out"), "--windows", str(windows), "--window-length", "20",
            "--server-time-limit", str(limits.PROCESS), *more,
        ])  # fmt: skip
        file = tmp_path / "out" / "results.json"
        fields = json.loads(file.read_text()) if file.is_file() else None
        return result, fields

    return measure


def names(started):
    return ["rounded" if name.startswith("files-rounded") else name for name in started]


def test_figures_are_those_of_the_distributions(measure, variant, tmp_path):
    result, fields = measure(variant("near", noise=0.1))
    assert result.exit_code == 0, result.output
    bf16, weights, both, near = fields["variants"]
    text = tiny_llama.tokenizer().encode((tmp_path / "text.txt").read_text())
    starts = np.linspace(0, len(text) - 20, 4).astype(int)
    for start, logprob, kl, agreement in zip(
        starts, near["windows"]["logprob"], near["windows"]["kl"], near["windows"]["agreement"],
        strict=True,
    ):  # fmt: skip
        window = text[start : start + 20]
        exact, noisy = logits_of(window), logits_of(window, 0.1)
        assert logprob == pytest.approx(logprobs_of(noisy, window[1:]).mean(), abs=1e-6)
        p, q = (np.exp(z - np.log(np.exp(z).sum(-1, keepdims=True))) for z in (exact, noisy))
        assert kl == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-4)
        assert agreement == (exact.argmax(-1) == noisy.argmax(-1)).mean()
    assert near["windows"] == weights["windows"]
    assert np.mean(both["windows"]["kl"]) > np.mean(weights["windows"]["kl"])
    assert bf16["windows"]["kl"] == [0] * 4
    figures = near["figures"]
    above = np.mean(bf16["windows"]["logprob"]) - np.mean(near["windows"]["logprob"])
    assert figures["log_perplexity_difference"]["estimate"] == pytest.approx(above)
    assert figures["kl"]["low"] < figures["kl"]["estimate"] < figures["kl"]["high"]
    assert near["kernels"] == ["nvfp4-tc: o_proj ×1: gemm/reference (cpu)"]


def test_other_activations_are_measured_beside_the_yardsticks(measure, started):
    result, fields = measure("rounded-terms-2", "rounded-fp8", "rounded-terms-3")
    assert result.exit_code == 0, result.output
    assert names(started) == ["bf16", "rounded"]
    _, weights, both, two, fp8, three = (np.mean(v["windows"]["kl"]) for v in fields["variants"])
    assert weights < three < two < fp8 < both


def test_second_run_starts_no_server(measure, variant, started):
    near = variant("near", noise=0.1)
    _, first = measure(near)
    assert names(started) == ["bf16", "rounded", "near"]
    started.clear()
    _, second = measure(near)
    assert started == []
    assert first["variants"] == second["variants"]


def test_what_has_changed_is_measured_anew(measure, variant, started, tmp_path):
    near = variant("near", noise=0.1)
    measure(near)
    started.clear()
    measure(near, variant("far", noise=0.15))
    assert names(started) == ["far"]
    started.clear()
    measure(variant("near", noise=0.12), variant("far", noise=0.15))
    assert "near" in names(started)
    assert "bf16" not in names(started)
    started.clear()
    measure(near, more=["--server-options", "--dtype float16"])
    assert names(started) == ["bf16", "rounded", "near"]
    started.clear()
    (tmp_path / "text.txt").write_text(tiny_llama.training_text()[400:800])
    measure(near)
    assert names(started) == ["bf16", "rounded", "near"]


def test_nothing_is_compared_with_an_earlier_reference(measure, variant, started, model):
    near = variant("near", noise=0.1)
    measure(near)
    started.clear()
    changed = model / "behaviour.json"
    changed.write_text('{"noise": 0.05}')
    try:
        measure(near)
    finally:
        changed.unlink()
    assert names(started) == ["bf16", "rounded", "near"]


def test_failing_variant_costs_itself_alone(measure, variant, started):
    broken = variant("broken", error="ValueError: no such scale")
    result, fields = measure(broken, variant("near", noise=0.1))
    assert result.exit_code == 1
    *_, failed, near = fields["variants"]
    [error] = failed["errors"]
    assert error.startswith("ValueError: no such scale (")
    assert failed["windows"] is None
    assert near["windows"]
    assert not near["errors"]
    assert "broken failed: ValueError: no such scale" in result.output
    started.clear()
    measure(variant("broken", noise=0.1), variant("near", noise=0.1))
    assert "broken" in names(started)  # a failure is not kept


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        ({"lie": 0.01}, "DistributionError: logits: differ from the server's .* by 0.01 nats"),
        ({"nan": True}, "ValueError: logits: hold NaN"),
        ({"rows": 1}, r"DistributionError: logits: .* computed \[\[20, 1\]\] rows for a window of"),
    ],
)
def test_wrong_logits_are_an_error(measure, variant, behaviour, error):
    result, fields = measure(variant("odd", **behaviour))
    assert result.exit_code == 1
    odd = fields["variants"][-1]
    assert odd["windows"] is None
    [told] = odd["errors"]
    assert re.match(error, told)


def test_without_the_reference_nothing_is_compared(measure, variant, monkeypatch, started):
    monkeypatch.setattr(
        serving, "vllm_command", lambda *_: [sys.executable, "-c", "raise OSError('no memory')"]
    )
    result, fields = measure(variant("near"))
    assert result.exit_code == 1
    [bf16] = fields["variants"]
    assert bf16["errors"][0].startswith("OSError: no memory")


def test_far_variant_is_flagged(measure, variant):
    result, fields = measure(variant("near", noise=0.15), variant("far", noise=1.0))
    assert result.exit_code == 1
    *_, near, far = fields["variants"]
    assert near["flags"] == []
    [flag] = far["flags"]
    assert "times that of rounded-both" in flag
    assert "far is wrong: its divergence is" in result.output
    assert "o_proj ×1: gemm/reference (cpu) [bf16, rounded-weights," in result.output


def test_gpu_variant_is_refused_by_name(measure, variant):
    result, fields = measure("modelopt", variant("near", noise=0.1), more=["--calibrate", __file__])
    assert result.exit_code == 1
    *_, modelopt, near = fields["variants"]
    assert modelopt["errors"] == ["vLLM has kernels for it on GPUs alone; measure it on one"]
    assert near["windows"]


def test_tasks_are_scored_once_and_fail_alone(measure, variant, monkeypatch, started, tmp_path):
    calls = []

    def score(url, model, tokenizer, tasks, folder, limit, made, log):
        assert tmp_path / "out" in log.parents
        assert tmp_path / "out" / "made" not in log.parents
        calls.append((tasks, limit))
        if len(calls) == 2:
            raise HarnessError("lm-evaluation-harness: no such task")
        return [TaskScore("cloze", "acc", 0.5, 0.05, 100)]

    monkeypatch.setattr(serving, "score", score)
    monkeypatch.setattr(running, "unknown_tasks", lambda tasks, made: [])
    near = variant("near", noise=0.1)
    more = ["--tasks", "cloze", "--task-limit", "100"]
    result, fields = measure(near, more=more)
    assert calls == [(("cloze",), 100)] * 2  # the yardsticks have none
    assert fields["variants"][0]["tasks"][0]["value"] == 0.5
    assert fields["variants"][-1]["errors"] == ["HarnessError: lm-evaluation-harness: no such task"]
    assert fields["variants"][-1]["windows"]
    assert result.exit_code == 1
    started.clear()
    result, fields = measure(near, more=more)
    assert names(started) == ["near"]
    assert len(calls) == 3
    assert result.exit_code == 0
    assert "50.00% [40.20%, 59.80%]" in result.output


def test_nothing_is_written_where_all_cannot_be(measure, variant, tmp_path):
    measure(variant("near", noise=0.1))
    file, plot = tmp_path / "out/results.json", tmp_path / "a.png"
    arguments = ["show", str(file), "--plot", str(plot), "--markdown", str(tmp_path / "b" / "a.md")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "is no folder; create it first" in " ".join(result.output.split())
    assert not plot.exists()


def test_results_are_shown_elsewhere(measure, variant, tmp_path):
    measure(variant("near", noise=0.1), variant("far", noise=1.0))
    file, plot, text = (tmp_path / name for name in ("out/results.json", "a.png", "a.md"))
    arguments = ["show", str(file), "--plot", str(plot), "--markdown", str(text)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    lines = text.read_text().splitlines()
    assert any(line.startswith("| near | near, by nvfp4-tc | ") for line in lines)
    assert "- far is wrong: its divergence is" in text.read_text()
    assert markdown(Results.read(file)) == text.read_text()
    other = tmp_path / "other.json"
    other.write_text("{}")
    result = CliRunner().invoke(app, ["show", str(other)])
    assert result.exit_code == 1
    assert "holds no results" in result.output
    result = CliRunner().invoke(app, ["show", str(tmp_path / "absent.json")])
    assert result.exit_code == 1
    assert "absent.json cannot be read" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "nvfp4"], "--variants: is 'nvfp4', must be among"),
        (["--variants", "nvfp4-tc"], "--calibrate: is not given, nvfp4-tc need it"),
        (["--calibrate", "/nowhere"], "--calibrate: /nowhere cannot be read"),
        (["--calibrate", "/dev/null"], "--calibrate: /dev/null is empty; give a text"),
        (["--server-options", '"'], "--server-options: is '\"', must be options as a shell takes"),
        (["--out", __file__], "--out: "),
        (["--window-length", "256"], "--window-length: is 256, must be below 256"),
        (["--text", "/nowhere"], "--text: /nowhere cannot be read"),
        (["--windows", "4000"], "ask for fewer with --windows"),
    ],
)
def test_bad_options_are_named(model, tmp_path, arguments, message):
    text = tmp_path / "text.txt"
    text.write_text("some text " * 20)
    given = ["measure", str(model), "--text", str(text), "--variants", f"mine={model}"]
    given += ["--window-length", "20", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*given, *arguments])
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_unknown_tasks_are_refused_before_any_server(measure, variant, started, monkeypatch):
    monkeypatch.setattr(running, "unknown_tasks", lambda tasks, made: [tasks[-1]])
    result, fields = measure(variant("near"), more=["--tasks", "next_word,foo"])
    assert result.exit_code == 1
    assert "--tasks: foo are no tasks of lm-evaluation-harness, must be among" in result.output
    assert started == []
    assert fields is None


def test_missing_harness_is_told_before_any_server(measure, variant, started, monkeypatch):
    monkeypatch.setattr("examples.accuracy.harness.find_spec", lambda name: None)
    result, _ = measure(variant("near"), more=["--tasks", "next_word"])
    assert result.exit_code == 1
    assert "--tasks: lm_eval: is not installed" in result.output
    assert started == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "foo"], "--variants: is 'foo', must be among"),
        (["--tasks", "foo"], "--tasks: foo are no tasks"),
        (["--out", __file__], "is a file; name another folder"),
    ],
)
def test_demo_names_bad_options_before_it_trains(tmp_path, monkeypatch, arguments, message):
    def train(*_):
        pytest.fail("a model was trained")

    monkeypatch.setattr("examples.accuracy.small_model.make_small_model", train)
    monkeypatch.setattr(running, "unknown_tasks", lambda tasks, made: set(tasks) & {"foo"})
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "out"), *arguments])
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_quantised_model_is_refused(tmp_path, model):
    (tmp_path / "text.txt").write_text("text")
    folder = tmp_path / "quantised"
    folder.mkdir()
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {}}))
    given = ["measure", str(folder), "--text", str(tmp_path / "text.txt"), "--variants", "modelopt"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 1
    assert "is quantised already; give the 16-bit checkpoint" in result.output


def test_room_for_logits_is_demanded(measure, variant, monkeypatch):
    usage = type("Usage", (), {"free": 40_000})()
    monkeypatch.setattr(running.shutil, "disk_usage", lambda _: usage)
    result, _ = measure(variant("near"))
    assert result.exit_code == 1
    assert "0.0 GB free, the 16-bit model's logits take" in result.output


def test_activations_that_are_not_rounded_are_an_error(measure, variant, monkeypatch):
    def no_linears(source, target):
        target.mkdir()
        (target / "behaviour.json").write_text('{"noise": 0.1, "linears": 0}')

    monkeypatch.setattr("examples.accuracy.checkpoints.round_checkpoint", no_linears)
    _, fields = measure(variant("near", noise=0.1))
    _, weights, both, _ = fields["variants"]
    [error] = weights["errors"]
    assert error.startswith("DistributionError: round_activations: found [0] linears")
    assert both["windows"] is None


def test_without_the_yardsticks_variants_are_measured_and_not_judged(measure, variant, monkeypatch):
    def refuse(*_):
        raise QuantizerError("experts: are not supported")

    monkeypatch.setattr("examples.accuracy.checkpoints.round_checkpoint", refuse)
    result, fields = measure(variant("far", noise=1.0))
    assert result.exit_code == 1
    _, weights, both, far = fields["variants"]
    assert weights["errors"] == ["QuantizerError: experts: are not supported"]
    assert both["windows"] is None
    assert far["windows"]
    assert far["flags"] == []
    assert "no variant's distributions were judged" in result.output
