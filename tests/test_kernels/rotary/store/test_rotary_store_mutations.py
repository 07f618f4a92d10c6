"""Mutation tests of ``rotary_store``: each mutant is reported, or its results are wrong."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_kernels import rotary_store
from nvfp4_kernels.rotary.store import reference
from tests import devices
from tests.emulator import EAGER, STANDARD
from tests.emulator.findings import MissingDependencyWait
from tests.test_kernels.changed_source import changed_source
from tests.test_kernels.mistakes import NOTHING, WRONG, first_noticed, loaded_ptx
from tests.test_kernels.rotary.store import test_rotary_store
from tests.test_kernels.rotary.store.rotary_store_cases import (
    CASES,
    FP16,
    FP32,
    Case,
    check_kernel,
    on,
    use_many,
)
from tests.test_kernels.rotary.store.test_rotary_store_kernel import (
    check_each_byte_once,
    check_in_place,
)

PACKAGE = "nvfp4_kernels.rotary.store"
CPU = torch.device("cpu")

# Heads fill neither a warp nor a CTA; a token has no slot.
PLAIN = Case(5, 3, 1, 96, 64, norms="qk", unstored=1, padding=1)
NEIGHBOURS = replace(PLAIN, neox=False, table_dtype=FP32, norms="")
QUANTISED = Case(3, 2, 2, 32, 32, fp8=True, norms="k", unstored=1)


@dataclass(frozen=True)
class Mistake:
    """Source text that occurs once, its replacement, and the expected finding's class, or WRONG."""

    module: str
    right: str
    wrong: str
    caught: str = WRONG
    on: Case = PLAIN
    many: bool = False


WAIT = "ptx.griddepcontrol(ptx.GridDepAction.WAIT)"
LAUNCH = "ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)"
MISTAKES = {
    # Rotation.
    "sine negated": Mistake("head", "low * cos - high * sin", "low * cos + high * sin"),
    "products fused": Mistake(
        "head",
        'return rounded("sub", *products)',
        "return cute.math.fma(low, cos, -products[1])",
        on=Case(80, 8, 1, 128, 128, FP16, FP32),
    ),
    "angles of the second piece those of the first": Mistake(
        "head", "(part.angle + half) // 2", "part.angle // 2", on=NEIGHBOURS
    ),
    "token taken for its position": Mistake(
        "kernel",
        "heads.angles(arguments.table, position, part)\n        out",
        "heads.angles(arguments.table, Int64(token), part)\n        out",
    ),
    # Norms.
    "weights exchanged": Mistake(
        "kernel",
        "arguments.q_norm.toint(), arguments.k_norm.toint()",
        "arguments.k_norm.toint(), arguments.q_norm.toint()",
    ),
    "eps left out": Mistake("head", "_root(mean + eps)", "_root(mean)"),
    "idle threads add to the sum": Mistake(
        "head", "cutlass.select_(part.live, squares, Float32(0.0))", "squares"
    ),
    "a round of the sum too few": Mistake(
        "head", "while distance < self.tile.lanes:", "while 2 * distance < self.tile.lanes:"
    ),
    "another order of the sum": Mistake(
        "head",
        "for piece in values for value in piece",
        "for piece in values[::-1] for value in piece",
        on=Case(80, 8, 1, 128, 128, FP16, FP16, norms="q", norm_dtype=FP16),
    ),
    # Heads.
    "second head beside the first": Mistake(
        "kernel", "first + step * units", "first + step", on=Case(2), many=True
    ),
    # The store.
    "tokens without a slot are stored": Mistake("kernel", "& (slot >= 0)", "", "OutOfBounds"),
    "slot 0 is none": Mistake("kernel", "(slot >= 0)", "(slot > 0)", on=Case(80, 1, 1, 16, 16)),
    "head's stride left out": Mistake(
        "pages", "Int64(head) * cache.kv_head_stride", "Int64(head)", "Misaligned", on=QUANTISED
    ),
    "scales exchanged": Mistake(
        "kernel", "map(Divisor.of, scales)", "map(Divisor.of, scales[::-1])", on=QUANTISED
    ),
    "scale's reciprocal": Mistake(
        "head", "for _ in range(2):", "for _ in range(0):", on=Case(17, 2, 2, 128, 32, fp8=True)
    ),
    "keys not rotated": Mistake(
        "kernel", "key = heads.rotated(key, angles, part)", "key = key", on=QUANTISED
    ),
}


def outcome(case: Case, many: bool) -> str:
    """Return the first finding."""

    def check() -> None:
        with pytest.MonkeyPatch.context() as patch:
            if many:
                use_many(patch)
            check_kernel(case, CPU)

    return first_noticed(check, [EAGER])


