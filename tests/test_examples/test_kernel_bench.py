"""The kernel benchmark without a GPU: layers, contenders on CPU, results and plots."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from examples.kernel_bench import __main__ as command
from examples.kernel_bench import contenders as contenders_module
from examples.kernel_bench import machine
from examples.kernel_bench import measure as measure_module
from examples.kernel_bench.contenders import (
    CublasBf16,
    OursW4A4,
    OursW4A8,
    OursW4A16,
    TorchFp8,
    torch_silu_and_mul,
)
from examples.kernel_bench.layers import BenchLayer, read_layers
from examples.kernel_bench.markdown import markdown
from examples.kernel_bench.measure import copies_beyond, launches_of
from examples.kernel_bench.operands import (
    checked_rows,
    expected_rows,
    largest_relative_error,
    random_tokens,
    random_weights,
)
from examples.kernel_bench.results import Results, Sample, speed_up
from examples.kernel_bench.table import layer_tables, refusals
from nvfp4_kernels.formats.fragments import decode_fragments
from nvfp4_kernels.tool.config_file import UnusableModel
from nvfp4_kernels.tool.timed_graphs import LaunchGraph
from tests.test_examples import fake_cuda
from tests.test_examples.ending import refused

CPU = torch.device("cpu")
QKV = BenchLayer("qkv_proj", 192, 256, False, (128, 32, 32))
PAIR = BenchLayer("gate_up_proj", 128, 256, True, (128,))
LAYERS = [pytest.param(QKV, id="qkv"), pytest.param(PAIR, id="pair")]


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (
            "llama-8b",
            {
                "qkv_proj": (6144, 4096, False, (4096, 1024, 1024)),
                "o_proj": (4096, 4096, False, (4096,)),
                "gate_up_proj": (14336, 4096, True, (14336,)),
                "down_proj": (4096, 14336, False, (4096,)),
            },
        ),
        (
            "llama-70b-tp4",
            {
                "qkv_proj": (2560, 8192, False, (2048, 256, 256)),
                "o_proj": (8192, 2048, False, (8192,)),
                "gate_up_proj": (7168, 8192, True, (7168,)),
                "down_proj": (8192, 7168, False, (8192,)),
            },
        ),
    ],
)
def test_built_in_shapes(model, sizes):
    layers = read_layers(model)
    assert {x.name: (x.n, x.k, x.gate_up, x.shard_sizes) for x in layers} == sizes


def test_layers_of_a_config_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(
        {"hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 512}
    ))  # fmt: skip
    [down] = read_layers(str(tmp_path), ["down_proj"])
    assert down == BenchLayer("down_proj", 256, 512, False, (256,))


@pytest.mark.parametrize(
    ("model", "layers", "message"),
    [
        ("llama-9b", None, r"--model: is 'llama-9b', must be one of llama-8b.*config.json"),
        ("llama-8b", ["gate"], r"--layers: is 'gate', must be among qkv_proj, o_proj"),
    ],
)
def test_unknown_model_or_layer_is_named(model, layers, message):
    with pytest.raises(UnusableModel, match=message):
        read_layers(model, layers)


def test_work_counts_both_halves_of_a_pair():
    assert PAIR.flops(3) == 2 * 3 * 256 * 256
    assert PAIR.nbytes(3, 0.5625) == 256 * 256 * 0.5625 + 2 * 3 * (256 + 128)
    assert QKV.flops(1) == 2 * 192 * 256


def test_twice_l2_lies_between_two_uses_of_a_weight():
    for l2, nbytes in ((60 << 20, 9.4e6), (60 << 20, 2.4e8), (50 << 20, 100 << 20)):
        copies = copies_beyond(l2, nbytes)
        assert (copies - 1) * nbytes >= 2 * l2
        assert copies == 2 or (copies - 2) * nbytes < 2 * l2


def test_replays_last_long_but_not_for_ever():
    assert launches_of(1e-5) == 200
    assert launches_of(1e-9) == 256
    assert launches_of(1.0) == 1


@pytest.mark.parametrize("m", [1, 2, 5, 8192])
def test_checked_rows_have_both_ends(m):
    rows = checked_rows(m)
    assert (rows[0], rows[-1]) == (0, m - 1)
    assert len(rows) == min(4, m)


def fragment_product(x, a_scales, data, scales, alpha, shard_sizes):
    """Result of sm_90's ``gemm``, computed from the fragments."""
    assert a_scales is None
    weight = decode_fragments(data, scales, sum(shard_sizes), x.shape[1])
    per_row = alpha.repeat_interleave(torch.tensor(shard_sizes))
    return ((x.float() @ weight.mT) * per_row).bfloat16()


