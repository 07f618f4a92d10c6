"""Sensitivity example: values as by the quantising tool, products as by the ops, and its lists.

The layer lists that the example chooses must stay within the given budget.
"""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from examples.perplexity import Interval
from examples.sensitivity import run as run_module
from examples.sensitivity.__main__ import app
from examples.sensitivity.budget import Budget, make_budget
from examples.sensitivity.choose import (
    check_budget,
    fewest,
    most_sensitive,
    within_bits,
    worth_their_bytes,
)
from examples.sensitivity.deviation import Deviation, measure
from examples.sensitivity.fake_quantize import fake_quantised, quantise_weights
from examples.sensitivity.groups import Group, bits_per_weight, linears_of
from examples.sensitivity.subject import open_subject
from nvfp4_kernels import Static, gemm, quantize
from nvfp4_kernels.formats.scale_search import SCALE_RULES
from tests.test_quantizer.checkpoints import LINEARS, read_tensors, save_checkpoint
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

SHORT = {"windows": 6, "window_length": 32, "calibration_tokens": 512, "device": "cpu"}
OPTIONS = ["--windows", "6", "--window-length", "32", "--calibration-tokens", "512",
           "--device", "cpu"]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"{n * n:x} " for n in range(1500)))
    return file


@pytest.fixture(scope="module")
def subject(checkpoint, text):
    return open_subject(checkpoint, text, text, dtype="float32", **SHORT)


@pytest.fixture(scope="module")
def written(checkpoint, text, tmp_path_factory):
    """Tensors that the quantising tool writes for the same checkpoint and text."""
    folder = tmp_path_factory.mktemp("written") / "nvfp4"
    quantize_checkpoint(checkpoint, folder, scales="sweep", calibrate=text, calibration_tokens=512,
                        seq_len=256)  # fmt: skip
    return read_tensors(folder)


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "300"})


def test_groups_are_the_servers_layers(subject):
    names = [group.name.removeprefix("model.layers.") for group in subject.groups]
    layer = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
    assert names == [f"{i}.{part}" for i in (0, 1) for part in layer]
    assert sorted(linears_of(subject.groups)) == sorted(LINEARS)


def test_weights_and_input_scales_are_the_tools(subject, written):
    weights, errors = quantise_weights(subject.model, LINEARS, "sweep")
    for name in LINEARS:
        assert torch.equal(weights[name].data, written[f"{name}.weight"])
        stored = written[f"{name}.weight_scale"].view(torch.uint8)
        assert torch.equal(weights[name].scales.view(torch.uint8), stored)
        assert torch.equal(weights[name].global_scale, written[f"{name}.weight_scale_2"])
        assert torch.equal(subject.input_scales[name], written[f"{name}.input_scale"])
        original = subject.model.get_submodule(name).weight.double()
        expected = (weights[name].dequantize().double() - original).square().sum()
        assert errors[name]["sweep"] == pytest.approx(expected.item())
        assert errors[name]["energy"] == pytest.approx(original.square().sum().item())
        assert errors[name]["sweep"] < errors[name]["four-over-six"] < errors[name]["absmax"]


