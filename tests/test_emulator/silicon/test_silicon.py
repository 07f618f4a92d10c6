"""Replay of every recorded case: the same bytes, or a finding where an H200 failed."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.emulator import ALL_LATE, EAGER, EmulatorError, Schedule, findings, randomised
from tests.emulator.findings import IllegalInstruction
from tests.test_emulator.silicon import vectors
from tests.test_emulator.silicon.agreement import disagreements, row_agrees
from tests.test_emulator.silicon.case import Case, Tolerance
from tests.test_emulator.silicon.cases import FAMILIES, descriptors, family
from tests.test_emulator.silicon.cases.faults import FINDINGS
from tests.test_emulator.silicon.replay import descriptor, run_on_emulator

_ASYNCHRONOUS = ("memory", "mbarrier", "tensor_load", "tensor_store", "bulk", "cluster", "wgmma")


@cache
def _recordings(name: str) -> dict[str, vectors.Recorded]:
    return vectors.read(name)


def _cases(*names: str) -> list[Any]:
    return [
        pytest.param(name, case, id=f"{name}-{case.name}")
        for name in names
        for case in family(name)
    ]


def _check(name: str, case: Case, schedule: Schedule) -> None:
    recorded = vectors.recorded(case, _recordings(name))
    if recorded.error:
        with pytest.raises(EmulatorError):
            run_on_emulator(case, schedule)
        return
    wrong = list(disagreements(case, recorded, run_on_emulator(case, schedule)))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("name", "case"), _cases(*(f for f in FAMILIES if f != "faults")))
def test_outputs(name: str, case: Case) -> None:
    _check(name, case, EAGER)


@pytest.mark.parametrize(("name", "case"), _cases("wgmma"))
def test_wgmma_can_round_like_an_h200(name: str, case: Case) -> None:
    recorded = vectors.recorded(case, _recordings(name)).outputs["after"]
    found = run_on_emulator(case, rounds_like_h200=True)["after"]
    np.testing.assert_array_equal(found, recorded)


@pytest.mark.parametrize("schedule", [ALL_LATE, randomised(1)], ids=["late", "random"])
@pytest.mark.parametrize(("name", "case"), _cases(*_ASYNCHRONOUS))
def test_outputs_in_other_orders(name: str, case: Case, schedule: Schedule) -> None:
    _check(name, case, schedule)


@pytest.mark.parametrize(("name", "case"), _cases("faults"))
def test_findings(name: str, case: Case) -> None:
    """Errors of an H200, and undefined behaviour that an H200 tolerated, are findings."""
    if case.name not in FINDINGS:
        _check(name, case, EAGER)
        return
    vectors.recorded(case, _recordings(name))
    with pytest.raises(getattr(findings, FINDINGS[case.name])) as caught:
        run_on_emulator(case)
    assert caught.value.where is not None, "the finding names no place"


@pytest.mark.parametrize(("name", "case"), _cases("tensor_load", "tensor_store", "bulk", "cluster"))
def test_descriptors_of_cases(name: str, case: Case) -> None:
    recorded = vectors.recorded(case, _recordings(name))
    for key, words in recorded.descriptors.items():
        assert np.frombuffer(descriptor(case.maps[key], 0), "u8").tolist() == words.tolist()


@pytest.mark.parametrize("what", [name for name, _ in descriptors.maps()])
def test_descriptors(what: str) -> None:
    """The emulator's descriptor of a tensor map is the driver's, or both refuse the map."""
    tensor_map = dict(descriptors.maps())[what]
    recorded = _recordings("descriptors")[what]
    assert recorded.digest == repr(tensor_map), "not as recorded"
    if recorded.error:
        with pytest.raises(IllegalInstruction, match="tensor map with"):
            descriptor(tensor_map, descriptors.ADDRESS)
        return
    words = np.frombuffer(descriptor(tensor_map, descriptors.ADDRESS), "u8")
    assert words.tolist() == recorded.outputs["words"].tolist()


def test_recording_is_complete() -> None:
    """Every recording has a case; only faults and tensor stores record failures."""
    for name in FAMILIES:
        recorded = _recordings(name)
        assert sorted(recorded) == sorted(case.name for case in family(name))
        failed = [case for case, result in recorded.items() if result.error]
        assert name in ("faults", "tensor_store") or not failed


def test_stale_recording_is_refused() -> None:
    case = next(iter(family("mbarrier")))
    changed = Case(case.name, case.ptx + "\n", case.inputs, case.outputs)
    with pytest.raises(LookupError, match="phases is not as recorded: run python -m"):
        vectors.recorded(changed, _recordings("mbarrier"))


def test_a_wrong_bit_is_seen() -> None:
    case = next(iter(family("integer")))
    recorded = vectors.recorded(case, _recordings("integer"))
    outputs = {name: array.copy() for name, array in recorded.outputs.items()}
    assert not list(disagreements(case, recorded, outputs))
    outputs["out32"][3, 77] ^= np.uint32(1 << 31)
    (message,) = disagreements(case, recorded, outputs)
    assert f"{case.rows['out32'][3]}: 1 of 512 differ: [77]" in message


@pytest.mark.parametrize(
    ("got", "want", "tolerance", "agree"),
    [
        (0x3F800001, 0x3F800000, Tolerance("f32", 1), True),
        (0x3F800002, 0x3F800000, Tolerance("f32", 1), False),
        (0x00000003, 0x00000001, Tolerance("f32", 1), False),
        (0x80000000, 0x00000000, Tolerance("f32"), False),
        (0x7F800000, 0x7F7FFFFF, Tolerance("f32", 4), False),
        (0xFFC00000, 0x7FFFFFFF, Tolerance("f32"), True),
        (0xFFC00000, 0x7FFFFFFF, Tolerance("f32", any_nan=False), False),
        (0x7F800000, 0x7FFFFFFF, Tolerance("f32"), False),
        (0x3C013C00, 0x3C003C00, Tolerance("f16", 1), True),
        (0x3C023C00, 0x3C003C00, Tolerance("f16", 1), False),
        (0x3F803F81, 0x3F803F80, Tolerance("bf16", 1), True),
    ],
)
def test_tolerance(got: int, want: int, tolerance: Tolerance, agree: bool) -> None:
    arrays = np.array([got], "u4"), np.array([want], "u4")
    assert row_agrees(*arrays, tolerance).tolist() == [agree]