@pytest.mark.parametrize("name", MISTAKES)
def test_caught(name: str, tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    mistake = MISTAKES[name]
    with changed_source(PACKAGE, tmp_path, mistake.module, mistake.right, mistake.wrong):
        assert outcome(mistake.on, mistake.many) == mistake.caught


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_nothing_to_catch(many: bool, tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    with changed_source(PACKAGE, tmp_path):
        for case in (PLAIN, NEIGHBOURS, QUANTISED)[: 1 if many else None]:
            assert outcome(case, many) == NOTHING


# Duplicate stores show in no result, as threads of a warp store the same.
GUARDS = {
    "units past the last": ("(unit == inside) & part.live & (numbers", "part.live & (numbers"),
    "idle threads": ("(unit == inside) & part.live & (slot", "(unit == inside) & (slot"),
    "a head too many": ("(numbers[step] < tile.query_heads)", "(numbers[step] <= 3)"),
}


@pytest.mark.parametrize("name", GUARDS)
def test_nothing_is_stored_twice(name: str, tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    with changed_source(PACKAGE, tmp_path, "kernel", *GUARDS[name]), pytest.raises(AssertionError):
        check_each_byte_once(PLAIN)


# Another warp may have overwritten the heads that such mutants read besides their own.
OVERREADERS = {
    "the last head for a missing one": ("tile.query_heads, number, first)", "5, number, 4)"),
    "a warp past the last head": (
        "first < arguments.tokens * tile.query_units",
        "first < (1 << 30)",
    ),
}


@pytest.mark.parametrize("name", OVERREADERS)
def test_in_place_nobody_reads_what_is_overwritten(name: str, tmp_path: Path) -> None:
    devices.cutlass_or_skip()

    def check() -> None:
        with pytest.MonkeyPatch.context() as patch:
            use_many(patch)
            check_in_place(CPU)

    with changed_source(PACKAGE, tmp_path, "kernel", *OVERREADERS[name]):
        assert first_noticed(check) == "DataRace"


def twice() -> None:
    """Launch two dependent kernels; the second one's queries are the first one's result."""
    given = on(CASES["Qwen3"].arguments(), CPU)
    with devices.emulated_ops(STANDARD[0]):
        first = rotary_store(**given)
        rotary_store(**given | {"q": first})


def test_a_kernel_waits_for_the_one_before(tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    with changed_source(PACKAGE, tmp_path / "right"):
        twice()
    with (
        changed_source(PACKAGE, tmp_path / "wrong", "kernel", WAIT, "pass"),
        pytest.raises(MissingDependencyWait, match=r"griddepcontrol\.wait before the"),
    ):
        twice()


def test_the_next_kernel_starts_before_the_wait(tmp_path: Path) -> None:
    """The dependent kernel can then fetch its weights while the preceding projection still runs."""
    devices.cutlass_or_skip()
    late = f"pass\n{' ' * 8}{WAIT}\n{' ' * 8}{LAUNCH}"
    for folder, change in (("right", ()), ("wrong", ("kernel", WAIT, late))):
        with changed_source(PACKAGE, tmp_path / folder, *change):
            ptx = loaded_ptx(twice)[-1]
        waits = ptx.index("griddepcontrol.wait")
        launches = ptx.rindex("griddepcontrol.launch_dependents")
        assert (launches < waits) == (folder == "right")


def test_the_kernel_before_must_not_write_a_weight() -> None:
    """A norm's weight is read before the preceding kernel has ended, as the op documents."""
    devices.cutlass_or_skip()
    given = on(CASES["Qwen3"].arguments(), CPU)
    with devices.emulated_ops(EAGER):
        first = rotary_store(**given)
        with pytest.raises(MissingDependencyWait, match=r"griddepcontrol\.wait before the read"):
            rotary_store(**given | {"q_norm": first[0, 0]})


normalise, rotate, stored = reference.normalise, reference.rotate, reference._stored
REFERENCE_MISTAKES: dict[str, tuple[str, Callable[..., Any]]] = {
    "sine negated": ("rotate", lambda x, cos, sin: rotate(x, cos, -sin)),
    "no norm": ("normalise", lambda x, *rest: x),
    "eps forgotten": ("normalise", lambda x, weight, eps, *rest: normalise(x, weight, 1.0, *rest)),
    "values in place of keys": ("_stored", lambda x, scale: stored(x.flip(0), scale)),
}


@pytest.mark.parametrize("name", REFERENCE_MISTAKES)
def test_caught_in_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(5, norms="qk")
    tests = [
        partial(each, case)
        for each in (
            test_rotary_store.test_against_float64,
            test_rotary_store.test_is_what_it_stands_for,
        )
    ]
    for test in tests:
        test()
    monkeypatch.setattr(reference, *REFERENCE_MISTAKES[name])
    for test in tests:
        with pytest.raises(AssertionError):
            test()
