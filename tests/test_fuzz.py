"""Tests of the fuzzer: seeds of every op pass; broken ops and wrongly accepted calls are found."""

import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

import nvfp4_kernels
from nvfp4_kernels.activation import Activation
from tests import devices
from tests.fuzz.__main__ import main
from tests.fuzz.draw import Draw
from tests.fuzz.run import EMULATED, OPS, run_seed, run_seeds
from tests.mutants import Mutant
from tests.mutants.kernels import Room

COMBINE = import_module("nvfp4_kernels.moe.combine.reference")
NO_OPS = {
    "Dispatched", "HeadRotation", "Ids", "IndexerKeys", "IndexerPagedKeys", "InvalidArgument",
    "Logits", "NoKernelError", "Nvfp4Tensor", "PerToken", "PerTokenFp8", "Router", "Routing",
    "Static", "StaticFp8",
}  # fmt: skip


def test_every_public_op_is_fuzzed() -> None:
    assert set(OPS) == set(nvfp4_kernels.__all__) - NO_OPS


def test_references() -> None:
    table = run_seeds(0, 250)
    assert not table.findings, "\n".join(table.findings)
    outcomes = {how for _, how in table.counts}
    assert {"compared", "refused"} <= outcomes


SEEDS = (0, 1, 5, 9, 11, 13, 21, 22, 24, 28, 34)


@pytest.mark.parametrize("seed", SEEDS)
def test_kernels(seed: int) -> None:
    check_kernel(seed, EMULATED)


def test_nan_of_a_token_stays_its_own() -> None:
    """Seed that draws two tokens whose SiLU has the same reciprocal."""
    check_kernel(346, ("grouped_gemm",))


def check_kernel(seed: int, ops: tuple[str, ...]) -> None:
    devices.cutlass_or_skip()
    verdict = run_seed(seed, ops, emulated=True)
    assert verdict.outcome != "finding", f"{verdict.drawn}: {verdict.finding}"


def test_a_seed_is_the_same_again_among_any_others() -> None:
    alone = run_seed(17, ("gemm",))
    run_seeds(0, 5)
    assert run_seed(17, ("gemm",)) == alone


# --- faults that must be found --------------------------------------------------------------------

Break = Callable[[Any], Any]


def _without_bias(real: Any) -> Any:
    return lambda call: real(call._replace(bias=None))


def _nibbles_swapped(real: Any) -> Any:
    def broken(*args: Any) -> Any:
        data, *rest = real(*args)
        return data >> 4 | data << 4, *rest

    return broken


def _last_bits_flipped(real: Any) -> Any:
    return lambda *args: (real(*args).view(torch.uint8) ^ 1).view(torch.float8_e4m3fn)


def _slightly_more(real: Any) -> Any:
    def broken(*args: Any) -> Any:
        out, *rest = real(*args)
        return (out.float() * 1.01).to(out.dtype), *rest

    return broken


def _unweighted(real: Any) -> Any:
    return lambda y, rows, weights, dtype: real(y, rows, None, dtype)


def _first_kept(real: Any) -> Any:
    def broken(*args: Any) -> Any:
        indices, valid = real(*args)
        return indices.flip(1), valid

    return broken


def _later_of_equals(real: Any) -> Any:
    return lambda values, count: values.shape[1] - 1 - real(values.flip(1), count)


def _crashes(real: Any) -> Any:
    return lambda *args: [][0]


def broken(module: str, name: str, change: Break) -> Mutant:
    return Mutant(Room("nvfp4_kernels").swapped(module, name, change))


MUTANTS = {
    "gemm": broken("gemm.reference", "gemm", _without_bias),
    "quantize": broken("quantize.reference", "quantize", _nibbles_swapped),
    "rms_norm_quantize": broken("quantize.reference", "quantize_fp8", _last_bits_flipped),
    "add_rms_norm": broken("norm.reference", "add_rms_norm", _slightly_more),
    "merge_segments": broken("attention.merge.reference", "merge_segments", _slightly_more),
    "attention": broken("attention.reference", "attention", _slightly_more),
    "moe_combine": broken("moe.combine.reference", "moe_combine", _unweighted),
    "indexer_topk": broken("indexer.reference", "topk", _first_kept),
    "moe_topk": broken("moe.topk.reference", "_descending", _later_of_equals),
    "rotary_embedding": broken("rotary.reference", "rotary_embedding", _crashes),
}


