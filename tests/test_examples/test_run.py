"""The whole demo on stand-ins for vLLM and the quantiser: cached stages, and stages always run."""

import json
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from examples import quantize
from examples.completions import Completion
from examples.demo import display, pipeline, run, serve_commands
from examples.demo.__main__ import app
from examples.demo.corpus import Corpus, Document
from examples.demo.pipeline import MeasureSettings
from examples.demo.train import TrainSettings
from examples.quantize import QuantizeError, quantize_command
from examples.server import HOST, ServerError, free_port, running
from examples.stages import StageCache
from tests import limits

FAKE = Path(__file__).with_name("fake_vllm.py")
TRAINING = TrainSettings(
    steps=1,
    threads=1,
    hidden=32,
    intermediate=64,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=16,
    batch=2,
    sequence=16,
)
MEASURING = MeasureSettings(
    windows=2, window_length=20, max_tokens=3, server_time_limit=limits.PROCESS
)
REPORT = "nvfp4-tc: o_proj ×1: nvfp4_gemm/reference (cpu)"


@pytest.fixture
def calls(monkeypatch):
    """Run every stage at small sizes; yield calls of the quantiser and starts of servers."""
    calls = []
    corpus = Corpus(
        tuple(Document(f"t{i}.py", f"x{i} = {i}  # training text\n" * 20) for i in range(9)),
        (Document("h.py", "y = 1  # held-out text\n" * 20),),
    )

    def copy(source, target, options):
        _, _, _, scales, _, calibration = options
        calibration = Path(calibration)
        assert "training text" in calibration.read_text()
        assert "held-out" not in calibration.read_text()
        calls.append(f"quantize {scales}")
        shutil.copytree(source, target)

    def fake_vllm(model, port, quantization):
        assert (model / "model.safetensors").is_file()
        calls.append(f"serve {quantization}")
        return [sys.executable, str(FAKE), str(port), REPORT if quantization else ""]

    monkeypatch.setattr(run, "read_corpus", lambda: corpus)
    monkeypatch.setattr(pipeline, "quantize", copy)
    monkeypatch.setattr(pipeline, "vllm_command", fake_vllm)
    monkeypatch.setattr(pipeline, "keep_freed_memory", lambda: None)
    return calls


def demo(root, fresh=False, variants=False, training=TRAINING):
    cache = StageCache(root, fresh)
    file = run.run(cache, training, MEASURING, variants, started=time.monotonic())
    return json.loads(file.read_text())


def test_second_run_reuses_all_but_the_nvfp4_server(tmp_path, calls, capsys):
    first = demo(tmp_path)
    assert calls == ["serve None", "quantize absmax", "serve nvfp4-tc"]
    calls.clear()
    second = demo(tmp_path)
    assert calls == ["serve nvfp4-tc"]
    assert [s["stage"] for s in second["stages"] if not s["reused"]] == [
        "nvfp4-absmax-measured",
        "all",
    ]
    assert first["models"][0] == second["models"][0]
    shown = capsys.readouterr().out
    assert "o_proj ×1: nvfp4_gemm/reference (cpu)" in shown
    assert "found in the cache" in shown


def test_the_end_names_what_stays_and_how_to_serve_it(tmp_path, calls, capsys):
    demo(tmp_path / "cache")
    shown = capsys.readouterr().out
    [made] = (tmp_path / "cache").glob("nvfp4-absmax-*/checkpoint")
    *_, serve, request = [line for line in shown.splitlines() if line]
    assert f"vllm serve {made} --quantization nvfp4-tc" in serve
    assert request.startswith("curl ")
    named = [Path(word) for word in shown.split() if word.startswith(str(tmp_path))]
    assert len(named) > 5
    assert [path for path in named if not path.exists()] == []


@pytest.mark.parametrize("is_taken", [False, True], ids=["8000 is free", "8000 is taken"])
def test_commands_run_as_they_are_printed(tmp_path, monkeypatch, is_taken):
    folder = tmp_path / "with 'quotes' and spaces"
    folder.mkdir()
    vllm = folder / "vllm"
    code = "import runpy, sys; sys.argv[1:] = [sys.argv[sys.argv.index('--port') + 1]]; "
    code += f"runpy.run_path({str(FAKE)!r}, run_name='__main__')"
    vllm.write_text(f"#!{sys.executable}\n{code}\n")
    vllm.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setattr(serve_commands, "PORT", free_port())
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with socket.socket() as other:
        if is_taken:
            other.bind((HOST, serve_commands.PORT))
            other.listen()
        serve, request = serve_commands.serve_commands(folder, "nvfp4-tc", max_tokens=7)
        port = int(serve.split("--port ")[1].split()[0])
        assert (port == serve_commands.PORT) != is_taken
        with running(["bash", "-c", serve], port, tmp_path / "log", limits.PROCESS):
            done = subprocess.run(
                ["bash", "-c", request], capture_output=True, text=True, check=True, cwd="/"
            )
    assert json.loads(done.stdout)["choices"][0]["text"] == "x" * 7


def test_prompt_and_answer_are_told_apart_without_colours(capsys):
    display.completions([Completion("def f(", "x):\n\n", 9)])
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [line.split("│")[1].strip() for line in shown] == ["prompt", "answer", "9 tokens"]
    assert [line.split("│")[2].strip() for line in shown] == ["def f(", "x):", ""]


