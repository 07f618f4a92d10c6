"""Divergence, text, variants and flags of the accuracy comparison, against direct computation."""

import json
import math
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from examples.accuracy.activations import round_inputs, rounded
from examples.accuracy.divergence import divergence, token_logprobs
from examples.accuracy.flags import served_flags, weight_flags
from examples.accuracy.recorder import LogitsRecorder
from examples.accuracy.rounding import round_checkpoint
from examples.accuracy.text import read_windows
from examples.accuracy.variants import BadVariant, known_variants, parse_variants
from examples.accuracy.weight_error import WeightError, weight_errors
from examples.perplexity import Interval
from tests import tiny_llama
from tests.test_examples.broken_checkpoints import share_largest_scale, swizzle_scales
from vllm_fp4_plugin.options import Options
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint


@pytest.fixture(scope="module")
def bf16(tmp_path_factory):
    return tiny_llama.save(tmp_path_factory.mktemp("bf16"))


@pytest.fixture(scope="module")
def modelopt(bf16, tmp_path_factory):
    made = tmp_path_factory.mktemp("made") / "modelopt"
    quantize_checkpoint(bf16, made)
    return made


# --- divergence ---


def test_divergence_is_its_definition():
    p, q = [0.5, 0.25, 0.25], [0.125, 0.75, 0.125]
    found = divergence(torch.tensor([p, q]).log(), torch.tensor([q, q]).log())
    direct = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert found.kl.tolist() == pytest.approx([direct, 0], abs=1e-7)
    assert found.agreement.tolist() == [0, 1]


def test_divergence_is_exact_over_more_rows_than_are_taken_at_once():
    draws = np.random.default_rng(0)
    p, q = draws.normal(size=(2, 150, 31)) * 3
    log_p = p - np.log(np.exp(p).sum(-1, keepdims=True))
    log_q = q - np.log(np.exp(q).sum(-1, keepdims=True))
    found = divergence(torch.tensor(p + 5), torch.tensor(q - 7))  # a shift changes nothing
    assert found.kl.numpy() == pytest.approx((np.exp(log_p) * (log_p - log_q)).sum(-1), rel=1e-12)
    assert found.agreement.bool().tolist() == (p.argmax(-1) == q.argmax(-1)).tolist()
    tokens = draws.integers(31, size=150)
    direct = log_p[np.arange(150), tokens]
    assert token_logprobs(torch.tensor(p), torch.tensor(tokens)).numpy() == pytest.approx(direct)


def test_excluded_token_costs_nothing_but_excluding_one_costs_all():
    some, all_ = torch.tensor([[0.0, -torch.inf]]), torch.tensor([[0.0, 0.0]])
    assert divergence(some, all_).kl.item() == pytest.approx(math.log(2))
    assert divergence(all_, some).kl.item() == math.inf


def test_numbers_are_demanded():
    with pytest.raises(ValueError, match="logits: hold NaN"):
        divergence(torch.zeros(2, 3), torch.full((2, 3), torch.nan))
    with pytest.raises(ValueError, match=r"other: shape is \(2, 4\), must be \(2, 3\)"):
        divergence(torch.zeros(2, 3), torch.zeros(2, 4))


# --- recorder ---


class Head:
    """Model whose logits encode the number of the call and the row."""

    def __init__(self):
        self.calls = 0

    def compute_logits(self, rows):
        self.calls += 1
        return torch.arange(rows)[:, None] + torch.tensor([self.calls * 1000.0, 0.0])


class Worker(LogitsRecorder):
    def __init__(self, rank=0):
        self.rank = rank
        self.model_runner = type("Runner", (), {"model": Head()})()
        self.parallel_config = type("Parallel", (), {"tensor_parallel_size": 2})()


@pytest.mark.parametrize(
    "calls",
    [[5, 1], [6, 1], [1, 5], [3, 3, 1], [3, 2, 1]],
    ids=["one call", "with the last row", "drawn first", "in chunks", "in uneven chunks"],
)
def test_recorder_writes_the_rows_of_the_prompt(tmp_path, calls):
    worker = Worker()
    worker.record_logits()
    head = worker.model_runner.model
    direct = [head.compute_logits(rows) for rows in calls]
    file = tmp_path / "logits"
    assert worker.write_logits(str(file), 5) == calls
    expected = torch.cat([rows for rows in direct if len(rows) > 1])[:5]
    assert torch.equal(load_file(file)["logits"], expected)


def test_recorder_writes_nothing_it_does_not_understand(tmp_path):
    worker = Worker()
    worker.record_logits()
    head = worker.model_runner.model
    head.compute_logits(5)
    head.compute_logits(5)
    assert worker.write_logits(str(tmp_path / "two"), 5) == [5, 5]
    assert worker.write_logits(str(tmp_path / "none"), 5) == []
    assert not list(tmp_path.iterdir())


def test_recorder_of_another_rank_writes_nothing(tmp_path):
    worker = Worker(rank=1)
    worker.record_logits()
    worker.model_runner.model.compute_logits(5)
    assert worker.write_logits(str(tmp_path / "logits"), 5) == []
    assert not list(tmp_path.iterdir())


