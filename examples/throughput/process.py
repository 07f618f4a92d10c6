"""Separate process of an engine: started, watched, and ended with all its children."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from examples.engine_log import NOT_THE_CAUSE, kernel_lines, root_cause
from examples.throughput.job import Job, Progress

ROOT = Path(__file__).parents[2]
POLL_SECONDS = 0.2
STOP_SECONDS = 20
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "NO_COLOR": "1",
}


@dataclass(frozen=True)
class Outcome:
    """Outcome of an engine's process.

    Attributes:
        progress: last reported progress.
        error: reason of the failure, else empty.
        kernels: lines of the log that name the kernels that ran, each once.
        log: complete output of the process.
    """

    progress: Progress
    error: str
    kernels: list[str]
    log: Path


def worker_command(job_file: Path, progress_file: Path) -> list[str]:
    """Command line of the engine's process."""
    worker = [sys.executable, "-m", "examples.throughput.worker"]
    return [*worker, str(job_file), str(progress_file)]


def run_job(
    job: Job,
    folder: Path,
    name: str,
    time_limit: float,
    on_progress: Callable[[Progress], None],
) -> Outcome:
    """Run ``job`` in a separate process; any error is part of the outcome.

    Args:
        job: job to run.
        folder: folder for ``NAME.job.json``, ``NAME.json`` and ``NAME.log``.
        name: name of the variant and round.
        time_limit: seconds allowed for the process.
        on_progress: called every ``POLL_SECONDS`` with the last reported progress.
    """
    job_file, told, log = (folder / f"{name}{end}" for end in (".job.json", ".json", ".log"))
    job.write(job_file)
    told.unlink(missing_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            worker_command(job_file, told),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**ENVIRONMENT, **os.environ},
            cwd=ROOT,
            start_new_session=True,
        )
    try:
        error = _watch(process, told, time_limit, on_progress)
    finally:
        _end(process, Progress.read(told).finished)
    progress = Progress.read(told)
    text = log.read_text(encoding="utf-8", errors="replace")
    if not progress.finished:
        error = error or failure(progress, text, process.returncode)
    return Outcome(progress, error, kernel_lines(text), log)


def _watch(
    process: subprocess.Popen[bytes],
    told: Path,
    time_limit: float,
    on_progress: Callable[[Progress], None],
) -> str:
    """Wait until the process ends or the job is finished; return the reason to give up, or ""."""
    until = time.monotonic() + time_limit
    while True:
        ended = process.poll() is not None
        progress = Progress.read(told)
        on_progress(progress)
        if ended or progress.finished:
            return ""
        if time.monotonic() > until:
            return f"not done after {time_limit:g} s; give it longer with --time-limit"
        time.sleep(POLL_SECONDS)


def _end(process: subprocess.Popen[bytes], finished: bool) -> None:
    """End a process and its process group.

    A finished process may exit by itself; an unfinished process group gets SIGTERM. The rest of the
    group is killed once the process has exited, after ``STOP_SECONDS`` at the latest.
    """
    try:
        if not finished:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    finally:  # also when a second Ctrl-C cuts the waiting short
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def failure(progress: Progress, log: str, exit_code: int | None) -> str:
    """Reason why a process ended early, as one line."""
    if progress.error and NOT_THE_CAUSE not in progress.error:
        return progress.error
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    after = f", after: {lines[-1]}" if lines else ""
    return root_cause(log) or progress.error or f"exit code {exit_code}{after}"
