"""Chains of two launches; the second reads or overwrites memory that the first one touched."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest

from tests import devices
from tests.emulator import EAGER, Gpu
from tests.emulator.mutants import mutants
from tests.mutants import Mutant

WAIT = "griddepcontrol.wait"
Value = Any  # one or several tensors, depending on the kind


@dataclass(frozen=True)
class Stage:
    """A launch as a link of a chain.

    Attributes:
        name: the op and its variant.
        source: package or module that has the kernel's waits.
        takes: kind of the value that the stage takes.
        gives: kinds of the returned values: results, and inputs that a later stage may overwrite.
        run: function from the value to a value for each kind in ``gives``.
        twin: name of a stage that launches the same kernel but takes another input from the
            preceding stage; only one of the two need come first in a chain.
    """

    name: str
    source: str
    takes: str
    gives: tuple[str, ...]
    run: Callable[[Value], tuple[Value, ...]]
    twin: str = ""


@dataclass(frozen=True)
class Chain:
    """Two stages in sequence, with programmatic dependent launch.

    Attributes:
        arch: e.g. ``"sm_100"``.
        first, second: stages; ``first`` gives a value of the kind that ``second`` takes.
        given: function that makes the first stage's value, in memory that the host writes.
    """

    arch: str
    first: Stage
    second: Stage
    given: Callable[[], Value]

    def __str__(self) -> str:
        return f"{self.first.name} > {self.second.name}"

    def run(self, replaced: Mapping[str, str] = MappingProxyType({})) -> list[str]:
        """Run both stages; return the PTX of each kernel of the second stage.

        One schedule is enough: whether an access comes after a wait is the same in every schedule.

        Args:
            replaced: maps PTX of the second stage to PTX that runs instead.

        Raises:
            EmulatorError: any finding of the emulator.
        """
        with devices.emulated_ops(EAGER, self.arch) as gpu:
            given = self.first.run(self.given())
            value = given[self.first.gives.index(self.second.takes)]
            with loading(gpu, replaced) as loaded:
                self.second.run(value)
        return loaded


@contextmanager
def loading(gpu: Gpu, replaced: Mapping[str, str]) -> Iterator[list[str]]:
    """Replace PTX that ``gpu`` loads; yield the list of PTX given to it, without repetitions."""
    loaded: list[str] = []
    load = gpu.load

    def substitute(ptx: str) -> Any:
        if ptx not in loaded:
            loaded.append(ptx)
        return load(replaced.get(ptx, ptx))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "load", substitute)
        yield loaded


def chains(
    arch: str, stages: Sequence[Stage], given: Mapping[str, Callable[[], Value]]
) -> list[Chain]:
    """All pairs of stages where the second takes a value that the first returns.

    Args:
        arch: architecture of all stages.
        stages: stages to pair.
        given: function for each kind that makes a value.
    """
    return [
        Chain(arch, first, second, given[first.takes])
        for second in stages
        for first in stages
        if second.takes in first.gives and not first.twin
    ]


def dropped_waits(text: str) -> list[Mutant]:
    """Mutants of the PTX, each without one of its static ``griddepcontrol.wait``."""
    return list(mutants(text, only=WAIT))
