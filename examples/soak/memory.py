"""Memory of a server and its processes over time, with a check for growth."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import psutil

WARM_UP = 0.25  # share of the time; one-time allocations are done by then
_PART = 5  # medians are of the first and the last fifth of the rest
MIN_SAMPLES = 2 * _PART
# The sampling interval is a share of the elapsed time, so that a short load has enough samples.
_SHARE, _LEAST_SECONDS = 0.02, 0.02


class Sample(NamedTuple):
    """Memory sample: seconds and requests since the start of the load, and bytes."""

    seconds: float
    requests: int
    bytes: int


def tree_bytes(pid: int) -> int:
    """Resident memory of a process and its descendants, in bytes; shared pages count in each."""
    total = 0
    for process in _tree(pid):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:  # the process ended meanwhile
            continue
    return total


def engine_process(pid: int) -> psutil.Process | None:
    """Engine process of a server, found by title, else the largest child; None without children."""
    children = psutil.Process(pid).children()
    titled = [child for child in children if "EngineCore" in " ".join(_command(child))]
    return max(titled or children, key=lambda child: child.memory_info().rss, default=None)


def until_next(seconds: float, most: float) -> float:
    """Seconds from a sample of memory to the next.

    Args:
        seconds: time since the start of the load.
        most: maximum seconds between samples.
    """
    return min(most, max(_LEAST_SECONDS, _SHARE * seconds))


def growth(samples: Sequence[Sample]) -> float | None:
    """Growth in bytes after the warm-up; None if samples are too few.

    Compared are the medians of the first and of the last fifth of the samples after the warm-up.
    """
    if not samples:
        return None
    start = samples[-1].seconds * WARM_UP
    rest = [sample.bytes for sample in samples if sample.seconds >= start]
    if len(rest) < MIN_SAMPLES:
        return None
    part = len(rest) // _PART
    return statistics.median(rest[-part:]) - statistics.median(rest[:part])


def _tree(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _command(process: psutil.Process) -> list[str]:
    try:
        return [process.name(), *process.cmdline()]
    except psutil.Error:
        return []
