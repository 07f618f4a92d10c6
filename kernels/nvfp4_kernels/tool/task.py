"""Tasks, i.e. checks and timings, and their runners: in this process, or isolated from crashes."""

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
        device: device for tensors.
    """

    device: torch.device

    def seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """Seconds per call; ``calls`` are equal calls on separate operands."""

    def l2_bytes(self) -> int:
        """Size in bytes of the L2 cache, which must hold no operand before a timed call."""

    def sms(self) -> int:
        """Number of SMs."""


class Task(Protocol):
    """Runnable task; picklable.

    Attributes:
        section: section of the report.
        name: name of the task, unique in the section.
    """

    @property
    def section(self) -> str: ...
    @property
    def name(self) -> str: ...
    def run(self, machine: Machine) -> Figures:
        """Run the task and return its figures.

        Raises:
            Exception: the task failed, for any reason.
        """


class Mismatch(AssertionError):
    """Wrong result of an op."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a task.

    Attributes:
        section, name: section and name of the task.
        error: reason of the failure, else empty.
        figures: figures that the task returned.
        seconds: duration of the whole task.
    """

    section: str
    name: str
    error: str = ""
    figures: Figures = field(default_factory=dict)
    seconds: float = 0.0


Runner = Callable[[Task], Outcome]


def run_task(task: Task, machine: Machine) -> Outcome:
    """Run ``task`` in this process; an exception becomes the outcome's error."""
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
    """Runner of tasks in a separate process, replaced after each failure.

    A kernel that hangs, or that corrupts the CUDA context, fails only its own task.
    """

    def __init__(self, make_machine: Callable[[], Machine], limit: float) -> None:
        """Runner with at most ``limit`` seconds per task; each process calls ``make_machine`` once.

        ``make_machine`` must be picklable.
        """
        self._make_machine = make_machine
        self._limit = limit
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def __call__(self, task: Task) -> Outcome:
        connection, process = self._started()
        began = time.monotonic()
        error = f"no answer within {self._limit:g} s: it hangs"
        try:
            connection.send(task)
            if connection.poll(self._limit):
                outcome: Outcome = connection.recv()
                if outcome.error:
                    self.close()  # a failed task may have left the GPU unusable to its process
                return outcome
        except (EOFError, ConnectionError):  # the process died, perhaps before it read the task
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
        """End the process, even if it hangs."""
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