@pytest.mark.parametrize("op", MUTANTS)
def test_a_broken_op_is_found(op: str) -> None:
    with MUTANTS[op].applied():
        table = run_seeds(0, 30, ops=(op,))
    assert any(f"# {op}(" in line for line in table.findings)


# For each op: a check to be removed, and the argument whose wrong values then pass.
UNCHECKED = {
    "rotary_embedding": ("nvfp4_kernels.rotary.op._check_positions", "positions"),
    "paged_attention": ("nvfp4_kernels.attention.arguments._check_pages", "block_table"),
    "moe_combine": ("nvfp4_kernels.moe.combine.op.check_shape", "topk_weights"),
    "indexer_store_k": ("nvfp4_kernels.indexer.cache_op._check_slots", "slot_mapping"),
}


@pytest.mark.parametrize("op", UNCHECKED)
def test_an_argument_that_nobody_checks_is_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check, argument = UNCHECKED[op]
    module, name = check.rsplit(".", 1)
    monkeypatch.setattr(import_module(module), name, lambda *args: None)
    found = run_seeds(0, 600, ops=(op,)).findings
    assert any(f"; broken: {argument} " in line for line in found)


def test_a_finding_repeats_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("a tensor inside of torch")

    monkeypatch.setattr(COMBINE, "moe_combine", broken)
    assert main(["--seeds", "9", "--op", "moe_combine"]) == 1
    line = capsys.readouterr().out.splitlines()[0]
    command = re.match(r"python -m tests\.fuzz (--first \d+ --seeds 1 --op moe_combine)  # ", line)
    assert command
    assert main(command[1].split()) == 1
    assert capsys.readouterr().out.splitlines()[0] == line


def test_without_findings_the_status_is_0() -> None:
    assert main(["--seeds", "3", "--op", "moe_route"]) == 0


@pytest.mark.processes
def test_a_crash_names_its_seed() -> None:
    """Crash as in a kernel that reads unmapped memory."""
    script = (
        "import ctypes\n"
        "from tests.fuzz.__main__ import main\n"
        "from tests.fuzz.crash import guarded\n"
        "from nvfp4_kernels.moe.combine import reference\n"
        "reference.moe_combine = lambda *given: ctypes.string_at(0)\n"
        "given = ['--op', 'moe_combine', '--seeds', '20', '--first', '1']\n"
        "raise SystemExit(guarded(lambda begins: main(given, begins), ' --op moe_combine'))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert re.search(
        r"--first \d+ --seeds 1 --op moe_combine  # the process died of SIGSEGV", ended.stdout
    )


def test_a_seed_that_takes_too_long_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*args: Any) -> torch.Tensor:
        while True:
            pass

    monkeypatch.setattr("tests.fuzz.run.SECONDS", 0.1)
    monkeypatch.setattr(COMBINE, "moe_combine", endless)
    assert any("TooSlow" in line for line in run_seeds(0, 3, ops=("moe_combine",)).findings)


# --- faults that the fuzzer has found -------------------------------------------------------------


@pytest.mark.parametrize("a", [[], "text"])
def test_gemv_of_what_is_no_tensor(a: Any) -> None:
    given = OPS["gemv"].draw(Draw(np.random.default_rng(1))) | {"a": a}
    with pytest.raises(RuntimeError, match="for argument 'a'"):
        nvfp4_kernels.gemv(**given)


def test_an_activation_without_a_name() -> None:
    given = OPS["grouped_gemm"].draw(Draw(np.random.default_rng(1)))
    given["activation"] = Activation(None)  # type: ignore[arg-type]
    with pytest.raises(nvfp4_kernels.InvalidArgument, match="activation: has no name, must be one"):
        nvfp4_kernels.grouped_gemm(**given)
