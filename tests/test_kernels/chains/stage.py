"""Chains of two launches, the second of which reads or overwrites what the first one touched."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest

from tests import devices
from tests.emulator import EAGER, Gpu
from tests.emulator.mutations import Mutation, mutations

WAIT = "griddepcontrol.wait"
Value = Any  # one or several tensors, as a kind says


@dataclass(frozen=True)
class Stage:
    """A launch as a link of a chain.

    Attributes:
        name: of the op and its variant.
        source: package or module that has the kernel's waits.
        takes: kind of value that it is given.
        gives: kinds of what it returns: results, and what it reads and another may overwrite.
        run: from the value to a value for each kind in ``gives``.
        twin: name of a stage with the same launch, which differs in what comes from the stage
            before; as the first of a chain, that one is enough.
    """

    name: str
    source: str
    takes: str
    gives: tuple[str, ...]
    run: Callable[[Value], tuple[Value, ...]]
    twin: str = ""


@dataclass(frozen=True)
class Chain:
    """One stage after the other, with programmatic dependent launch.

    Attributes:
        arch: e.g. ``"sm_100"``.
        first, second: stages; the first gives what the second takes.
        given: makes what the first one takes, in memory that the host writes.
    """

    arch: str
    first: Stage
    second: Stage
    given: Callable[[], Value]

    def __str__(self) -> str:
        return f"{self.first.name} > {self.second.name}"

    def run(self, replaced: Mapping[str, str] = MappingProxyType({})) -> list[str]:
        """Run both; return the second one's PTX, a text for each of its kernels.

        One schedule is enough: whether an access comes after a wait does not depend on it.

        Args:
            replaced: PTX that runs in the place of some of the second stage.

        Raises:
            EmulatorError: what the emulator finds.
        """
        with devices.emulated_ops(EAGER, self.arch) as gpu:
            given = self.first.run(self.given())
            value = given[self.first.gives.index(self.second.takes)]
            with loading(gpu, replaced) as loaded:
                self.second.run(value)
        return loaded


@contextmanager
def loading(gpu: Gpu, replaced: Mapping[str, str]) -> Iterator[list[str]]:
    """Within, ``gpu`` runs other PTX in the place of some; yields what it is given, each once."""
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
    """Every stage after every launch whose result it takes, or which reads what it overwrites.

    Args:
        arch: of all stages.
        stages: to pair.
        given: how to make a value of each kind.
    """
    return [
        Chain(arch, first, second, given[first.takes])
        for second in stages
        for first in stages
        if second.takes in first.gives and not first.twin
    ]


def dropped_waits(text: str) -> list[Mutation]:
    """PTX without each of its static ``griddepcontrol.wait`` in turn."""
    return list(mutations(text, only=WAIT))