def test_a_layer_computes_what_the_ops_compute(subject):
    name = "model.layers.1.mlp.down_proj"
    layer, scale = subject.model.get_submodule(name), subject.input_scales[name]
    weights, _ = quantise_weights(subject.model, [name], "absmax")
    x = torch.randn(9, layer.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    with fake_quantised(subject.model, [name], weights, subject.input_scales):
        found = layer(x.float())
    blocked = weights[name].to_blocked()
    alpha = (blocked.global_scale * scale).reshape(1)
    expected = gemm(
        *quantize(x, Static(scale)), blocked.data, blocked.scales, alpha, [layer.out_features]
    )
    torch.testing.assert_close(found.to(expected.dtype), expected, rtol=2**-7, atol=1e-3)
    assert (found - layer(x.float())).abs().max() > 0.01


def test_the_model_is_itself_afterwards(subject):
    before = subject.model(subject.windows[:1]).logits
    weights, _ = quantise_weights(subject.model, LINEARS, "absmax")
    with (
        pytest.raises(KeyError),
        fake_quantised(subject.model, [*LINEARS, "lm_head"], weights, subject.input_scales),
    ):
        pass
    assert torch.equal(subject.model(subject.windows[:1]).logits, before)


def test_deviation_is_that_of_a_copy_with_the_same_values(subject, checkpoint):
    """The reference is a model with replaced weights, weight-only, in float64 and one batch."""
    linears = list(subject.groups[2].linears)
    weights, _ = quantise_weights(subject.model, linears, "absmax")
    found = measure(
        subject, lambda names: fake_quantised(subject.model, names, weights, {}),
        {"one": linears, "none": []}, windows_at_once=4,
    )  # fmt: skip
    logits = []
    for replaced in (False, True):
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
        for name in linears if replaced else []:
            model.get_submodule(name).weight.data = weights[name].dequantize(torch.float64)
        with torch.no_grad():
            logits.append(model(subject.windows[:, :-1]).logits.log_softmax(-1))
    reference, changed = logits
    kl = (reference.exp() * (reference - changed)).sum(-1).numpy()
    np.testing.assert_allclose(found["one"].divergence, kl, rtol=1e-3, atol=1e-6)
    assert found["one"].kl.estimate == pytest.approx(kl.mean(), rel=1e-4)
    next_tokens = subject.windows[:, 1:, None]
    rise = (reference - changed).gather(-1, next_tokens).mean().item()
    assert found["one"].log_perplexity.estimate == pytest.approx(rise, rel=1e-3)
    assert found["one"].kl.low < found["one"].kl.estimate < found["one"].kl.high
    assert found["none"].kl == found["none"].log_perplexity == Interval(0, 0, 0)


def group(name, extra, quantised=100):
    weights = (extra + quantised) // 2
    return Group(name, (name,), weights, quantised)


GROUPS = [group("a", 300), group("b", 600), group("c", 200), group("d", 3000)]
KL = {"a": 0.3, "b": 0.9, "c": 0.1, "d": 1.0}


def names(groups):
    return "".join(g.name for g in groups)


def test_choices():
    assert names(most_sensitive(GROUPS, KL, 2)) == "db"
    ranked = worth_their_bytes(GROUPS, KL)
    assert names(ranked) == "bacd"
    total = sum(g.weights for g in GROUPS)
    assert bits_per_weight(GROUPS, []) == 8 * 400 / total
    assert bits_per_weight(GROUPS, GROUPS) == 16
    room = 8 * (400 + 900) / total
    assert names(within_bits(ranked, room)) == "ba"
    assert names(within_bits(ranked, room - 0.1)) == "bc"
    assert names(within_bits(ranked, 8 * (400 + 599) / total)) == "ac"


@pytest.mark.parametrize("needed", range(1, 9))
def test_fewest_is_found_by_bisection(needed):
    asked = []
    assert fewest(8, lambda n: asked.append(n) or n >= needed) == needed
    assert len(asked) == math.log2(8)


def test_budgets():
    assert make_budget(None, None, None, 0.5) == Budget(win_back=0.5)
    assert make_budget(None, 3, None, 0.5) == Budget(max_ignored=3)
    with pytest.raises(ValueError, match="win_back, keep_bits: exclude one another"):
        make_budget(0.1, None, 5, 0.5)
    with pytest.raises(ValueError, match="win_back: is 1, must lie between 0 and 1"):
        make_budget(1, None, None, 0.5)
    with pytest.raises(ValueError, match="max_ignored: is 0, must be at least 1"):
        make_budget(None, 0, None, 0.5)


def test_refused_budgets():
    with pytest.raises(ValueError, match="max_ignored: is 4, must be less than 4"):
        check_budget(GROUPS, Budget(max_ignored=4))
    for bits in (2.0, 16.0):
        with pytest.raises(ValueError, match=rf"keep_bits: is {bits:g}, must be from 2\.1"):
            check_budget(GROUPS, Budget(keep_bits=bits))


def test_smallest_and_largest_budgets_choose():
    ranked = worth_their_bytes(GROUPS, KL)
    least = bits_per_weight(GROUPS, [GROUPS[2]])
    for bits, chosen in ((least, "c"), (15.99, "bac")):
        check_budget(GROUPS, Budget(keep_bits=bits))
        assert names(within_bits(ranked, bits)) == chosen
    check_budget(GROUPS, Budget(max_ignored=3))


def test_command_writes_a_list_that_the_tool_takes(checkpoint, text, tmp_path):
    out = tmp_path / "out"
    result = run(checkpoint, "--text", text, "--calibrate", text, "--out", out, *OPTIONS,
                 "--scales", "sweep")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "The list costs" in result.output
    assert (out / "sensitivity.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((out / "results.json").read_text())
    assert found["kl_won"]["estimate"] == pytest.approx(
        found["quantised"]["kl"]["estimate"] - found["with_list"]["kl"]["estimate"]
    )
    assert found["tokens"] == 3 * 31
    assert set(found["groups"][0]["weight_error"]) == set(SCALE_RULES)

    listed = (out / "ignore.txt").read_text().split()
    ignored = [row["group"] for row in found["groups"] if row["ignored"]]
    assert listed == [name for group in ignored for name in group["linears"]]
    sizes = {}
    for ignore in ([], listed):
        summary = quantize_checkpoint(checkpoint, tmp_path / f"{len(ignore)}", calibrate=text,
                                      calibration_tokens=256, ignore=ignore)  # fmt: skip
        sizes[bool(ignore)] = summary.bytes_after
    cost = found["with_list"]["nbytes"] - found["quantised"]["nbytes"]
    assert sizes[True] - sizes[False] == cost > 0


def test_inputs_of_more_terms_are_measured_beside(subject, checkpoint, text, tmp_path):
    result = run(checkpoint, "--text", text, "--calibrate", text, "--out", tmp_path, *OPTIONS,
                 "--input-terms", "1,2,3,0")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "inputs ×2" in result.output
    assert "16-bit inputs, none ignored" in result.output
    found = json.loads((tmp_path / "results.json").read_text())
    weights, _ = quantise_weights(subject.model, LINEARS, "absmax")
    [sixteen_bit] = direct_kl(subject, weights, {}, slice(1, None, 2), [[]])
    kl = {t: whole["kl"]["estimate"] for t, whole in found["quantised_with_terms"].items()}
    assert kl["0"] == pytest.approx(sixteen_bit, rel=1e-5)
    one = found["quantised"]["kl"]["estimate"] - sixteen_bit
    assert abs(kl["2"] - sixteen_bit) < 0.1 * one
    assert abs(kl["3"] - sixteen_bit) < 0.01 * one
    for row in found["groups"]:
        one, two, three, none = (row["kl"], *(row["kl_with_terms"][t] for t in "230"))
        assert one["estimate"] > none["estimate"]
        assert three["estimate"] == pytest.approx(none["estimate"], rel=0.01)
        assert two["estimate"] == pytest.approx(none["estimate"], rel=0.1)


def test_budget_of_bits_is_kept(subject, checkpoint, text, tmp_path):
    result = run(checkpoint, "--text", text, "--out", tmp_path, *OPTIONS, "--keep-bits", "7")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["quantised"]["bits_per_weight"] < found["with_list"]["bits_per_weight"] <= 7
    listed = (tmp_path / "ignore.txt").read_text().split()
    weights, _ = quantise_weights(subject.model, LINEARS, "absmax")
    judged = direct_kl(subject, weights, {}, slice(1, None, 2), [[], listed])
    assert [found[name]["kl"]["estimate"] for name in ("quantised", "with_list")] == pytest.approx(
        judged, rel=1e-5
    )
    assert judged[0] > judged[1] > 0


def test_list_is_the_shortest_that_wins_enough(subject, checkpoint, text, tmp_path):
    """The list is sufficient on the windows that chose it, but not necessarily on others."""
    result = run(checkpoint, "--text", text, "--calibrate", text, "--out", tmp_path, *OPTIONS,
                 "--win-back", "0.6")  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "results.json").read_text())
    weights, _ = quantise_weights(subject.model, LINEARS, "absmax")
    chosen_on = slice(0, None, 2)
    kl = {
        group.name: direct_kl(subject, weights, subject.input_scales, chosen_on,
                              [set(LINEARS) - set(group.linears)])[0]
        for group in subject.groups
    }  # fmt: skip
    ranked = worth_their_bytes(subject.groups, kl)
    count = sum(row["ignored"] for row in found["groups"])
    lists = [linears_of(ranked[:n]) for n in (0, count - 1, count)]
    assert (tmp_path / "ignore.txt").read_text().split() == [n for n in LINEARS if n in lists[2]]
    none, shorter, whole = direct_kl(subject, weights, subject.input_scales, chosen_on, lists)
    assert whole <= 0.4 * none < shorter