def fragment_pair(x, a_scales, b1, b1_scales, b2, b2_scales, alpha, *, n):
    parts = ((b1, b1_scales, alpha[:1]), (b2, b2_scales, alpha[1:]))
    gate, up = (fragment_product(x, a_scales, *part, [n]).float() for part in parts)
    return (torch.nn.functional.silu(gate) * up).bfloat16()


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("m", [1, 40])
@pytest.mark.parametrize("kind", ["w4a16", "w4a4", "w4a8", "fp8", "bf16"])
def test_contenders_are_right(monkeypatch, layer, m, kind):
    if kind == "w4a16":
        monkeypatch.setattr(contenders_module, "gemm", fragment_product)
        monkeypatch.setattr(contenders_module, "silu_mul_gemm", fragment_pair)
        made = OursW4A16()
    elif kind == "w4a4":
        made = OursW4A4(CPU)
    elif kind == "w4a8":
        made = OursW4A8()
    else:
        made = (TorchFp8 if kind == "fp8" else CublasBf16)(torch_silu_and_mul)
    torch.manual_seed(0)
    weights = random_weights(layer, CPU)
    prepared, refused = measure_module.prepare(layer, weights, {kind: made}, l2_size=1)
    assert not refused
    assert len(prepared[kind].copies) == 2
    x = random_tokens(m, layer.k, CPU)
    errors, refused = measure_module.check(layer, x, weights, prepared)
    assert not refused
    assert 0 < errors[kind] < 2**-6


def test_unquantised_result_of_the_wrong_weight_is_seen():
    torch.manual_seed(0)
    weights, others = random_weights(QKV, CPU), random_weights(QKV, CPU)
    x = random_tokens(4, QKV.k, CPU)
    right = expected_rows(QKV, x, tuple(w.dequantize() for w in weights))
    assert 0.1 < right.std() < 10
    assert largest_relative_error(right, right) == 0
    error = largest_relative_error(
        expected_rows(QKV, x, tuple(w.dequantize() for w in others)), right
    )
    assert Sample("qkv_proj", 4, "ours", error=error).wrong


def test_nan_is_wrong():
    error = largest_relative_error(torch.full((2, 2), torch.nan), torch.ones(2, 2).double())
    assert Sample("qkv_proj", 4, "ours", error=error).wrong


class Refusing:
    weight_bytes = 0.5625

    def operands(self, layer, weights):
        raise NotImplementedError("no kernel for this\nsecond line")


def run_measure(monkeypatch, tmp_path, contenders):
    """Measure with graphs that run immediately, and a clock that counts microseconds."""
    seen = []

    def captured(steps, launches):
        for step in steps:
            seen.append(step())
        return LaunchGraph(SimpleNamespace(), launches)

    def timed(graphs, rounds):
        return {name: [float(i) for i in range(1, rounds + 1)] for name in graphs}

    monkeypatch.setattr(measure_module, "captured", captured)
    monkeypatch.setattr(measure_module, "timed", timed)
    monkeypatch.setattr(measure_module, "l2_bytes", lambda device: 100_000)
    about = {"model": "tiny", "gpu": "GPU [x]", "cuda": None, "versions": {}, "commit": "abc"}
    results = Results(about | {"rounds": 5}, 1e12, 1e14, [QKV, PAIR], ["marlin is left out: x"])
    cases = []
    measure_module.measure(results, [1, 4], contenders, CPU, 5, cases.append)
    return results, cases


def test_measuring_records_every_case(monkeypatch, tmp_path):
    contenders = {"ours": Refusing(), "bf16": CublasBf16(torch_silu_and_mul)}
    results, cases = run_measure(monkeypatch, tmp_path, contenders)
    assert [(s.layer, s.m, s.contender) for s in results.samples] == [
        (layer, m, name)
        for layer in ("qkv_proj", "gate_up_proj") for m in (1, 4) for name in ("ours", "bf16")
    ]  # fmt: skip
    assert [len(case) for case in cases] == [2] * 4
    ours, bf16 = cases[0]
    assert ours.refused == "NotImplementedError: no kernel for this"
    assert (bf16.median_us, bf16.least_us, bf16.most_us) == (3, 1, 5)
    assert bf16.copies == copies_beyond(100_000, 2 * QKV.elements)
    assert 0 < bf16.error < 2**-6


