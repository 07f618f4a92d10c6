"""Job and progress of one engine's process, each stored in a JSON file."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from examples.atomic_write import write_atomically
from examples.throughput.cases import Case


@dataclass(frozen=True)
class Job:
    """Job of an engine's process.

    Attributes:
        engine_args: arguments of ``vllm.LLM``, including the model.
        cases: cases to measure, in this order.
        repeats: timed repeats of each case, after an untimed repeat.
        seed: seed of the prompts' random tokens.
    """

    engine_args: dict[str, Any]
    cases: tuple[Case, ...]
    repeats: int
    seed: int

    def write(self, file: Path) -> None:
        """Write as JSON."""
        write_atomically(file, json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, file: Path) -> "Job":
        """Read a file written by :meth:`write`."""
        fields = json.loads(file.read_text())
        fields["cases"] = tuple(Case(**case) for case in fields["cases"])
        return cls(**fields)


@dataclass
class Progress:
    """Progress of an engine's process; each update rewrites the whole file.

    Attributes:
        state: current activity.
        done, total: number of batches generated, and to generate; untimed batches count.
        finished: whether all cases are done.
        error: reason of an early end; empty otherwise.
        device: name of the accelerator or processor, as reported by vLLM.
        engine_seconds: time until the engine was ready.
        seconds: seconds of each repeat, by the case's name.
    """

    state: str = "starting"
    done: int = 0
    total: int = 0
    finished: bool = False
    error: str = ""
    device: str = ""
    engine_seconds: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def write(self, file: Path) -> None:
        """Write as JSON; a reader sees the old file or the new one."""
        write_atomically(file, json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, file: Path) -> "Progress":
        """Read the last written progress; empty progress if there is none."""
        return cls(**json.loads(file.read_text())) if file.is_file() else cls()