def test_recorder_keeps_copies_until_it_is_stopped(tmp_path):
    worker = Worker()
    worker.record_logits()
    head = worker.model_runner.model
    head.compute_logits(5).zero_()
    worker.write_logits(str(tmp_path / "logits"), 5)
    assert load_file(tmp_path / "logits")["logits"][4, 0] == 1004
    worker.stop_recording_logits()
    head.compute_logits(5)
    assert worker.write_logits(str(tmp_path / "stopped"), 5) == []
    worker.record_logits()
    head.compute_logits(5)
    assert worker.write_logits(str(tmp_path / "again"), 5) == [5]  # recorded once, not twice


# --- text ---


def test_windows_are_of_the_whole_text(bf16, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(chr(97 + i % 26) for i in range(260)))
    windows = read_windows(file, bf16, 3, 26)
    tokenizer = tiny_llama.tokenizer()
    assert windows.shape == (3, 26)
    assert [tokenizer.decode(row) for row in windows[[0, 2]]] == ["abcdefghijklmnopqrstuvwxyz"] * 2
    with pytest.raises(ValueError, match=r"windows: 11 of 26 tokens.*--windows"):
        read_windows(file, bf16, 11, 26)
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"--text: .*text.txt cannot be read.*UTF-8"):
        read_windows(file, bf16, 3, 26)


# --- variants ---


def test_known_variants_are_made_and_served_by_their_names():
    known = known_variants("CPU_ATTN")
    assert all(name == variant.name for name, variant in known.items())
    assert known["bf16"].method is None
    assert known["nvfp4-tc-vllm-attention"].options == ("--attention-backend", "CPU_ATTN")
    online = json.loads(known["nvfp4-tc-online-sweep"].options[1])
    assert online == {"nvfp4_tc": {"scales": "sweep"}}
    assert known["nvfp4-tc-online-sweep"].tool is None
    terms = json.loads(known["nvfp4-tc-terms-3"].options[1])
    assert terms == {"nvfp4_tc": {"activation_terms": 3}}
    assert [known[f"rounded-terms-{n}"].input_format for n in (2, 3)] == [2, 3]
    assert known["rounded-fp8"].input_format == "fp8"
    assert not known["nvfp4-tc-w4a16"].calibrated
    assert known["modelopt"].tool[-1] == "--shared-fused-scale"


def test_fp8_is_served_from_the_files_of_the_other_arithmetics():
    known = known_variants("CPU_ATTN")
    for name, other in (("nvfp4-tc-fp8", "nvfp4-tc"), ("nvfp4-tc-fp8-per-token", "nvfp4-tc-w4a16")):
        variant, twin = known[name], known[other]
        assert (variant.tool, variant.calibrated) == (twin.tool, twin.calibrated)
        assert json.loads(variant.options[1]) == {"nvfp4_tc": {"activation": "fp8"}}
        assert Options.parse(json.loads(variant.options[1])["nvfp4_tc"]).activation == "fp8"
        assert twin.options == ()


def test_own_checkpoint_is_served_by_nvfp4_tc_unless_said(bf16):
    mine, theirs = parse_variants([f"mine={bf16}", f"theirs:modelopt={bf16}"], "CPU_ATTN")
    assert (mine.name, mine.method, mine.checkpoint) == ("mine", "nvfp4-tc", bf16)
    assert (theirs.name, theirs.method) == ("theirs", "modelopt_fp4")


def test_reference_need_not_be_named():
    assert [v.name for v in parse_variants(["bf16", "nvfp4-tc"], "CPU_ATTN")] == ["nvfp4-tc"]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (["nvfp4"], r"--variants: is 'nvfp4', must be among bf16, .*LABEL\[:METHOD\]=CHECKPOINT"),
        (["nvfp4-tc", "nvfp4-tc"], "nvfp4-tc is there twice"),
        (["modelopt=."], "label 'modelopt' is taken"),
        (["rounded-both=."], "label 'rounded-both' is taken"),
        (["a/b=."], "label is 'a/b', must be letters"),
        (["mine:awq=."], "method of mine is 'awq', must be among bf16, nvfp4-tc"),
        (["mine=/nowhere"], "mine: /nowhere holds no config.json"),
    ],
)
def test_bad_variants_are_refused(written, message):
    with pytest.raises(BadVariant, match=message):
        parse_variants(written, "CPU_ATTN")


# --- weights and flags ---


@pytest.mark.parametrize("options", [
    {"scales": "absmax"}, {"scales": "sweep"}, {"scales": "four-over-six"},
    {"format": "compressed-tensors"}, {"shared_fused_scale": True},
])  # fmt: skip
def test_right_weights_are_not_flagged(bf16, tmp_path, options):
    quantize_checkpoint(bf16, tmp_path / "right", **options)
    errors = weight_errors(tmp_path / "right", bf16)
    assert len(errors) == 14
    assert all(0.07 < e.relative < 0.11 for e in errors)
    assert weight_flags(errors) == []


