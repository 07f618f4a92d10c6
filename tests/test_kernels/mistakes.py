"""Mutants of kernels and references, and checks that each is noticed.

Kernels are Python that CuTe DSL traces: ``Room`` replaces functions of an op's modules;
``without`` and ``changed`` replace primitives that kernels call; ``changed_source`` edits a copy.
"""

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import Phase, settings

from nvfp4_kernels.runtime import compile as compiler
from tests import devices
from tests.emulator import STANDARD, EmulatorError, Gpu, Schedule
from tests.emulator.findings import MissingDependencyWait

Patch = Callable[[pytest.MonkeyPatch], None]
Check = Callable[[], object]

WRONG, NOTHING = "wrong numbers", "nothing"
HYPOTHESIS_SETTINGS = "_hypothesis_internal_use_settings"
UNSHRUNK = Phase.explicit, Phase.reuse, Phase.generate
ANYTHING = ""  # which of several findings comes first depends on the schedule


@dataclass(frozen=True)
class Mistake:
    """A mutant's patch, and its finding: a class's name, ``WRONG`` or ``ANYTHING``."""

    patch: Patch
    caught: str


@dataclass(frozen=True)
class Room:
    """Patches of the definitions in a package's modules.

    An ``owner`` is a module, or a class in one: ``"mma"``, ``"mma:Mma"``.
    """

    package: str

    def swapped(self, owner: str, name: str, make: Callable[[Any], Any]) -> Patch:
        """Patch that replaces ``owner``'s ``name`` by ``make`` of the original."""

        def apply(patch: pytest.MonkeyPatch) -> None:
            module, _, kind = owner.partition(":")
            found = importlib.import_module(f"{self.package}.{module}")
            found = getattr(found, kind) if kind else found
            patch.setattr(found, name, make(getattr(found, name)))

        return apply

    def replaced(self, owner: str, name: str, value: Any) -> Patch:
        """Patch that replaces a function or number by ``value``."""
        return self.swapped(owner, name, lambda given: value)

    def with_result(self, owner: str, name: str, change: Callable[[Any], Any]) -> Patch:
        """Patch that changes the result of a function or method."""
        return self.swapped(owner, name, lambda given: lambda *args: change(given(*args)))

    def with_arguments(
        self, owner: str, name: str, change: Callable[..., tuple[Any, ...]]
    ) -> Patch:
        """Patch that changes the arguments of a function, or of a method besides ``self``."""
        kept = int(":" in owner)
        return self.swapped(
            owner,
            name,
            lambda given: lambda *args: given(*args[:kept], *change(*args[kept:])),
        )


def without(name: str, when: Callable[..., bool] = lambda *args, **kwargs: True) -> Patch:
    """Patch that leaves out every use of a primitive for which ``when`` holds."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        from cutlass.experimental import primitives as ptx

        given = getattr(ptx, name)

        def maybe(*args: Any, **kwargs: Any) -> Any:
            return None if when(*args, **kwargs) else given(*args, **kwargs)

        patch.setattr(ptx, name, maybe)

    return apply


def without_in(name: str, *callers: str) -> Patch:
    """Patch that leaves out a primitive where one of ``callers`` is the kernel's function."""
    return without(name, used_in(*callers))


def used_in(*callers: str) -> Callable[..., bool]:
    """Condition of ``without``: one of ``callers`` is the kernel's function.

    Bodies of loops and branches are functions as well: the nearest named function counts.
    """

    def called(*args: Any, **kwargs: Any) -> bool:
        frame: Any = sys._getframe(1)
        while frame is not None:
            owner = frame.f_globals.get("__name__", "")
            own = owner.startswith("nvfp4_kernels.") and "_body" not in frame.f_code.co_name
            if own and not frame.f_code.co_name.startswith(("loop_", "if_", "then_", "else_", "<")):
                return frame.f_code.co_name in callers
            frame = frame.f_back
        return False

    return called


def one_of(count: int, number: int, when: Callable[..., bool] = lambda *args: True) -> Any:
    """Condition of ``without``: the ``number``-th of every ``count`` uses that meet ``when``."""
    uses = itertools.count()
    return lambda *args, **kwargs: when(*args, **kwargs) and next(uses) % count == number


