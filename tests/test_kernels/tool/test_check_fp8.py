"""Tasks of ``check`` on sm_90: the ops that write E4M3."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import nvfp4_kernels
from nvfp4_kernels.tool import check
from nvfp4_kernels.tool.fp8_rows_case import Fp8RowsCase, TimedFp8Rows
from nvfp4_kernels.tool.quantize_case import FORMS
from nvfp4_kernels.tool.task import Mismatch
from tests.test_kernels.tool.test_check import StandIn

FP16 = torch.float16
CASES = [
    *(Fp8RowsCase(*form, 5, 80) for form in FORMS),
    Fp8RowsCase("quantize", True, 2, 4096, FP16),
]


@pytest.mark.arch("sm_90")
@pytest.mark.schedules("random 1")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels_pass(case: Fp8RowsCase, op_device: torch.device) -> None:
    assert case.run(StandIn(op_device))["values"] == case.m * case.k


@pytest.mark.arch("sm_90")
@pytest.mark.schedules("random 1")
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_kernels_are_timed(form: tuple[str, bool], op_device: torch.device) -> None:
    op, machine = form[0], StandIn(op_device)
    seen = TimedFp8Rows("section", *form, 7, 64).run(machine)
    given = 2 * 7 * 64 * (1 + (op.startswith("add") or "silu" in op))
    nbytes = given + 7 * 64 + 2 * 64 * ("norm" in op) + 2 * 7 * 64 * op.startswith("add")
    assert seen == {"us": 1.0, "tb_per_s": pytest.approx(nbytes / 1e6)}
    assert machine.calls == [64]


def altered(op: str, change: Callable[[list[Tensor]], Any], patch: pytest.MonkeyPatch) -> None:
    """Replace ``op`` by one whose results ``change`` alters."""
    right = getattr(nvfp4_kernels, op)

    def wrong(*arguments: Any) -> Any:
        found = right(*arguments)
        parts = [found] if isinstance(found, Tensor) else list(found)
        change(parts)
        return parts[0] if isinstance(found, Tensor) else tuple(parts)

    patch.setattr(nvfp4_kernels, op, wrong)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_wrong_bytes_are_found(form: tuple[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    altered(form[0], lambda parts: parts[0].view(torch.uint8).bitwise_xor_(0x11), monkeypatch)
    with pytest.raises(Mismatch, match=r"values are wrong|bytes differ"):
        Fp8RowsCase(*form, 5, 64).run(StandIn())


@pytest.mark.parametrize("op", ["silu_mul_quantize", "rms_norm_quantize"])
def test_a_wrong_value_is_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    altered(op, lambda parts: parts[0].view(torch.uint8)[1, 3:4].bitwise_xor_(0x08), monkeypatch)
    with pytest.raises(Mismatch, match=r"a value is .* steps off, may be 1.5 at the most"):
        Fp8RowsCase(op, False, 5, 64).run(StandIn())


@pytest.mark.parametrize("op", ["silu_mul_quantize", "add_rms_norm_quantize"])
def test_a_wrong_scale_is_found(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    altered(op, lambda parts: parts[1][2].mul_(2), monkeypatch)
    with pytest.raises(Mismatch, match=r"a value is .* steps off, may be 1.5 at the most"):
        Fp8RowsCase(op, True, 5, 64).run(StandIn())


def test_a_wrong_residual_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    altered("add_rms_norm_quantize", lambda parts: parts[-1][3].neg_(), monkeypatch)
    with pytest.raises(Mismatch, match=r"values are wrong"):
        Fp8RowsCase("add_rms_norm_quantize", False, 5, 64).run(StandIn())


def test_quick_is_a_part() -> None:
    for tasks in (check.fp8_correctness, check.fp8_timings):
        few, all_ = ([task.name for task in tasks(quick)] for quick in (True, False))
        assert set(few) < set(all_)
    tasks = check.tasks_of("sm_90", quick=False)
    names = [(task.section, task.name) for task in tasks]
    assert len(set(names)) == len(names)
    for op, per_token in FORMS:
        form = re.compile(rf"{op} to E4M3{', per token' * per_token}, \d+×")
        sections = {section for section, name in names if form.match(name)}
        assert sections == {"correctness", check.QUANTIZE_SECTION}


def test_tasks_depend_on_the_family() -> None:
    of_sm100 = [*check.correctness(True), *check.timings(True)]
    for arch in ("sm_100", "sm_103"):
        assert check.tasks_of(arch, quick=True) == of_sm100
    assert all("E4M3" in task.name for task in check.tasks_of("sm_90", quick=True))
