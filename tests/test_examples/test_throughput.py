"""The throughput comparison without engines: options, failing processes, results, plots."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file

from examples.engine_log import kernel_lines, root_cause
from examples.llama_shapes import SHAPES
from examples.throughput import __main__ as command
from examples.throughput import plot, process
from examples.throughput.cases import BadOption, Case, make_cases
from examples.throughput.job import Job, Progress
from examples.throughput.measure import Settings, engine_args, measure
from examples.throughput.process import run_job
from examples.throughput.results import Results, VariantResult
from examples.throughput.variants import parse_variants
from examples.throughput.worker import generate, prompts
from nvfp4_kernels.formats.nvfp4 import Nvfp4Tensor
from tests import limits
from tests.test_examples.ending import refused
from vllm_fp4_plugin import formats
from vllm_fp4_plugin.checkpoint import files as checkpoint_files
from vllm_fp4_plugin.checkpoint.dry_load import dry_load
from vllm_fp4_plugin.engine import meta_model

DECODE, PREFILL = Case(4, 32, 128), Case(2, 1024, 1)
ENGINE = {
    "max_model_len": None,
    "gpu_memory_utilization": 0.9,
    "tensor_parallel_size": 1,
    "enforce_eager": False,
    "more": {},
}


@pytest.mark.parametrize(
    ("model", "names", "linear"),
    [
        ("tiny-moe", ["nvfp4-tc", "modelopt"], "mlp.experts.3.down_proj"),
        ("tiny", ["nvfp4-tc", "modelopt"], "mlp.down_proj"),
        ("tiny", ["compressed-tensors"], "self_attn.o_proj"),
    ],
)
def test_shapes_have_random_weights(tmp_path, model, names, linear):
    """Variants share one checkpoint, whose random weights preserve the magnitude of activations."""
    variants = parse_variants(model, names)
    [folder] = {Path(variant.written(tmp_path)) for variant in variants}
    assert all("load_format" not in variant.engine_args() for variant in variants)
    config = json.loads((folder / "config.json").read_text())
    parsed = formats.parse(config["quantization_config"])
    assert parsed.format.name in (*names, "modelopt")
    assert not parsed.weight_only
    assert parsed.ignore[0] == "lm_head"
    headers = checkpoint_files.read_headers(folder)
    with meta_model.built(str(folder)) as (built, _):
        dry_load(built, folder, headers)  # every parameter is there
    tensors = load_file(folder / "model-00001-of-00003.safetensors")
    of = parsed.format.names
    data, scales, factor = (
        tensors[f"model.layers.0.{linear}.{part}"]
        for part in (of.weight, of.block_scale, of.weight_global)
    )
    factor = 1 / factor if parsed.format.reciprocal else factor
    weight = Nvfp4Tensor(data, scales, factor.reshape(())).dequantize()
    size = weight.square().mean().sqrt().item()
    assert size == pytest.approx(weight.shape[1] ** -0.5, rel=0.1)


def test_experts_are_in_modelopts_format():
    with pytest.raises(BadOption, match="is 'bf16', must be among nvfp4-tc, modelopt for tiny-moe"):
        parse_variants("tiny-moe", ["bf16"])


def test_cases_are_decode_then_prefill():
    assert make_cases([4], 32, 128, ["2x1024"]) == (DECODE, PREFILL)
    assert (DECODE.tokens, PREFILL.tokens) == (4 * 128, 2 * 1024)
    assert (DECODE.title, PREFILL.title) == ("decode batch 4", "prefill 2 × 1024")


@pytest.mark.parametrize(
    ("batches", "output", "prefills", "message"),
    [
        ([1], 1, [], r"--output-tokens: is 1, must be at least 2; .* --prefill"),
        ([], 8, ["32"], r"--prefill: is '32', must be BATCHxTOKENS such as 32x1024"),
        ([], 8, ["0x4"], r"--prefill: is '0x4'"),
        ([], 8, [], r"--batch-sizes: are none, nor is there a --prefill"),
        ([2, 2], 8, [], r"decode batch 2: is there twice"),
    ],
)
def test_bad_cases_are_named(batches, output, prefills, message):
    with pytest.raises(BadOption, match=message):
        make_cases(batches, 32, output, prefills)


def test_shape_in_16_bits_says_nothing_of_quantisation(tmp_path):
    [variant] = parse_variants("tiny", ["bf16"])
    config = json.loads((Path(variant.written(tmp_path)) / "config.json").read_text())
    assert config == SHAPES["tiny"]
    assert variant.engine_args() == {"quantization": None, "load_format": "dummy"}


def test_checkpoints_are_served_as_they_are(tmp_path, monkeypatch):
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    bf16, hub = parse_variants("plain", ["bf16", "modelopt=org/model-NVFP4"])
    assert bf16.written(tmp_path) == str(tmp_path / "plain")
    assert hub.written(tmp_path) == "org/model-NVFP4"
    assert hub.engine_args() == {"quantization": "modelopt_fp4"}


@pytest.mark.parametrize(
    ("model", "written", "message"),
    [
        ("tiny", ["fp8"], r"--quantization: is 'fp8', must be among bf16, nvfp4-tc"),
        ("tiny", ["bf16", "bf16=org/x"], r"--quantization: bf16 is there twice"),
        ("lama", ["bf16"], r"model: is 'lama', which is no such directory.* llama-8b"),
        ("./a/b", ["bf16"], r"model: is './a/b', which is no such directory"),
        ("empty", ["bf16"], r"empty: its config.json cannot be read"),
        ("quantised", ["bf16"], r"bf16: .*quantised is quantised already; .* bf16=MODEL"),
        ("plain", ["modelopt"], r"modelopt: .*plain is not quantised; .* modelopt=MODEL"),
    ],
)
def test_bad_variants_are_named(tmp_path, monkeypatch, model, written, message):
    monkeypatch.chdir(tmp_path)
    for name, text in (("plain", "{}"), ("quantised", '{"quantization_config": {}}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadOption, match=message):
        parse_variants(model, written)


def test_engine_is_as_large_as_its_cases():
    args = engine_args([DECODE, PREFILL], **ENGINE | {"more": {"seed": 3, "max_num_seqs": 9}})
    assert (args["max_model_len"], args["max_num_seqs"], args["seed"]) == (1025, 9, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_model_len": 100}, r"--max-model-len: is 100, must be at least 160"),
        ({"gpu_memory_utilization": 1.5}, r"--gpu-memory-utilization: is 1.5, must be above 0"),
    ],
)
def test_bad_engine_options_are_named(change, message):
    with pytest.raises(BadOption, match=message):
        engine_args([DECODE], **ENGINE | change)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny", "--quantization", "int8"], "must be among bf16"),
        (["tiny", "--baseline", "modelopt"], "--baseline: is modelopt, must be among"),
        (["tiny", "--max-model-len", "5"], "--max-model-len: is 5"),
        (["tiny", "--prefill", "x"], "--prefill: is 'x'"),
        (["tiny", "--engine-args", '{"model": "x"}'], "holds 'model', which MODEL sets"),
        (["tiny", "--engine-args", '{"max_model_len": 1}'], "which --max-model-len sets"),
    ],
)
def test_bad_options_end_the_command_before_any_engine(
    monkeypatch, tmp_path, capsys, arguments, message
):
    monkeypatch.setattr(process, "worker_command", lambda *_: pytest.fail("an engine was started"))
    out = tmp_path / "out"
    assert refused(command, ["measure", *arguments, "--out", str(out)])
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_out_must_be_a_folder(monkeypatch, capsys):
    monkeypatch.setattr(process, "worker_command", lambda *_: pytest.fail("an engine was started"))
    monkeypatch.setattr(command, "find_spec", lambda _: True)
    assert refused(command, ["measure", "tiny", "--out", __file__])
    assert "--out: " in (told := capsys.readouterr().err)
    assert "is a file; name another folder" in told


@pytest.mark.parametrize("text", ["[1]", "no json"])
def test_engine_args_are_an_object(capsys, text):
    with pytest.raises(SystemExit):
        command.main(["measure", "tiny", "--engine-args", text])
    assert "must be a JSON object" in capsys.readouterr().err


def test_prompts_are_fixed_and_all_different():
    ids = prompts(DECODE, 1000, seed=1)
    assert ids == prompts(DECODE, 1000, seed=1) != prompts(DECODE, 1000, seed=2)
    assert len({tuple(row) for row in ids}) == 4
    assert all(len(row) == 32 and min(row) >= 100 and max(row) < 1000 for row in ids)


def test_outputs_that_are_too_short_are_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))

    class Output:
        def __init__(self, tokens):
            self.outputs = [SimpleNamespace(token_ids=[0] * tokens)]

    class Llm:
        def generate(self, requests, sampling, use_tqdm):
            assert (sampling.temperature, sampling.ignore_eos) == (0, True)
            assert (sampling.max_tokens, use_tqdm) == (128, False)
            assert requests == [{"prompt_token_ids": [5]}] * 4
            return [Output(tokens) for tokens in (128, 128, 128, self.last)]

    llm = Llm()
    llm.last = 128
    assert generate(llm, DECODE, [[5]] * 4) >= 0
    llm.last = 127
    with pytest.raises(RuntimeError, match=r"4x32\+128: 4 outputs of \[127, 128\] tokens"):
        generate(llm, DECODE, [[5]] * 4)


WORKER = """
import json, signal, sys
from pathlib import Path
from types import SimpleNamespace
from examples.throughput.job import Job, Progress
job, told = Job.read(Path(sys.argv[1])), Path(sys.argv[2])
what = job.engine_args["quantization"]
print("(EngineCore pid=7) INFO 01-01 [x.py:1] nvfp4-tc: o_proj ×2: nvfp4_gemm/reference (cpu)")
if what == "modelopt_fp4":
    print("(EngineCore pid=7) ERROR 01-01 [core.py:2] NotImplementedError: no [such] kernel")
    print("RuntimeError: Engine core initialization failed. See root cause above.")
    sys.exit(1)