def test_contender_that_cannot_be_captured_costs_its_own_figures_alone(monkeypatch, tmp_path):
    class Unsteady(CublasBf16):
        calls = 0

        def launch(self, layer, x, operands):
            self.calls += 1
            if self.calls > 1:
                raise RuntimeError("cannot be captured")
            return super().launch(layer, x, operands)

    contenders = {n: c(torch_silu_and_mul) for n, c in (("ours", Unsteady), ("bf16", CublasBf16))}
    results, _ = run_measure(monkeypatch, tmp_path, contenders)
    ours, bf16 = results.samples[:2]
    assert ours.refused == "RuntimeError: cannot be captured"
    assert bf16.median_us == 3


def recorded():
    """Results of two cases and three contenders; ours is wrong in one, Marlin refuses the other."""
    about = {"model": "llama-8b", "gpu": "GPU", "cuda": "13", "versions": {"torch": "2"}}
    results = Results(about | {"commit": None, "rounds": 20}, 4e12, 7e14, [QKV, PAIR], ["a note"])
    base = Sample("qkv_proj", 1, "ours", 10.0, 9.0, 12.0, 8, 3, 2e7, 3.5e9, 1e-3)
    results.samples = [
        base,
        replace(base, contender="marlin", median_us=15.0),
        replace(base, contender="bf16", median_us=5.0, nbytes=4e7),
        replace(base, m=64, error=0.5),
        Sample("qkv_proj", 64, "marlin", refused="RuntimeError: no [such] shape"),
        replace(base, contender="bf16", m=64, median_us=2000.0),
    ]
    return results


def test_results_survive_the_file(tmp_path):
    results = recorded()
    results.write(tmp_path / "r.json")
    assert Results.read(tmp_path / "r.json") == results


@pytest.mark.parametrize("text", ["{}", "[1]", "no json", '{"layers": [], "samples": [{}]}'])
def test_other_files_are_refused(tmp_path, text):
    file = tmp_path / "r.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"holds no results .* measure again"):
        Results.read(file)


@pytest.mark.parametrize("content", [None, b"\xff"], ids=["absent", "no text"])
def test_results_that_cannot_be_read_are_named(tmp_path, capsys, content):
    file = tmp_path / "r.json"
    if content:
        file.write_bytes(content)
    assert refused(command, ["show", str(file)])
    told = capsys.readouterr().err
    assert f"results: {file} cannot be read" in told
    assert "`python -m examples.kernel_bench measure`" in told


def test_table_has_times_ratios_and_shares():
    [table] = layer_tables(recorded())  # the pair has no samples
    assert table.title == "qkv_proj, 192 × 256"
    assert table.headings == [
        "M", "ours µs", "Marlin µs", "cuBLAS µs", "× Marlin", "× cuBLAS", "read", "bf16", "error"
    ]  # fmt: skip
    assert table.rows == [
        ["1", "10.0", "15.0", "5.0", "1.50", "0.50", "50%", "50%", "1.0e-03"],
        ["64", "10.0 WRONG", "none", "2,000", "", "", "50%", "50%", "5.0e-01"],
    ]


def test_a_wrong_result_is_no_faster():
    ours, marlin = recorded().samples[:2]
    assert speed_up(ours, marlin) == 1.5
    assert speed_up(replace(ours, error=1.0), marlin) is None
    assert speed_up(None, marlin) is None


def test_refusals_are_given_once():
    results = recorded()
    results.samples += [replace(results.samples[4], m=128)]
    assert refusals(results) == ["Marlin, qkv_proj at M = 64: RuntimeError: no [such] shape"]


def test_markdown_is_a_table():
    lines = markdown(recorded()).splitlines()
    assert "| 1 | 10.0 | 15.0 | 5.0 | 1.50 | 0.50 | 50% | 50% | 1.0e-03 |" in lines
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert "a note" in lines


def test_show_prints_draws_and_writes(tmp_path, capsys):
    recorded().write(tmp_path / "r.json")
    png, md = tmp_path / "r.png", tmp_path / "r.md"
    status = command.main(
        ["show", str(tmp_path / "r.json"), "--plot", str(png), "--markdown", str(md)]
    )
    assert status == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    assert md.read_text() == markdown(recorded())
    shown = capsys.readouterr().out
    assert "10.0 WRONG" in shown
    assert "no [such] shape" in shown


