"""Watchdog of a run with several workers: always ends the run, and lists unfinished tests.

pytest-timeout cannot stop a test that is inside C code. Under ``--dist loadfile`` pytest-xdist
waits for ever for the replacement of a crashed worker, because it assigns the replacement a file
whose tests are done.
"""

import argparse
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import psutil
import pytest

RUN_LIMIT = 80 * 60.0  # seconds
SILENCE_LIMIT = 25 * 60.0  # longer than any test may take
POLL = 0.5
STATUS = 124  # that of timeout(1)


def seconds(text: str) -> float:
    """Parse a number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"is {text!r}, must be a number of seconds above 0")
    return value


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("watchdog", "limits of a run of several workers")
    group.addoption(
        "--run-limit",
        type=seconds,
        default=RUN_LIMIT,
        metavar="SECONDS",
        help="end the run after this long (default: %(default)s)",
    )
    group.addoption(
        "--silence-limit",
        type=seconds,
        default=SILENCE_LIMIT,
        metavar="SECONDS",
        help="end the run when no test began or ended for this long (default: %(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    if config.getoption("dist", "no") != "no" and not is_worker:
        config.pluginmanager.register(Watchdog(config), "watchdog")


class Watchdog:
    """Thread in xdist's controller that follows the workers' reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._tests: tuple[str, ...] = ()
        self._running: set[str] = set()
        self._done: set[str] = set()
        self._crashed = False
        self._begun = self._heard = time.monotonic()
        self._over = threading.Event()

    def pytest_sessionstart(self) -> None:
        threading.Thread(target=self._watch, daemon=True).start()

    def pytest_testnodeready(self) -> None:
        self._heard = time.monotonic()

    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._heard = time.monotonic()
        self._tests = tuple(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._heard = time.monotonic()
        self._running.add(nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._heard = time.monotonic()
        self._running.discard(nodeid)
        self._done.add(nodeid)

    def pytest_handlecrashitem(self, crashitem: str) -> None:
        self.pytest_runtest_logfinish(crashitem)

    def pytest_testnodedown(self, error: object | None) -> None:
        self._crashed |= error is not None

    def pytest_terminal_summary(self) -> None:
        if self._crashed:
            self._say("a worker crashed")

    def pytest_unconfigure(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        run_limit = self._config.getoption("--run-limit")
        silence_limit = self._config.getoption("--silence-limit")
        while not self._over.wait(POLL):
            now = time.monotonic()
            if now - self._begun > run_limit:
                self._end(f"the run took {run_limit:g} s; give it longer with --run-limit")
            if now - self._heard > silence_limit:
                self._end(
                    f"no test began or ended for {silence_limit:g} s; if tests may take as long, "
                    "give them longer with --silence-limit"
                )

    def _end(self, why: str) -> None:
        try:
            self._say(why)
        finally:
            for process in psutil.Process().children(recursive=True):
                process.kill()
            os._exit(STATUS)

    def _say(self, why: str) -> None:
        """Print the reason, and the unfinished tests by worker."""
        terminal: Any = self._config.pluginmanager.getplugin("terminalreporter")
        workers = self._workers()
        left: dict[str, list[str]] = {}
        for test in self._tests:
            if test not in self._done:
                left.setdefault(workers.get(test, "no worker"), []).append(test)
        terminal.ensure_newline()
        terminal.section("watchdog")
        terminal.write_line(why)
        count = sum(map(len, left.values()))
        terminal.write_line(f"{count} of {len(self._tests)} tests unfinished")
        for worker, tests in sorted(left.items()):
            terminal.write_line(f"{worker}:")
            for line in self._lines(tests):
                terminal.write_line(f"  {line}")
        terminal.flush()

    def _lines(self, left: list[str]) -> Iterator[str]:
        """Name each unfinished test; a file without a started test gets a single line."""
        whole = Counter(map(file_of, self._tests))
        for file, group in groupby(left, file_of):
            tests = list(group)
            running = self._running.intersection(tests)
            if len(tests) == whole[file] and not running:
                yield f"{file}: all {len(tests)}"
            else:
                yield from (f"{test}{', running' * (test in running)}" for test in tests)

    def _workers(self) -> dict[str, str]:
        """Worker of each assigned test, if whole files are assigned."""
        scheduler = getattr(self._config.pluginmanager.getplugin("dsession"), "sched", None)
        work: dict[Any, dict[str, dict[str, bool]]] = getattr(scheduler, "assigned_work", {})
        return {
            test: node.gateway.id
            for node, files in list(work.items())
            for tests in list(files.values())
            for test in tests
        }


def file_of(test: str) -> str:
    return test.partition("::")[0]