if what == "compressed-tensors":
    print("all is well")
    sys.exit(3)
progress = Progress(total=1, finished=True, done=1, device="chip")
progress.seconds = {case.name: [0.5, 1.0][: job.repeats] for case in job.cases}
progress.write(told)
if what == "nvfp4-tc":
    signal.pause()
"""


@pytest.fixture
def fake_worker(monkeypatch, tmp_path):
    """Engines whose outcome depends on the variant; a finished engine hangs instead of exiting."""
    file = tmp_path / "worker.py"
    file.write_text(WORKER)
    monkeypatch.setattr(process, "worker_command", lambda *files: [sys.executable, file, *files])
    monkeypatch.setattr(process, "STOP_SECONDS", 0.3)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)


def measured(folder, names, rounds=1):
    variants = parse_variants("tiny", names)
    about = {"model": "tiny", "versions": {"vllm": "0"}, "commit": None}
    results = Results(
        about, (DECODE,), names[0], [VariantResult(v.name, v.model) for v in variants]
    )
    seen, ends = [], []
    measure(
        results,
        variants,
        {"dtype": "bfloat16"},
        Settings(repeats=2, rounds=rounds, time_limit=limits.PROCESS),
        folder,
        lambda name, number, progress: seen.append((name, number, progress.done)),
        lambda name, outcome: ends.append(name),
    )
    assert Results.read(folder / "results.json") == results
    return results, seen, ends


def test_a_failing_variant_costs_itself_alone(tmp_path, fake_worker, capsys):
    names = ["modelopt", "bf16", "compressed-tensors", "nvfp4-tc"]
    results, *_ = measured(tmp_path, names)
    modelopt, bf16, compressed, ours = results.variants
    assert modelopt.errors == ["NotImplementedError: no [such] kernel"]
    assert modelopt.rounds == [{}]
    assert compressed.errors == ["exit code 3, after: all is well"]
    assert bf16.errors == ours.errors == []
    assert bf16.rounds == ours.rounds == [{"4x32+128": [0.5, 1.0]}]
    assert ours.kernels == ["nvfp4-tc: o_proj ×2: nvfp4_gemm/reference (cpu)"]
    assert ours.device == "chip"
    assert (tmp_path / modelopt.logs[0]).is_file()
    assert "load_format" in bf16.engine_args
    assert "load_format" not in ours.engine_args
    assert command.main(["show", str(tmp_path / "results.json")]) == 0
    shown = capsys.readouterr().out
    assert "these are no GPU speeds" in shown
    assert (
        "modelopt failed: NotImplementedError: no [such] kernel (engines/modelopt-1.log)" in shown
    )


def test_rounds_alternate(tmp_path, fake_worker):
    results, seen, ends = measured(tmp_path, ["bf16", "modelopt"], rounds=2)
    assert ends == ["bf16", "modelopt"] * 2
    assert [len(v.rounds) for v in results.variants] == [2, 2]
    assert results.variants[0].rates(DECODE) == [1024, 512] * 2
    assert ("bf16", 2, 1) in seen


def test_a_process_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    sleeping = [sys.executable, "-c", "import signal; signal.pause()"]  # unless it is ended
    monkeypatch.setattr(process, "worker_command", lambda *_: sleeping)
    outcome = run_job(Job({}, (DECODE,), 1, 0), tmp_path, "x", 0.3, lambda _: None)
    assert outcome.error == "not done after 0.3 s; give it longer with --time-limit"


def test_an_interrupted_run_ends_its_engine(tmp_path, monkeypatch):
    code = "import os, signal, sys; open(sys.argv[1], 'w').write(str(os.getpid())); signal.pause()"
    pid = tmp_path / "pid"
    monkeypatch.setattr(
        process, "worker_command", lambda *_: [sys.executable, "-c", code, str(pid)]
    )

    def interrupt(progress):
        if pid.is_file() and pid.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(Job({}, (DECODE,), 1, 0), tmp_path, "x", limits.PROCESS, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_root_cause_is_the_first_error():
    log = (
        "WARNING 11-22 [x.py:1] not found: ImportError: no module named deep\n"
        "(EngineCore pid=1) ERROR 11-22 [core.py:1] Traceback (most recent call last):\n"
        "(EngineCore pid=1) ERROR 11-22 [core.py:1] torch.OutOfMemoryError: CUDA out of memory.\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert root_cause(log) == "OutOfMemoryError: CUDA out of memory."
    assert root_cause(f"{log}\nnvfp4-tc: refused: m: is odd\nmore") == "m: is odd"
    assert root_cause("Traceback:\n  ValueError: 3\n") == "ValueError: 3"
    assert root_cause("a\n\n  Killed \n") == ""


def test_kernel_lines_are_found_once():
    line = (
        "(EngineCore pid=3) INFO 11-22 [__init__.py:9] Using MarlinNvFp4LinearKernel for NVFP4 GEMM"
    )
    assert kernel_lines(f"{line}\n{line}\nUsing a lot of memory\n") == [
        "Using MarlinNvFp4LinearKernel for NVFP4 GEMM"
    ]


def recorded():
    """Results of two cases; ours is twice as fast in one, and failed in the other."""
    cases = (DECODE, PREFILL)
    bf16 = {DECODE.name: [1.0, 2.0, 4.0], PREFILL.name: [2.0]}
    variants = [
        VariantResult("bf16", "tiny", rounds=[bf16], device="chip"),
        VariantResult("nvfp4-tc", "tiny", rounds=[{DECODE.name: [1.0]}], errors=["E: x"]),
    ]
    about = {"model": "tiny", "versions": {"vllm": "0"}, "commit": "abc"}
    return Results(about, cases, "bf16", variants)


def test_rates_are_medians_with_spread_and_ratio():
    results = recorded()
    bf16, ours = results.variants
    rate = results.rate(bf16, DECODE)
    assert (rate.median, rate.spread, rate.ratio) == (256, (512 - 128) / 2 / 256, 1)
    assert results.rate(ours, DECODE).ratio == 2
    assert results.rate(ours, PREFILL) is None
    results.baseline = "nvfp4-tc"
    assert results.rate(bf16, PREFILL).ratio is None


@pytest.mark.parametrize("baseline", ["bf16", "nvfp4-tc"])
def test_show_prints_and_draws(tmp_path, capsys, baseline):
    results = recorded()
    results.baseline = baseline
    results.write(tmp_path / "r.json")
    png = tmp_path / "r.png"
    assert command.main(["show", str(tmp_path / "r.json"), "--plot", str(png)]) == 0
    shown = capsys.readouterr().out
    assert "decode batch 4" in shown
    assert "nvfp4-tc failed: E: x" in shown
    assert "no GPU speeds" not in shown
    [row] = [line for line in shown.splitlines() if line.lstrip().startswith("prefill")]
    assert row.split() == ["prefill", "2", "×", "1024", "1,024", "±0.0%", "failed"]
    assert png.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("device", "kernels", "warning"),
    [
        ("NVIDIA B200", ["nvfp4-tc: o_proj ×2: nvfp4_gemm/block_scaled (sm_100)"], ""),
        ("cpu", ["nvfp4-tc: o_proj ×2: nvfp4_gemm/reference (cpu)"], "Reference kernels are exact"),
        ("cpu", [], "Measured on a CPU"),
    ],
    ids=["GPU", "references", "CPU"],
)
def test_a_plot_of_a_cpu_says_that_it_has_no_gpu_speeds(
    tmp_path, monkeypatch, capsys, device, kernels, warning
):
    results = recorded()
    for variant in results.variants:
        variant.device, variant.kernels = device, kernels
    results.write(tmp_path / "r.json")
    drawn = []
    monkeypatch.setattr(plot.plt, "close", drawn.append)
    arguments = ["show", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    assert command.main(arguments) == 0
    [figure] = drawn
    title = figure.axes[0].get_title()
    assert title.startswith(warning)
    assert ("no GPU speeds" in title) == ("no GPU speeds" in capsys.readouterr().out) == bool(title)
    assert bool(title) == bool(warning)


def test_a_name_that_is_not_downloaded_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refused(command, ["measure", "org/absent", "--out", str(tmp_path / "out")])
    assert "error: org/absent: is no directory, its config.json is not" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_plot_that_cannot_be_written_is_refused(tmp_path, capsys):
    recorded().write(tmp_path / "r.json")
    assert refused(command, ["show", str(tmp_path / "r.json"), "--plot", str(tmp_path)])
    said = capsys.readouterr()
    assert f"--plot: {tmp_path} is a folder, must be a file; name one in it" in said.err
    assert "decode batch" not in said.out


@pytest.mark.parametrize("text", ["{}", "[1]", "no json"])
def test_other_files_are_refused(tmp_path, capsys, text):
    (tmp_path / "r.json").write_text(text)
    assert refused(command, ["show", str(tmp_path / "r.json")])
    assert "holds no results" in capsys.readouterr().err


def test_results_that_cannot_be_read_are_named(tmp_path, capsys):
    assert refused(command, ["show", str(tmp_path / "absent.json")])
    assert "absent.json cannot be read" in (told := capsys.readouterr().err)
    assert "`python -m examples.throughput measure`" in told


def test_job_and_progress_survive_their_files(tmp_path):
    job = Job({"model": "x"}, (DECODE, PREFILL), 3, 7)
    job.write(tmp_path / "job")
    assert Job.read(tmp_path / "job") == job
    assert Progress.read(tmp_path / "none") == Progress()
    told = Progress("s", 1, 2, seconds={"a": [1.0]})
    told.write(tmp_path / "told")
    assert Progress.read(tmp_path / "told") == told