def test_lists_are_chosen_on_windows_they_are_not_judged_on():
    divergence = np.array([[1.0], [5.0], [1.0], [5.0], [1.0]])
    deviation = Deviation(divergence, divergence, divergence)
    assert run_module._choosing_kl(deviation) == 1
    assert deviation.of_windows(run_module.JUDGING).kl.estimate == 5


def direct_kl(subject, weights, input_scales, windows, lists):
    """KL for each list, on some windows, with all linears quantised except those listed."""
    found = measure(
        replace(subject, windows=subject.windows[windows]),
        lambda linears: fake_quantised(subject.model, linears, weights, input_scales),
        {str(i): [n for n in LINEARS if n not in ignored] for i, ignored in enumerate(lists)},
        windows_at_once=8,
    )
    return [deviation.kl.estimate for deviation in found.values()]


def test_mistakes_are_named(checkpoint, text, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "quantise_weights", lambda *_: pytest.fail("was measured"))
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"\xe4" * 99)
    cases = [
        ([tmp_path / "absent", "--text", text], "absent is not a folder"),
        ([broken, "--text", text], "holds no tokenizer that transformers can load"),
        ([checkpoint, "--text", tmp_path / "absent.txt"], "absent.txt is not a file; give a UTF-8"),
        ([checkpoint, "--text", latin], "is not UTF-8"),
        ([checkpoint, "--text", text, "--windows", "9999"], "ask for fewer with --windows"),
        ([checkpoint, "--text", text, "--window-length", "999"], "the model takes at most 256"),
        ([checkpoint, "--text", text, "--calibrate", latin], "calibrate: "),
        ([checkpoint, "--text", text, "--scales", "best"], "scales: is 'best', must be one of abs"),
        ([checkpoint, "--text", text, "--dtype", "int8"], "dtype: is 'int8', must be float32 or"),
        ([checkpoint, "--text", text, "--device", "tpu"], "device: is 'tpu', must be cuda or cpu"),
        (
            [checkpoint, "--text", text, "--calibrate", text, "--input-terms", "1,5"],
            "input_terms: is '1,5', must be numbers from 0 to 4",
        ),
        ([checkpoint, "--text", text, "--calibrate", text, "--input-terms", "2,2"], "each once"),
        ([checkpoint, "--text", text, "--input-terms", "2"], "stay in 16 bits; give --calibrate"),
        ([checkpoint, "--text", text, "--win-back", "2"], "win_back: is 2, must lie between"),
        ([checkpoint, "--text", text, "--max-ignored", "99"], "max_ignored: is 99, must be less"),
        ([checkpoint, "--text", text, "--keep-bits", "1"], "keep_bits: is 1, must be from"),
        ([checkpoint, "--text", text, "--out", latin], "latin.txt is a file; name another folder"),
    ]
    for arguments, message in cases:
        head, *rest = arguments
        result = run(head, "--out", tmp_path / "out", *OPTIONS, *rest)
        assert result.exit_code == 1, message
        assert message in result.output.replace("\n", " ")
    assert not (tmp_path / "out").exists()
