"""Breaking the synchronisation of a correct kernel, one instruction at a time.

    python -m tests.emulator.mutate [--kernel NAME] [--out tests/emulator/MUTANTS.md]

A mutant that survives every schedule is a gap of the emulator, unless the instruction was
redundant: then the table gives the reason.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

import typer

from tests.emulator.findings import EmulatorError
from tests.emulator.machine.schedule import STANDARD, Schedule
from tests.emulator.mutants import mutants
from tests.mutants import Mutant


class Subject(Protocol):
    """A correct kernel whose mutants are run.

    Attributes:
        name: name in the table.
        text: PTX of the kernel.
    """

    name: str
    text: str

    def run(self, text: str, schedule: Schedule) -> bool:
        """Launch ``text`` in place of the kernel; returns whether the result is right."""

    def reason(self, mutant: Mutant) -> str:
        """Reason why the mutant need not be caught, or ""."""


MISSED = ""


def _place(mutant: Mutant) -> str:
    """Location for the table: the source line, or the PTX line of a wait (waits share sources)."""
    if mutant.on.source and "_wait" not in mutant.on.instruction:
        return f"source {mutant.on.source}"
    return f"PTX {mutant.on.line}"


def outcome(subject: Subject, text: str, schedule: Schedule) -> str:
    """Outcome of a run: name of the finding, "wrong numbers", or ``MISSED``."""
    try:
        return MISSED if subject.run(text, schedule) else "wrong numbers"
    except EmulatorError as finding:
        return type(finding).__name__


def judge(
    subject: Subject, mutant: Mutant, schedules: Sequence[Schedule] = STANDARD
) -> dict[str, str]:
    """Outcomes of one mutant, by name of the schedule."""
    return {s.name: outcome(subject, mutant.change(subject.text), s) for s in schedules}


def first_catch(subject: Subject, mutant: Mutant, schedules: Sequence[Schedule] = STANDARD) -> str:
    """First outcome of a mutant, schedule by schedule, that is not ``MISSED``; else ``MISSED``."""
    return next(
        filter(None, (outcome(subject, mutant.change(subject.text), s) for s in schedules)), MISSED
    )


@dataclass
class Row:
    """Group of mutants whose instructions share a source line or have the same text.

    Attributes:
        cases: each mutant with its outcomes by schedule.
    """

    subject: Subject
    cases: list[tuple[Mutant, dict[str, str]]]

    @property
    def missed(self) -> list[Mutant]:
        return [m for m, outcomes in self.cases if not any(outcomes.values())]

    def __str__(self) -> str:
        first = self.cases[0][0]
        caught = len(self.cases) - len(self.missed)
        findings = sorted({o for _, outcomes in self.cases for o in outcomes.values() if o})
        least = min(
            (outcomes for _, outcomes in self.cases), key=lambda o: sum(map(bool, o.values()))
        )
        schedules = [name for name, result in least.items() if result]
        where = "all" if len(schedules) == len(least) else ", ".join(schedules) or "none"
        reason = "; ".join(sorted({self.subject.reason(m) or "GAP" for m in self.missed}))
        instruction = first.on.instruction.replace("|", "\\|")
        instruction = instruction if len(instruction) < 70 else instruction[:67] + "..."
        return (
            f"| {self.subject.name} | {_place(first)} | `{instruction}` | {first.on.how} | "
            f"{caught}/{len(self.cases)} | {', '.join(findings)} | {where} | {reason} |"
        )


def rows(subject: Subject, schedules: Sequence[Schedule] = STANDARD) -> Iterator[Row]:
    """Run every mutant of a kernel; yields the rows of the table."""
    for schedule in schedules:
        unchanged = outcome(subject, subject.text, schedule)
        if unchanged != MISSED:
            raise ValueError(f"{subject.name}: unchanged, {schedule} gives {unchanged}")

    groups: dict[tuple[object, ...], list[Mutant]] = {}
    for mutant in mutants(subject.text):
        opcode = mutant.on.instruction.split(" ")[0]
        groups.setdefault((_place(mutant), opcode, mutant.on.how), []).append(mutant)
    for group in groups.values():
        yield Row(subject, [(m, judge(subject, m, schedules)) for m in group])


_HEADER = """\
| kernel | where | instruction | change | caught | as | in (of the least caught) | if missed, why |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


_EXPLANATION = """\
`source` is a line of `nvfp4_gemm.py`, of "GEMM, wgmma" one of `warpgroup_gemm.py`; `PTX` is one of
the kernel's PTX. Mutants alike, of instructions that one source line became, share a row. Of the
GEMMs tcgen05 fences and scopes are strict (see `Gpu`)."""


def main(
    kernel: Annotated[str, typer.Option(help="only the kernel of this name")] = "",
    out: Annotated[Path | None, typer.Option(help="file to write the table to")] = None,
) -> None:
    """Print the table."""
    from tests.test_emulator.kernels.subjects import subjects  # this import needs CuTe

    lines = [_HEADER]
    print(_HEADER)
    total, caught, gaps = 0, 0, 0
    started = time.monotonic()
    for subject in subjects():
        if kernel in ("", subject.name):
            for row in rows(subject):
                lines.append(str(row))
                print(row, flush=True)
                total += len(row.cases)
                caught += len(row.cases) - len(row.missed)
                gaps += sum(not subject.reason(m) for m in row.missed)
    summary = (
        f"{total} mutants, {caught} caught, {total - caught - gaps} missed with a reason, "
        f"{gaps} gaps; {time.monotonic() - started:.0f} s."
    )
    print(f"\n{summary}")
    if out:
        heading = f"# Mutants\n\nMade by `python -m tests.emulator.mutate --out {out}`."
        table = "\n".join(lines)
        out.write_text(f"{heading}\n\n{summary}\n\n{_EXPLANATION}\n\n{table}\n")


if __name__ == "__main__":
    typer.run(main)
