"""Semantics of the lane-wise instructions, called directly, compared with an H200's results."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.emulator.isa.lanewise import DTYPES, lookup
from tests.emulator.isa.semantics import compiled
from tests.test_emulator.silicon.agreement import row_agrees
from tests.test_emulator.silicon.case import Array, Case
from tests.test_emulator.silicon.cases import family
from tests.test_emulator.silicon.cases.banks import bank
from tests.test_emulator.silicon.cases.instructions import Op
from tests.test_emulator.silicon.vectors import read, recorded

_FAMILIES = ("integer", "floating", "half", "compare", "convert")


def _cases() -> list[Any]:
    return [
        pytest.param(name, case, id=f"{name}-{case.name}")
        for name in _FAMILIES
        for case in family(name)
    ]


def _presented(operand: tuple[str, int], name: str, lanes: int) -> Array | int:
    """Lanes of an operand as the semantics take them: low bits, viewed as the named dtype."""
    kind, column = operand
    if column < 0:
        return int(kind, 0)
    if kind == "p":
        return (bank("u32", column, lanes) & np.uint32(1)).astype(np.bool_)
    value = bank(kind, column, lanes)
    dtype = np.dtype(DTYPES[name])
    return value.astype(f"u{dtype.itemsize}").view(dtype)


def _register(value: Array, name: str, width: int) -> Array:
    """Result as the bits of its register: sign- or zero-extended."""
    if name == "pred":
        return np.asarray(value).astype("u4")
    array = np.asarray(value)
    if array.dtype.kind == "f":
        return array.view(f"u{array.dtype.itemsize}")
    kind = "i" if name.startswith("s") else "u"
    return array.astype(f"{kind}{width // 8}").view(f"u{width // 8}")


def _computed(op: Op, lanes: int) -> list[Array]:
    """Rows of an op, as computed by the emulator."""
    sources, kinds = op.sources(), op.results.split("|")
    meaning = lookup(op.opcode, len(sources), len(kinds))
    assert meaning is not None, f"{op.opcode} is not known as lane-wise"
    assert len(meaning.sources) == len(sources), op.opcode
    function = meaning.vector
    if isinstance(function, str):
        function = compiled(function, len(sources))
    values = [
        _presented(source, name, lanes)
        for source, name in zip(sources, meaning.sources, strict=True)
    ]
    with np.errstate(all="ignore"):
        results = function(*values)
    if len(kinds) == 1:
        results = (results,)
    widths = [32 if kind == "p" else int(kind) for kind in kinds]
    return [
        np.broadcast_to(_register(value, name, width), (lanes,))
        for value, name, width in zip(results, meaning.results, widths, strict=True)
    ]


def _difference(op: Op, got: Array, want: Array, places: Array) -> str:
    banks = [source for source in op.sources() if source[1] >= 0 and source[0] != "p"]
    shown = []
    for place in places[:3]:
        given = ", ".join(f"{int(bank(*source, len(got))[place]):#x}" for source in banks)
        shown.append(f"({given}) {int(got[place]):#x} for {int(want[place]):#x}")
    return f"{len(places)} of {len(got)} differ: {'; '.join(shown)}"


@pytest.mark.parametrize(("name", "case"), _cases())
def test_lanewise(name: str, case: Case) -> None:
    result = recorded(case, read(name))
    at: Counter[int] = Counter()
    wrong = []
    for op in case.ops:
        widths = [32 if kind == "p" else int(kind) for kind in op.results.split("|")]
        places = []
        for width in widths:
            places.append((f"out{width}", at[width]))
            at[width] += 1
        if op.text:  # sequences are replayed as kernels
            continue
        lanes = next(iter(case.outputs.values())).shape[-1]
        try:
            rows = _computed(op, lanes)
        except Exception as error:
            wrong.append(f"{op.opcode}: {type(error).__name__}: {error}")
            continue
        for (output, row), mine in zip(places, rows, strict=True):
            want = result.outputs[output][row]
            agree = row_agrees(np.ascontiguousarray(mine), want, op.tolerance)
            if not agree.all():
                wrong.append(f"{op.opcode}: {_difference(op, mine, want, np.flatnonzero(~agree))}")
    assert not wrong, "\n".join(wrong)
