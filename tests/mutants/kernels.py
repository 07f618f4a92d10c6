"""Mutants of kernels and references, and checks that each is noticed.

Kernels are Python that CuTe DSL traces: ``Room`` replaces functions of an op's modules, or edits a
copy of their source; ``without`` and ``changed`` replace primitives that kernels call.
"""

import atexit
import importlib
import itertools
import pkgutil
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

from nvfp4_kernels.runtime import compile as compiler
from tests import devices
from tests.emulator import STANDARD, Gpu, Schedule
from tests.mutants import Check, Mutant, Patch, edited, noticed

WAIT = "ptx.griddepcontrol(ptx.GridDepAction.WAIT)"
LAUNCH = "ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)"
HYPOTHESIS_SETTINGS = "_hypothesis_internal_use_settings"
UNSHRUNK = Phase.explicit, Phase.reuse, Phase.generate


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

    def edited(self, module: str = "", right: str = "", wrong: str = "") -> Patch:
        """Patch by which kernels come from a copy of the source with one replacement.

        ``module`` belongs to the package or to ``nvfp4_kernels.sm90``, which is copied with it.
        """

        def apply(patch: pytest.MonkeyPatch) -> None:
            folder = Path(tempfile.mkdtemp())
            atexit.register(shutil.rmtree, folder)
            packages = [importlib.import_module(p) for p in (self.package, "nvfp4_kernels.sm90")]
            modules = [
                (package, each.name)
                for package in packages
                for each in pkgutil.iter_modules(package.__path__)
                if not each.ispkg
            ]
            for package, name in modules:  # so that the originals come back with the patch's end
                importlib.import_module(f"{package.__name__}.{name}")
            for package, name in modules:
                # `from package import module` finds a module by the package's attribute, too.
                patch.delattr(package, name)
                patch.delitem(sys.modules, f"{package.__name__}.{name}")
            copies = [folder / package.__name__ for package in packages]
            for package, copy in zip(packages, copies, strict=True):
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(package.__path__[0], copy, ignore=ignored)
                patch.setattr(package, "__path__", [str(copy)])
            if module:
                [file] = [f for copy in copies if (f := copy / f"{module}.py").exists()]
                file.write_text(edited(file.read_text(), right, wrong))
            importlib.invalidate_caches()

        return apply


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


def unwaited(patch: Patch = NO_DEPENDENCY_WAIT) -> Mutant:
    """Mutant that reads the preceding kernel's result without a wait."""
    match = r"griddepcontrol\.wait before the read"
    return Mutant(patch, "MissingDependencyWait", match=match)


def first_noticed(
    check: Callable[..., object],
    schedules: Sequence[Schedule] = STANDARD,
    arch: str = "sm_100",
    takes_device: bool = False,
) -> BaseException | None:
    """Finding of the first schedule that has one; ``check`` calls ops, or takes the device."""
    for schedule in schedules:
        if takes_device:
            with devices.emulated(schedule, arch) as device:
                found = noticed(partial(check, device))
        else:
            with devices.emulated_ops(schedule, arch):
                found = noticed(check)
        if found is not None:
            return found
    return None


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


def check_caught(mutant: Mutant, check: Callable[..., object], *patches: Patch, **how: Any) -> None:
    """Assert that ``check`` notices the mutant; ``patches`` prepare the kernel.

    Args:
        mutant: mutant of a kernel.
        check: check of the kernel's results.
        patches: patches of the kernel, as of its tile.
        how: further arguments of ``first_noticed``.
    """
    with compiled_anew(mutant.change, *patches):
        found = first_noticed(check, **how)
    print(repr(found))
    mutant.check(found)


def check_nothing_to_catch(check: Callable[..., object], *patches: Patch, **how: Any) -> None:
    """Assert that ``check`` holds for the correct kernel: without patches, the cached kernel."""
    devices.cutlass_or_skip()
    with compiled_anew(*patches) if patches else nullcontext():
        assert first_noticed(check, **how) is None


def check_dependency_wait(
    twice: Callable[..., object],
    *patches: Patch,
    without_wait: Patch = NO_DEPENDENCY_WAIT,
    **how: Any,
) -> None:
    """Assert that a launch waits for its predecessor, and that a missing wait is reported.

    ``twice`` launches two kernels; the second reads the first one's result.
    """
    check_nothing_to_catch(twice, *patches, schedules=STANDARD[:1], **how)
    check_caught(unwaited(without_wait), twice, *patches, schedules=STANDARD[:1], **how)


def check_launches_before_wait(twice: Check, room: Room, module: str, arch: str = "sm_100") -> None:
    """Assert that a kernel launches its dependents before it waits; a second launch is noticed.

    ``twice`` launches the kernel of ``room``'s ``module`` last.
    """
    late = f"{WAIT}\n{' ' * 8}{LAUNCH}"
    for right, edit in ((True, ()), (False, (module, WAIT, late))):
        with compiled_anew(room.edited(*edit)), devices.emulated_ops(STANDARD[0], arch):
            ptx = loaded_ptx(twice)[-1]
        launch = ptx.rindex("griddepcontrol.launch_dependents")
        assert (launch < ptx.index("griddepcontrol.wait")) == right


def each_test(mutants: Mapping[str, Mutant]) -> pytest.MarkDecorator:
    """Parameters ``mutant`` and ``test``: each mutant with each of its tests."""
    return pytest.mark.parametrize(
        ("mutant", "test"),
        [(mutant, test) for mutant in mutants.values() for test in mutant.on],
        ids=[f"{name}-{i}" for name, mutant in mutants.items() for i in range(len(mutant.on))],
    )


def check_noticed(mutant: Mutant, test: Check) -> None:
    """Assert that a test passes, and that it fails for the mutant."""
    test()
    function = getattr(test, "func", test)
    with pytest.MonkeyPatch.context() as patch:
        if given := getattr(function, HYPOTHESIS_SETTINGS, None):
            # The first example that fails is enough; finding the smallest takes seconds.
            patch.setattr(function, HYPOTHESIS_SETTINGS, settings(given, phases=UNSHRUNK))
        with mutant.applied():
            mutant.check(noticed(test))


def loaded_ptx(run: Check) -> list[str]:
    """PTX of the kernels that ``run`` compiles, in order."""
    seen: list[str] = []
    load = Gpu.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gpu, "load", lambda gpu, ptx: (seen.append(ptx), load(gpu, ptx))[1])
        run()
    assert seen
    return seen