def test_the_tool_prints_no_path_of_a_folder_that_is_renamed(tmp_path, monkeypatch):
    seen = []

    def fake(command, *, cwd, env, check):
        seen.append((command, cwd, env["PYTHONPATH"].split(":")[0]))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(quantize.subprocess, "run", fake)
    quantize.quantize(Path("src"), tmp_path / "made" / "checkpoint", [])
    [(command, cwd, path)] = seen
    assert command[-2:] == [str(Path("src").resolve()), "checkpoint"]
    assert cwd == tmp_path / "made"
    assert (Path(path) / "vllm_fp4_plugin").is_dir()


def test_variants_are_measured_once_and_compared(tmp_path, calls):
    demo(tmp_path)
    calls.clear()
    results = demo(tmp_path, variants=True)
    assert calls == ["quantize sweep", "serve nvfp4-tc", "serve nvfp4-tc"]
    assert [row["model"] for row in results["models"]] == ["BF16", "NVFP4 sweep", "NVFP4 absmax"]
    calls.clear()
    demo(tmp_path, variants=True)
    assert calls == ["serve nvfp4-tc"]


def test_a_mixture_of_experts_has_a_model_and_results_of_its_own(tmp_path, calls):
    demo(tmp_path)
    calls.clear()
    results = demo(tmp_path, training=replace(TRAINING, experts=4))
    assert calls == ["serve None", "quantize absmax", "serve nvfp4-tc"]
    assert [s["stage"] for s in results["stages"] if s["reused"]] == ["text"]
    assert results["training"]["experts"] == 4
    assert json.loads((tmp_path / "results.json").read_text())["training"]["experts"] == 0


@pytest.mark.parametrize(("options", "experts"), [([], 0), (["--moe"], 8)], ids=["dense", "moe"])
def test_command_trains_experts_on_demand(tmp_path, monkeypatch, options, experts):
    asked = []
    monkeypatch.setattr(run, "run", lambda _, training, *rest: asked.append(training.experts))
    result = CliRunner().invoke(app, ["--cache-dir", str(tmp_path), *options])
    assert result.exit_code == 0
    assert asked == [experts]


def test_fresh_run_makes_everything_again(tmp_path, calls):
    demo(tmp_path)
    calls.clear()
    results = demo(tmp_path, fresh=True)
    assert calls == ["serve None", "quantize absmax", "serve nvfp4-tc"]
    assert not any(stage["reused"] for stage in results["stages"])


def test_results_hold_figures_settings_and_versions(tmp_path, calls):
    results = demo(tmp_path)
    assert results["training"]["steps"] == 1
    assert results["measuring"]["windows"] == 2
    assert results["held_out_tokens_predicted"] == 2 * 19
    assert {"torch", "transformers"} <= results["versions"].keys()
    assert results["machine"]["python"]
    bf16, nvfp4 = results["models"]
    assert nvfp4["perplexity"] == bf16["perplexity"] > 1
    assert bf16["log_perplexity_above_bf16"] is None
    assert nvfp4["log_perplexity_above_bf16"] == {"estimate": 0, "low": 0, "high": 0}
    assert nvfp4["kernels"] == [
        {"layer": "o_proj", "count": 1, "kernel": "nvfp4_gemm/reference (cpu)"}
    ]
    assert nvfp4["checkpoint_bytes"] > 0


def test_quantised_server_that_reports_no_kernels_is_an_error(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(
        pipeline, "vllm_command", lambda model, port, _: [sys.executable, str(FAKE), str(port)]
    )
    with pytest.raises(ValueError, match="it is unknown which kernels ran"):
        demo(tmp_path)


def test_tool_is_called_by_its_documented_options():
    command = quantize_command(Path("src"), Path("dst"), ["--scales", "sweep"])
    assert command[0] == sys.executable
    assert " ".join(command[1:]) == "-m vllm_fp4_plugin quantize src dst --scales sweep"


def test_failing_tool_is_named_with_its_command(monkeypatch):
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    monkeypatch.setattr(quantize, "quantize_command", lambda *_: command)
    with pytest.raises(QuantizeError, match=r"exited with code 3.*raise SystemExit\(3\)"):
        quantize.quantize(Path("src"), Path("dst"), [])


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ServerError("vllm serve: exited [with] code 1"), 1, "exited [with] code 1"),
        (QuantizeError("quantize: exited"), 1, "error: quantize: exited"),
        (KeyboardInterrupt(), 130, "finished stages are kept"),
    ],
)
def test_command_ends_with_message_and_code(tmp_path, monkeypatch, error, code, message):
    def fail(*_):
        raise error

    monkeypatch.setattr(run, "run", fail)
    result = CliRunner().invoke(app, ["--cache-dir", str(tmp_path)])
    assert result.exit_code == code
    assert message in result.output


def test_cache_must_be_a_folder():
    result = CliRunner().invoke(app, ["--cache-dir", __file__])
    assert result.exit_code == 1
    assert "is a file; name another folder" in " ".join(result.output.split())


def test_help_needs_no_torch():
    code = "import sys, examples.demo.__main__; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
