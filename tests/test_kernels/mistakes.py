"""Mistakes made on purpose, in kernels and in references, and what notices them first.

Kernels are Python that CuTe DSL traces: ``Room`` replaces functions of an op's modules and
``without`` and ``changed`` the primitives that they call. ``changed_source`` edits copies.
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
ANYTHING = ""  # which of several findings comes first depends on the schedule's luck


@dataclass(frozen=True)
class Mistake:
    """A patch, and what notices it: a finding's class, ``WRONG`` or ``ANYTHING``."""

    patch: Patch
    caught: str


@dataclass(frozen=True)
class Room:
    """Patches of what the modules of a package define.

    An ``owner`` is a module, or a class in one: ``"mma"``, ``"mma:Mma"``.
    """

    package: str

    def swapped(self, owner: str, name: str, make: Callable[[Any], Any]) -> Patch:
        """Patch that replaces ``owner``'s ``name`` by what ``make`` returns for it."""

        def apply(patch: pytest.MonkeyPatch) -> None:
            module, _, kind = owner.partition(":")
            found = importlib.import_module(f"{self.package}.{module}")
            found = getattr(found, kind) if kind else found
            patch.setattr(found, name, make(getattr(found, name)))

        return apply

    def replaced(self, owner: str, name: str, value: Any) -> Patch:
        """Patch that puts another function or number in the place of one."""
        return self.swapped(owner, name, lambda given: value)

    def with_result(self, owner: str, name: str, change: Callable[[Any], Any]) -> Patch:
        """Patch that changes what a function or method returns."""
        return self.swapped(owner, name, lambda given: lambda *args: change(given(*args)))

    def with_arguments(
        self, owner: str, name: str, change: Callable[..., tuple[Any, ...]]
    ) -> Patch:
        """Patch that changes what a function, or a method beside ``self``, is given."""
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

    Bodies of loops and branches are functions of their own: the nearest that is named counts.
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
    """Condition of ``without``: the ``number``-th of every ``count`` uses for which ``when``."""
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
    """Do what a mistaken kernel does instead."""


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
    """What is noticed in the first schedule in which anything is; ``check`` calls ops."""
    for schedule in schedules:
        with devices.emulated_ops(schedule, arch):
            found = noticed(check)
        if found != NOTHING:
            return found
    return NOTHING


@contextmanager
def compiled_anew(*patches: Patch) -> Iterator[None]:
    """Within, kernels are compiled as ``patches`` leave them, and forgotten afterwards."""
    devices.cutlass_or_skip()
    with devices.other_kernels(), pytest.MonkeyPatch.context() as patch:
        with devices.emulated_ops(STANDARD[0]):  # to which CuTe DSL is bound as it comes
            for apply in patches:
                apply(patch)
        compiler.compiled.cache_clear()
        try:
            yield
        finally:
            compiler.compiled.cache_clear()


def compiled_right(*patches: Patch) -> AbstractContextManager[None]:
    """Context of kernels without a mistake: ``patches`` prepare them; without, those of the run."""
    devices.cutlass_or_skip()
    return compiled_anew(*patches) if patches else nullcontext()


def check_caught(
    mistake: Mistake, check: Check, *patches: Patch, schedules: Sequence[Schedule] = STANDARD
) -> None:
    """Assert that ``check`` notices the mistake; ``patches`` prepare the kernel."""
    with compiled_anew(mistake.patch, *patches):
        found = first_noticed(check, schedules)
    print(found)
    assert found != NOTHING
    assert found.startswith(mistake.caught)


def check_nothing_to_catch(
    check: Check, *patches: Patch, schedules: Sequence[Schedule] = STANDARD
) -> None:
    """Assert that ``check`` holds in every schedule without a mistake."""
    with compiled_right(*patches):
        assert first_noticed(check, schedules) == NOTHING


def check_dependency_wait(twice: Check, *patches: Patch) -> None:
    """Assert that a launch waits for the one before, and that this is noticed if it does not.

    ``twice`` launches two kernels; the second reads what the first writes.
    """
    check_dependency_waits([twice], *patches)


def check_dependency_waits(pairs: Sequence[Check], *patches: Patch) -> None:
    """``check_dependency_wait`` of each of several pairs of launches of the same kernels."""
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
    """Assert that a test passes, and fails once ``changes``, as of ``setattr``, are made."""
    test()
    for change in changes:
        patch.setattr(*change)
    function = getattr(test, "func", test)
    if given := getattr(function, HYPOTHESIS_SETTINGS, None):
        # The first example that fails will do; to find the smallest one takes seconds.
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
