"""Results of a soak test, as JSON, and the failures among them."""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.atomic_write import write_atomically
from examples.soak.memory import Sample, growth
from examples.soak.traffic import ERROR, EXPECTED, Outcome

SHOWN = 10  # listed failures of one kind
MEGABYTE = 1e6


@dataclass
class Kill:
    """Results of killing the engine's process.

    Attributes:
        engine: name of the process.
        outcomes: outcomes of the requests in flight at the kill; each should be an answer or an
            error.
        ended_seconds: time until the server exited by itself; None if the server had to be stopped.
        ready_seconds: time until another server was ready.
    """

    engine: str = ""
    outcomes: list[Outcome] = field(default_factory=list)
    ended_seconds: float | None = None
    ready_seconds: float = 0.0


@dataclass
class Results:
    """Results of a run.

    Attributes:
        about: command, commit, machine, versions, settings.
        outcomes: outcomes of the requests under load.
        samples: samples of memory under load.
        seconds: duration of the load.
        memory_bound: accepted growth of memory after the warm-up, in bytes.
        left: gauges of the engine, of requests and of cache usage, that are not zero after the
            load, by name.
        answers: greedy answers of the idle server by time: ``before``, ``after the load``, and
            ``after the restart`` of another server.
        kill: results of the kill.
    """

    about: dict[str, Any]
    memory_bound: float
    outcomes: list[Outcome] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    left: dict[str, float] = field(default_factory=dict)
    answers: dict[str, list[str]] = field(default_factory=dict)
    kill: Kill = field(default_factory=Kill)

    def failures(self) -> list[str]:
        """List the failures, a line each; empty for a sound server."""
        found = _told("under load", [o for o in self.outcomes if o.verdict != EXPECTED])
        if not self.outcomes:
            found.append("no request was made")
        found += [f"after the load: {name} is {value:g}" for name, value in self.left.items()]
        grown = growth(self.samples)
        if grown is None:
            found.append(
                f"memory: {len(self.samples)} samples in {self.seconds:.1f} s are too few; raise "
                "--requests or --minutes"
            )
        elif grown > self.memory_bound:
            found.append(
                f"memory: grew by {grown / MEGABYTE:.1f} MB after the warm-up, at most "
                f"{self.memory_bound / MEGABYTE:g} MB are accepted"
            )
        before = self.answers.get("before", [])
        for name, answers in self.answers.items():
            changed = sum(a != b for a, b in zip(before, answers, strict=True))
            if changed:
                found.append(f"answers {name}: {changed} of {len(before)} differ from those before")
        lost = [o for o in self.kill.outcomes if o.verdict not in (EXPECTED, ERROR)]
        found += _told("when the engine was killed", lost)
        if not self.kill.outcomes:
            found.append("when the engine was killed: no request was under way")
        if self.kill.ended_seconds is None:
            found.append("when the engine was killed: its server went on")
        return found

    def kinds(self) -> dict[str, Counter[str]]:
        """Number of requests under load, by kind and verdict."""
        found: dict[str, Counter[str]] = {}
        for outcome in self.outcomes:
            found.setdefault(outcome.kind, Counter())[outcome.verdict] += 1
        return found

    def latency(self, kind: str, quantile: float) -> float:
        """Quantile of the latency, in seconds, of one kind of request; NaN without requests."""
        seconds = sorted(o.seconds for o in self.outcomes if o.kind == kind)
        return seconds[math.ceil(quantile * len(seconds)) - 1] if seconds else math.nan

    def write(self, file: Path) -> None:
        """Write as JSON, with the failures."""
        fields = dataclasses.asdict(self) | {"failures": self.failures()}
        fields["samples"] = [sample._asdict() for sample in self.samples]
        write_atomically(file, json.dumps(fields, indent=1) + "\n")


def _told(when: str, outcomes: Sequence[Outcome]) -> list[str]:
    lines = [f"{when}: {o.kind}: {o.verdict}: {o.detail}" for o in outcomes[:SHOWN]]
    if len(outcomes) > SHOWN:
        lines.append(f"{when}: {len(outcomes) - SHOWN} more")
    return lines