def changed(name: str, change: Callable[..., tuple[Any, ...]]) -> Patch:
    """Patch that changes the positional arguments of every use of a primitive."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        from cutlass.experimental import primitives as ptx

        given = getattr(ptx, name)
        patch.setattr(ptx, name, lambda *args, **kwargs: given(*change(*args), **kwargs))

    return apply


def nothing(*arguments: Any) -> None:
    """Do nothing, in place of a kernel's function."""


def said(what: str) -> Callable[..., bool]:
    """Condition of ``without``: the primitive's first argument is ``what``."""
    return lambda kind, *args, **kwargs: str(kind) == what


NO_DEPENDENCY_WAIT = without("griddepcontrol", said("wait"))


def noticed(check: Check) -> str:
    """Class of the emulator's finding, ``WRONG`` where ``check`` asserts, or ``NOTHING``."""
    try:
        check()
    except AssertionError:
        return WRONG
    except EmulatorError as finding:
        return type(finding).__name__
    return NOTHING


def first_noticed(
    check: Check, schedules: Sequence[Schedule] = STANDARD, arch: str = "sm_100"
) -> str:
    """Finding of the first schedule that has one; ``check`` calls ops."""
    for schedule in schedules:
        with devices.emulated_ops(schedule, arch):
            found = noticed(check)
        if found != NOTHING:
            return found
    return NOTHING


@contextmanager
def compiled_anew(*patches: Patch) -> Iterator[None]:
    """Context in which kernels are compiled with ``patches``, and forgotten afterwards."""
    devices.cutlass_or_skip()
    with devices.other_kernels(), pytest.MonkeyPatch.context() as patch:
        with devices.emulated_ops(STANDARD[0]):  # imports bind CuTe DSL to the emulator
            for apply in patches:
                apply(patch)
        compiler.compiled.cache_clear()
        try:
            yield
        finally:
            compiler.compiled.cache_clear()


def compiled_right(*patches: Patch) -> AbstractContextManager[None]:
    """Context of correct kernels, prepared by ``patches``; without patches, the cached kernels."""
    devices.cutlass_or_skip()
    return compiled_anew(*patches) if patches else nullcontext()


def check_caught(
    mistake: Mistake, check: Check, *patches: Patch, schedules: Sequence[Schedule] = STANDARD
) -> None:
    """Assert that ``check`` notices the mutant; ``patches`` prepare the kernel."""
    with compiled_anew(mistake.patch, *patches):
        found = first_noticed(check, schedules)
    print(found)
    assert found != NOTHING
    assert found.startswith(mistake.caught)


def check_nothing_to_catch(
    check: Check, *patches: Patch, schedules: Sequence[Schedule] = STANDARD
) -> None:
    """Assert that ``check`` holds for the correct kernel in every schedule."""
    with compiled_right(*patches):
        assert first_noticed(check, schedules) == NOTHING


def check_dependency_wait(twice: Check, *patches: Patch) -> None:
    """Assert that a launch waits for its predecessor, and that a missing wait is reported.

    ``twice`` launches two kernels; the second reads the first one's result.
    """
    check_dependency_waits([twice], *patches)


def check_dependency_waits(pairs: Sequence[Check], *patches: Patch) -> None:
    """Call ``check_dependency_wait`` for several pairs of launches of the same kernels."""
    with compiled_right(*patches), devices.emulated_ops(STANDARD[0]):
        for twice in pairs:
            twice()
    with compiled_anew(*patches, NO_DEPENDENCY_WAIT):
        for twice in pairs:
            missing = r"griddepcontrol\.wait before the read"
            with (
                devices.emulated_ops(STANDARD[0]),
                pytest.raises(MissingDependencyWait, match=missing),
            ):
                twice()


def check_noticed(
    test: Check, patch: pytest.MonkeyPatch, *changes: tuple[object, str, object]
) -> None:
    """Assert that a test passes, and that it fails after ``changes``, arguments of ``setattr``."""
    test()
    for change in changes:
        patch.setattr(*change)
    function = getattr(test, "func", test)
    if given := getattr(function, HYPOTHESIS_SETTINGS, None):
        # The first example that fails is enough; finding the smallest takes seconds.
        patch.setattr(function, HYPOTHESIS_SETTINGS, settings(given, phases=UNSHRUNK))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test()


def loaded_ptx(run: Check) -> list[str]:
    """PTX of the kernels that ``run`` compiles, in order."""
    seen: list[str] = []
    load = Gpu.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gpu, "load", lambda gpu, ptx: (seen.append(ptx), load(gpu, ptx))[1])
        run()
    assert seen
    return seen
