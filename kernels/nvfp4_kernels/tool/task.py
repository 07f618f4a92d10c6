"""One thing to check or to time, and who runs it: this process, or one that may hang or die."""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Protocol

import torch

Figures = dict[str, float | str]


class Machine(Protocol):
    """Machine that tasks run on.

    Attributes:
        device: for tensors.
    """

    device: torch.device

    def seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """Time of one of ``calls``; they do the same, each on operands of its own."""

    def l2_bytes(self) -> int:
        """Size of the cache that operands must not be found in."""

    def sms(self) -> int:
        """Number of SMs."""


class Task(Protocol):
    """Something to run; picklable.

    Attributes:
        section: of the report.
        name: unique in it.
    """

    @property
    def section(self) -> str: ...
    @property
    def name(self) -> str: ...
    def run(self, machine: Machine) -> Figures:
        """Run the task and return its figures.

        Raises:
            Exception: any; it is what went wrong.
        """


class Mismatch(AssertionError):
    """A result that is not what it must be."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a task.

    Attributes:
        section, name: of the task.
        error: why it failed, else empty.
        figures: what it saw.
        seconds: it took, all in all.
    """

    section: str
    name: str
    error: str = ""
    figures: Figures = field(default_factory=dict)
    seconds: float = 0.0


Runner = Callable[[Task], Outcome]


def run_task(task: Task, machine: Machine) -> Outcome:
    """Runs ``task`` here; whatever it raises is its outcome."""
    started = time.monotonic()
    figures: Figures = {}
    try:
        figures, error = task.run(machine), ""
    except Exception as raised:
        place = traceback.extract_tb(raised.__traceback__)[-1]
        where = "" if isinstance(raised, Mismatch) else f" ({place.filename}:{place.lineno})"
        error = f"{type(raised).__name__}: {raised}{where}"
    return Outcome(task.section, task.name, error, figures, time.monotonic() - started)


class Isolated:
    """Runs tasks one by one in a process of their own, and another one after each failure.

    A kernel that never ends, or that breaks the process's hold on the GPU, costs its own task.
    """

    def __init__(self, make_machine: Callable[[], Machine], limit: float) -> None:
        """``make_machine``, picklable, is called in the process; a task has ``limit`` seconds."""
        self._make_machine = make_machine
        self._limit = limit
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def __call__(self, task: Task) -> Outcome:
        connection, process = self._started()
        began = time.monotonic()
        connection.send(task)
        error = f"no answer within {self._limit:g} s: it hangs"
        try:
            if connection.poll(self._limit):
                outcome: Outcome = connection.recv()
                if outcome.error:
                    self.close()  # what failed may have left the GPU unusable to its process
                return outcome
        except EOFError:
            process.join()
            error = f"its process died with exit code {process.exitcode}"
        self.close()
        return Outcome(task.section, task.name, error, seconds=time.monotonic() - began)

    def _started(self) -> tuple[Connection, BaseProcess]:
        if self._process is None or self._connection is None:
            context = get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, self._make_machine))
            self._process.start()
            theirs.close()
        return self._connection, self._process

    def close(self) -> None:
        """Ends the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


def _serve(connection: Connection, make_machine: Callable[[], Machine]) -> None:
    machine = make_machine()
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(run_task(task, machine))