@pytest.mark.parametrize("option", ["--plot", "--markdown"])
def test_show_writes_nothing_where_it_cannot_write_all(tmp_path, capsys, option):
    recorded().write(tmp_path / "r.json")
    there = {"--plot": tmp_path / "r.png", "--markdown": tmp_path / "r.md"}
    missing = tmp_path / "missing" / "r"
    options = [str(part) for pair in (there | {option: missing}).items() for part in pair]
    assert refused(command, ["show", str(tmp_path / "r.json"), *options])
    assert f"{option}: {missing.parent} is no folder; create it first" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


def test_plot_without_samples_is_refused(tmp_path, capsys):
    results = recorded()
    results.samples.clear()
    results.write(tmp_path / "r.json")
    assert refused(command, ["show", str(tmp_path / "r.json"), "--plot", str(tmp_path / "p.png")])
    assert "hold no samples" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama-9b"], "must be one of llama-8b"),
        (["--layers", "q"], "must be among qkv_proj"),
        (["--out", "missing/r.json"], "--out: missing is no folder; create it first"),
        ([], "no CUDA GPU: .* run there with the extra `cuda`"),
    ],
)
def test_measure_says_what_it_lacks(monkeypatch, capsys, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refused(command, ["measure", *arguments])
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def fake_gpu(monkeypatch):
    """Machine on which CPU tensors pass for a GPU's."""
    fake_cuda.install(monkeypatch, capability=(10, 0))
    monkeypatch.setattr(machine, "cuda_device", lambda: CPU)
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "SQUARE", 64)


def test_measure_command_measures_and_writes(monkeypatch, tmp_path, capsys, fake_gpu):
    out = tmp_path / "r.json"
    arguments = ["--model", "tiny", "--m", "1", "33", "--rounds", "4", "--out", str(out)]
    assert command.main(["measure", *arguments]) == 0
    results = Results.read(out)
    assert [(s.layer, s.m, s.contender) for s in results.samples[:6]] == [
        ("qkv_proj", m, name) for m in (1, 33) for name in ("ours", "fp8", "bf16")
    ]
    assert len(results.samples) == 4 * 2 * 3
    assert not any(s.refused or s.wrong for s in results.samples)
    # A replay takes one millisecond of the fake clock.
    assert all(s.median_us == 1000 / s.launches for s in results.samples)
    assert all(s.launches % s.copies == 0 for s in results.samples)
    assert results.read_bytes_per_second == pytest.approx((1 << 20) / (1e-3 / 2))
    assert results.about["gpu"] == "Fake GPU"
    assert any(note.startswith("marlin is left out: ") for note in results.notes)
    shown = capsys.readouterr().out
    assert "qkv_proj m=33: ours " in shown
    assert "marlin is left out" in shown
    assert command.main(["show", str(out)]) == 0


def test_measure_command_fails_if_ours_is_wrong(monkeypatch, tmp_path, capsys, fake_gpu):
    monkeypatch.setattr(OursW4A4, "launch", lambda self, layer, x, operands: x.new_zeros(
        x.shape[0], layer.n
    ))  # fmt: skip
    out = tmp_path / "r.json"
    assert command.main(["measure", "--model", "tiny", "--m", "1", "--out", str(out)]) == 1
    assert re.search(r"ours [\d.]+ us \(WRONG by 1\)", capsys.readouterr().out)


def test_nothing_to_measure_is_an_error(tmp_path, capsys, fake_gpu):
    out = tmp_path / "r.json"
    assert refused(command, ["measure", "--contenders", "marlin", "--out", str(out)])
    assert re.search("nothing to measure: marlin is left out: .*vLLM", capsys.readouterr().err)


def test_other_gpus_leave_ours_out(monkeypatch):
    fake_cuda.install(monkeypatch, capability=(8, 0))
    with pytest.raises(contenders_module.Unavailable, match="sm_90 and sm_100, this GPU is sm_80"):
        contenders_module.make_contender("ours", CPU, torch_silu_and_mul)


@pytest.mark.parametrize("m", ["0", "-1", "x"])
def test_tokens_must_be_positive(capsys, m):
    with pytest.raises(SystemExit):
        command.main(["measure", "--m", m])
    assert "--m: " in capsys.readouterr().err


def test_measuring_imports_neither_rich_nor_typer_nor_matplotlib():
    code = (
        "import sys; from examples.kernel_bench import __main__, contenders, machine, measure; "
        "sys.exit(any(name in sys.modules for name in ('rich', 'typer', 'matplotlib', 'vllm')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
