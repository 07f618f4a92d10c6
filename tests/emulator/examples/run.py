"""Runs NVIDIA's unmodified CuTe DSL examples on the emulator and prints a table.

python -m tests.emulator.examples.run --cutlass PATH [--only NAME] [--schedules all] [--write FILE]

``tests/emulator/EXAMPLES.md`` holds the table of all examples in all schedules.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from tests.emulator.examples.cases import CASES, Case, unlisted

PAGE = Path(__file__).parents[1] / "EXAMPLES.md"
_HEADER = "| example | arguments | schedules passed | result | findings | seconds per schedule |"
_RULE = "| --- | --- | --- | --- | --- | --- |"


@dataclass(frozen=True)
class Outcome:
    """Result and findings of one example in one schedule.

    Attributes:
        schedule: name of the schedule; "-" if the process itself failed.
        result: "pass", or the reason of the failure; the number of launches before it, if recorded.
        findings: names of the emulator's exceptions.
    """

    schedule: str
    result: str
    seconds: float
    findings: list[str] = field(default_factory=list)


@contextmanager
def preloaded() -> Iterator[str]:
    """Path of the library to preload, built from ``aligned.c``; removed at the context's end."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "libaligned.so")
        source = Path(__file__).with_name("aligned.c")
        compiler = os.environ.get("CC") or shutil.which("cc")
        if compiler is None:
            raise typer.BadParameter("C compiler: none found as $CC or cc; install gcc")
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)]
        subprocess.run(command, check=True)
        yield str(library)


def run_case(
    case: Case,
    cutlass: Path,
    schedules: str,
    record: str,
    preload: str,
    log: Path | None,
    limit: int,
) -> list[Outcome]:
    """Run one example in a separate process, for at most ``limit`` seconds.

    ``cutlass``: checkout; ``record``: folder for launches, or empty; ``preload``: library to
    preload; ``log``: folder for the output.
    """
    environment = {**os.environ, "LD_PRELOAD": preload, "OMP_NUM_THREADS": "1"}
    module = "tests.emulator.examples.worker"
    command = [sys.executable, "-m", module, case.name, str(cutlass), schedules, record]
    with tempfile.NamedTemporaryFile("r") as results:
        output, failure = _call([*command, results.name], environment, limit)
        outcomes = [Outcome(**json.loads(line)) for line in results]
    if log:
        log.joinpath(f"{case.name}.log").write_text(output)
    return [*outcomes, Outcome("-", failure, 0.0)] if failure else outcomes


def _call(command: list[str], environment: dict[str, str], limit: int) -> tuple[str, str]:
    """Output of a command, and the reason of its failure ("" if the command succeeded)."""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
        failure = f"process ended with {done.returncode}" if done.returncode else ""
        return done.stdout + done.stderr, failure
    except subprocess.TimeoutExpired as stopped:
        output = (stopped.stdout or b"").decode() + (stopped.stderr or b"").decode()
        return output, f"stopped after {limit} s"


def _row(case: Case, outcomes: list[Outcome]) -> str:
    failed: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.result != "pass":
            failed.setdefault(outcome.result, []).append(outcome.schedule)
    result = "; ".join(f"{', '.join(names)}: {text}" for text, names in failed.items()) or "pass"
    seconds = "/".join(f"{o.seconds:.1f}" for o in outcomes)
    found = ", ".join(sorted({name for o in outcomes for name in o.findings})) or "none"
    arguments = case.arguments.replace("|", "\\|")
    passed = sum(o.result == "pass" for o in outcomes)
    shown = result.replace("|", " ")[:300]
    cells = (case.name, f"`{arguments}`", f"{passed}/{len(outcomes)}", shown, found, seconds)
    return f"| {' | '.join(cells)} |"


def update(path: Path, rows: dict[str, str]) -> None:
    """Replace or add ``rows``, keyed by case name, in the table of a Markdown file.

    Other rows stay, unless their case is no longer in ``CASES``.

    Raises:
        typer.BadParameter: the file has no such table.
    """
    lines = path.read_text().splitlines()
    if _HEADER not in lines:
        raise typer.BadParameter(f"--write: {path} has no table with the header {_HEADER!r}")
    start = lines.index(_HEADER) + 2
    end = next((n for n in range(start, len(lines)) if not lines[n].startswith("|")), len(lines))
    rows = {line.split("|")[1].strip(): line for line in lines[start:end]} | rows
    lines[start:end] = [rows[case.name] for case in CASES if case.name in rows]
    path.write_text("\n".join(lines) + "\n")


def main(
    cutlass: Annotated[Path, typer.Option(help="checkout of NVIDIA/cutlass")],
    only: Annotated[str, typer.Option(help="run cases whose name contains this")] = "",
    schedules: Annotated[str, typer.Option(help="'all', or names separated by commas")] = "eager",
    record: Annotated[
        str, typer.Option(help="run nothing; write PTX and launches to this folder")
    ] = "",
    log: Annotated[Path | None, typer.Option(help="folder for the examples' output")] = None,
    limit: Annotated[int, typer.Option(help="seconds per example")] = 600,
    jobs: Annotated[int, typer.Option(help="examples at a time")] = 1,
    write: Annotated[
        Path | None, typer.Option(help="Markdown file whose table takes the rows, one by one")
    ] = None,
) -> None:
    """Prints a Markdown table with one row per example."""
    if write:
        update(write, {})
    for script in unlisted(cutlass):
        typer.echo(f"{script}: neither in CASES nor EXCLUDED of cases.py", err=True)
    for folder in filter(None, (Path(record) if record else None, log)):
        folder.mkdir(parents=True, exist_ok=True)
    print(f"{_HEADER}\n{_RULE}")
    chosen = [case for case in CASES if only in case.name]
    with preloaded() as preload, ThreadPoolExecutor(jobs) as pool:

        def run(case: Case) -> list[Outcome]:
            return run_case(case, cutlass, schedules, record, preload, log, limit)

        for case, outcomes in zip(chosen, pool.map(run, chosen), strict=True):
            row = _row(case, outcomes)
            print(row, flush=True)
            if write:
                update(write, {case.name: row})


if __name__ == "__main__":
    typer.run(main)
