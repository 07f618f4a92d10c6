"""Mutants of ``rotary_store``: each mutant is reported, or its results are wrong."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from nvfp4_kernels import rotary_store
from nvfp4_kernels.rotary.store import reference
from tests import devices
from tests.emulator import EAGER
from tests.emulator.findings import MissingDependencyWait
from tests.mutants import WRONG, Mutant, noticed
from tests.mutants.kernels import (
    WAIT,
    Room,
    check_caught,
    check_dependency_wait,
    check_launches_before_wait,
    check_nothing_to_catch,
    check_noticed,
    compiled_anew,
)
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

KERNEL, DEVICE = Room("nvfp4_kernels.rotary.store"), Room("nvfp4_kernels.device")
CPU = torch.device("cpu")

# Heads fill neither a warp nor a CTA; a token has no slot.
PLAIN = Case(5, 3, 1, 96, 64, norms="qk", unstored=1, padding=1)
NEIGHBOURS = replace(PLAIN, neox=False, table_dtype=FP32, norms="")
QUANTISED = Case(3, 2, 2, 32, 32, fp8=True, norms="k", unstored=1)


def edited(
    module: str, right: str, wrong: str, caught: str = WRONG, on: Case = PLAIN, many: bool = False
) -> Mutant:
    return Mutant(KERNEL.edited(module, right, wrong), caught, (on, many))


MUTANTS = {
    # Rotation.
    "sine negated": edited("head", "low * cos - high * sin", "low * cos + high * sin"),
    "products fused": edited(
        "head",
        'return rounded("sub", *products)',
        "return cute.math.fma(low, cos, -products[1])",
        on=Case(80, 8, 1, 128, 128, FP16, FP32),
    ),
    "angles of the second piece those of the first": edited(
        "head", "(part.angle + half) // 2", "part.angle // 2", on=NEIGHBOURS
    ),
    "token taken for its position": edited(
        "kernel",
        "heads.angles(arguments.table, position, part)\n        out",
        "heads.angles(arguments.table, Int64(token), part)\n        out",
    ),
    # Norms.
    "weights exchanged": edited(
        "kernel",
        "arguments.q_norm.toint(), arguments.k_norm.toint()",
        "arguments.k_norm.toint(), arguments.q_norm.toint()",
    ),
    "eps left out": edited("head", "_root(mean + eps)", "_root(mean)"),
    "idle threads add to the sum": edited(
        "head", "cutlass.select_(part.live, squares, Float32(0.0))", "squares"
    ),
    "a round of the sum too few": edited(
        "head", "while distance < self.tile.lanes:", "while 2 * distance < self.tile.lanes:"
    ),
    "another order of the sum": edited(
        "head",
        "for piece in values for value in piece",
        "for piece in values[::-1] for value in piece",
        on=Case(80, 8, 1, 128, 128, FP16, FP16, norms="q", norm_dtype=FP16),
    ),
    # Heads.
    "second head beside the first": edited(
        "kernel", "first + step * units", "first + step", on=Case(2), many=True
    ),
    # The store.
    "tokens without a slot are stored": edited("kernel", "& (slot >= 0)", "", "OutOfBounds"),
    "slot 0 is none": edited("kernel", "(slot >= 0)", "(slot > 0)", on=Case(80, 1, 1, 16, 16)),
    "head's stride left out": edited(
        "pages", "Int64(head) * cache.kv_head_stride", "Int64(head)", "Misaligned", on=QUANTISED
    ),
    "scales exchanged": edited(
        "kernel", "map(Divisor.of, scales)", "map(Divisor.of, scales[::-1])", on=QUANTISED
    ),
    "scale's reciprocal": Mutant(
        DEVICE.replaced(
            "divisor:Divisor", "quotient", lambda scale, x: x * scale.unit * scale.reciprocal
        ),
        WRONG,
        (Case(17, 2, 2, 128, 32, fp8=True), False),
    ),
    "keys not rotated": edited(
        "kernel", "key = heads.rotated(key, angles, part)", "key = key", on=QUANTISED
    ),
}


def check(case: Case, many: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if many:
            use_many(patch)
        check_kernel(case, CPU)


@pytest.mark.parametrize("name", MUTANTS)
def test_caught(name: str) -> None:
    check_caught(MUTANTS[name], partial(check, *MUTANTS[name].on), schedules=[EAGER])


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_nothing_to_catch(many: bool) -> None:
    for case in (PLAIN, NEIGHBOURS, QUANTISED)[: 1 if many else None]:
        check_nothing_to_catch(partial(check, case, many), KERNEL.edited(), schedules=[EAGER])


# Duplicate stores show in no result, as threads of a warp store the same.
GUARDS = {
    "units past the last": ("(unit == inside) & part.live & (numbers", "part.live & (numbers"),
    "idle threads": ("(unit == inside) & part.live & (slot", "(unit == inside) & (slot"),
    "a head too many": ("(numbers[step] < tile.query_heads)", "(numbers[step] <= 3)"),
}


@pytest.mark.parametrize("name", GUARDS)
def test_nothing_is_stored_twice(name: str) -> None:
    mutant = edited("kernel", *GUARDS[name])
    with compiled_anew(mutant.change):
        mutant.check(noticed(partial(check_each_byte_once, PLAIN)))


# Another warp may have overwritten the heads that such mutants read besides their own.
OVERREADERS = {
    "the last head for a missing one": ("tile.query_heads, number, first)", "5, number, 4)"),
    "a warp past the last head": (
        "first < arguments.tokens * tile.query_units",
        "first < (1 << 30)",
    ),
}


@pytest.mark.parametrize("name", OVERREADERS)
def test_in_place_nobody_reads_what_is_overwritten(name: str) -> None:
    def check() -> None:
        with pytest.MonkeyPatch.context() as patch:
            use_many(patch)
            check_in_place(CPU)

    check_caught(edited("kernel", *OVERREADERS[name], "DataRace"), check)


def twice() -> None:
    """Launch two dependent kernels; the second one's queries are the first one's result."""
    given = on(CASES["Qwen3"].arguments(), CPU)
    rotary_store(**given | {"q": rotary_store(**given)})


def test_a_kernel_waits_for_the_one_before() -> None:
    check_dependency_wait(twice, without_wait=KERNEL.edited("kernel", WAIT, "pass"))


def test_the_next_kernel_starts_before_the_wait() -> None:
    """The dependent kernel can then fetch its weights while the preceding projection still runs."""
    check_launches_before_wait(twice, KERNEL, "kernel")


def test_the_kernel_before_must_not_write_a_weight() -> None:
    """A norm's weight is read before the preceding kernel has ended, as the op documents."""
    devices.cutlass_or_skip()
    given = on(CASES["Qwen3"].arguments(), CPU)
    with devices.emulated_ops(EAGER):
        first = rotary_store(**given)
        with pytest.raises(MissingDependencyWait, match=r"griddepcontrol\.wait before the read"):
            rotary_store(**given | {"q_norm": first[0, 0]})


normalise, rotate, stored = reference.normalise, reference.rotate, reference.stored
REFERENCE_MUTANTS = {
    "sine negated": Mutant.replaced(reference, "rotate", lambda x, cos, sin: rotate(x, cos, -sin)),
    "no norm": Mutant.replaced(reference, "normalise", lambda x, *rest: x),
    "eps forgotten": Mutant.replaced(
        reference, "normalise", lambda x, weight, eps, *rest: normalise(x, weight, 1.0, *rest)
    ),
    "values in place of keys": Mutant.replaced(
        reference, "stored", lambda x, scale: stored(x.flip(0), scale)
    ),
}


@pytest.mark.parametrize("name", REFERENCE_MUTANTS)
def test_caught_in_the_reference(name: str) -> None:
    for test in (
        test_rotary_store.test_against_float64,
        test_rotary_store.test_is_what_it_stands_for,
    ):
        check_noticed(REFERENCE_MUTANTS[name], partial(test, Case(5, norms="qk")))