@pytest.mark.parametrize("break_", [swizzle_scales, share_largest_scale])
def test_broken_weights_are_flagged(bf16, modelopt, tmp_path, break_):
    [flag] = weight_flags(weight_errors(break_(modelopt, tmp_path / "broken"), bf16))
    assert "weights have wrong scales: model.layers." in flag


def test_a_weight_that_is_a_little_larger_is_flagged():
    right = WeightError("a", 0.09, 0.995)
    assert weight_flags([right, replace(right, gain=0.975)]) == []
    [flag] = weight_flags([right, replace(right, layer="b", gain=1.04, relative=0.098)])
    assert flag.startswith("1 of 2 weights have wrong scales: b is 10% off")


def test_weights_are_compared_with_those_they_were_made_of(modelopt, tmp_path):
    other = tiny_llama.save(tmp_path / "other", intermediate_size=64)
    with pytest.raises(ValueError, match=r"_proj.weight: has shape .* in .*other, must be"):
        weight_errors(modelopt, other)


def test_sixteen_bit_checkpoint_has_no_weight_errors(bf16):
    assert weight_errors(bf16, bf16) == []


YARDSTICKS = {
    "rounded-weights": Interval(0.01, 0.008, 0.012),
    "rounded-both": Interval(0.02, 0.018, 0.024),
}


@pytest.mark.parametrize(
    ("rounds", "limit"),
    [
        ("nothing", 0.01),
        ("weights", 0.03),
        ("weights and activations", 0.06),
        ("weights, activations to FP8", 0.02),
    ],
)
def test_divergence_is_judged_by_what_is_rounded(rounds, limit):
    kl = Interval(1.2 * limit, 1.01 * limit, 1.4 * limit)
    [flag] = served_flags(kl, rounds, YARDSTICKS)
    assert f"what rounds {rounds} may have" in flag
    assert served_flags(replace(kl, low=0.99 * limit), rounds, YARDSTICKS) == []


def test_flag_says_how_far():
    [flag] = served_flags(Interval(0.1, 0.09, 0.11), "weights and activations", YARDSTICKS)
    assert flag.startswith("its divergence is 5 times that of rounded-both (0.02 nats), ")


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_divergence_that_is_no_number_is_flagged(value):
    assert served_flags(Interval(value, value, value), "weights and activations", YARDSTICKS)


def test_rounded_weights_are_those_of_the_format(bf16, modelopt, tmp_path):
    round_checkpoint(bf16, tmp_path / "rounded")
    exact = load_file(bf16 / "model.safetensors")
    rounded = load_file(tmp_path / "rounded" / "model.safetensors")
    assert exact.keys() == rounded.keys()
    stored = {e.layer: e for e in weight_errors(modelopt, bf16)}
    for name, tensor in exact.items():
        layer = name.removesuffix(".weight")
        if layer not in stored:
            assert torch.equal(rounded[name], tensor), name
            continue
        error = (rounded[name].float() - tensor.float()).norm() / tensor.float().norm()
        # The test's values are rounded to bfloat16 once more.
        assert float(error) == pytest.approx(stored[layer].relative, rel=0.01)
    assert Path(tmp_path / "rounded" / "tokenizer.json").is_file()


def test_rounded_activations_are_those_of_the_format():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    off = (rounded(x) - x).norm() / x.norm()
    assert 0.07 < float(off) < 0.11
    assert torch.equal(rounded(x[2:3] * 2.0**20), rounded(x)[2:3] * 2.0**20)  # a scale per token
    grid = torch.tensor([[0.0, 0.5, 1, 1.5, 2, 3, 4, 6] * 8]) * 448
    assert torch.equal(rounded(grid), grid)


def test_fp8_activations_are_those_of_the_format():
    x = torch.randn(5, 70, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = rounded(x, "fp8")
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    scale = x.float().abs().amax(-1, keepdim=True) / 448
    direct = (x.double() / scale).numpy().astype(ml_dtypes.float8_e4m3fn).astype(float)
    np.testing.assert_allclose(found.double(), direct * scale.numpy(), rtol=2**-8)  # bfloat16
    assert torch.equal(rounded(x[2:3] * 2.0**20, "fp8"), found[2:3] * 2.0**20)  # a scale per token


@pytest.mark.parametrize("input_format", [1, 2, "fp8"])
def test_inputs_of_the_layers_are_rounded_and_no_others(input_format):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 32))
    model = nn.ModuleDict({"layers": nn.ModuleList([layer]), "head": nn.Linear(32, 8)})
    x = torch.randn(3, 32)
    before = model["head"](x)
    first, _, second = layer
    inner = nn.functional.silu(first(rounded(x, input_format)))
    expected = second(rounded(inner, input_format))
    hooks = round_inputs(model, nn.Linear, input_format)
    assert len(hooks) == 2
    assert torch.equal(layer(x), expected)
    assert torch.equal(model["head"](x), before)
