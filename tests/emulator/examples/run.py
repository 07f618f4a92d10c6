"""Runs NVIDIA's unmodified Blackwell examples on the emulator and prints a table.

python -m tests.emulator.examples.run --cutlass PATH [--only NAME] [--schedules all]
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from tests.emulator.examples.cases import CASES, Case


@dataclass(frozen=True)
class Outcome:
    """What one example did in one schedule."""

    schedule: str
    result: str
    seconds: float
    findings: list[str] = field(default_factory=list)


@contextmanager
def preloaded() -> Iterator[str]:
    """Path of the library to preload, for as long as the context lasts."""
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
    """Runs one example in a process of its own, at most ``limit`` seconds."""
    environment = {**os.environ, "LD_PRELOAD": preload, "OMP_NUM_THREADS": "1"}
    module = "tests.emulator.examples.worker"
    command = [sys.executable, "-m", module, case.name, str(cutlass), schedules, record]
    with tempfile.NamedTemporaryFile("r") as results:
        output, failure = _call([*command, results.name], environment, limit)
        outcomes = [Outcome(**json.loads(line)) for line in results]
    if log:
        log.joinpath(f"{case.name}.log").write_text(output)
    return outcomes if outcomes else [Outcome("-", failure, 0.0)]


def _call(command: list[str], environment: dict[str, str], limit: int) -> tuple[str, str]:
    """A command's output, and how it ended."""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
        return done.stdout + done.stderr, f"process ended with {done.returncode}"
    except subprocess.TimeoutExpired as stopped:
        output = (stopped.stdout or b"").decode() + (stopped.stderr or b"").decode()
        return output, f"stopped after {limit} s"


def _row(case: Case, outcomes: list[Outcome]) -> str:
    passed = [o for o in outcomes if o.result == "pass"]
    if len(passed) == len(outcomes):
        result = "pass"
    else:
        result = "; ".join(f"{o.schedule}: {o.result}" for o in outcomes if o.result != "pass")
    seconds = "/".join(f"{o.seconds:.1f}" for o in outcomes)
    found = ", ".join(sorted({name for o in outcomes for name in o.findings})) or "none"
    arguments = case.arguments.replace("|", "\\|")
    names = f"{len(passed)}/{len(outcomes)}"
    shown = result.replace("|", " ")[:300]
    return f"| {case.name} | `{arguments}` | {names} | {shown} | {found} | {seconds} |"


def main(
    cutlass: Annotated[Path, typer.Option(help="checkout of NVIDIA/cutlass")],
    only: Annotated[str, typer.Option(help="run cases whose name contains this")] = "",
    schedules: Annotated[str, typer.Option(help="'all', or names separated by commas")] = "eager",
    record: Annotated[
        str, typer.Option(help="run nothing; write PTX and launches to this folder")
    ] = "",
    log: Annotated[Path | None, typer.Option(help="folder for the examples' output")] = None,
    limit: Annotated[int, typer.Option(help="seconds per example")] = 600,
) -> None:
    """Prints a Markdown table with one row per example."""
    for folder in filter(None, (Path(record) if record else None, log)):
        folder.mkdir(parents=True, exist_ok=True)
    print("| example | arguments | schedules passed | result | findings | seconds |")
    print("| --- | --- | --- | --- | --- | --- |")
    with preloaded() as preload:
        for case in CASES:
            if only in case.name:
                outcomes = run_case(case, cutlass, schedules, record, preload, log, limit)
                print(_row(case, outcomes), flush=True)


if __name__ == "__main__":
    typer.run(main)
