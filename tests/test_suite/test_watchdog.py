"""Runs of toy tests in two workers, one of which crashes or hangs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import watchdog

ROOT = Path(__file__).parents[2]
PASSING = "def test_passes(): pass\ndef test_passes_too(): pass\n"
CRASHING = (
    "import os\ndef test_before(): pass\ndef test_crash(): os.abort()\ndef test_after(): pass\n"
)
# The call holds the GIL and is not interrupted by a signal.
STUCK = """
import ctypes
def test_before(): pass
def test_stuck():
    mutex, lock = ctypes.create_string_buffer(256), ctypes.PyDLL(None).pthread_mutex_lock
    assert lock(mutex) == 0
    lock(mutex)
def test_after(): pass
"""


def run(folder: Path, *options: str, **files: str) -> subprocess.CompletedProcess[str]:
    """Run toy tests by file, in the order of their names, as ``make test`` does."""
    for name, text in files.items():
        folder.joinpath(f"test_{name}.py").write_text(text)
    folder.joinpath("pytest.ini").touch()
    command = [
        sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-p", "pytest_timeout",
        "-p", "tests.watchdog", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile",
        "--no-loadscope-reorder", *options,
    ]  # fmt: skip
    environment = {
        **{name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")},
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def section(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Section of the output that the watchdog printed."""
    lines = done.stdout.splitlines()
    titles = [number for number, line in enumerate(lines) if " watchdog " in line]
    assert titles, done.stdout + done.stderr
    rest = lines[titles[0] + 1 :]
    end = next((number for number, line in enumerate(rest) if line.startswith("==")), len(rest))
    return rest[:end]


def test_a_crashed_worker_ends_the_run(tmp_path: Path) -> None:
    files = dict.fromkeys("bcdefgh", PASSING)
    done = run(tmp_path, "--max-worker-restart=0", a=CRASHING, **files)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "crashed while running 'test_a.py::test_crash'" in done.stdout
    why, count, *tests = section(done)
    assert why == "a worker crashed"
    assert count.endswith(" of 17 tests unfinished")
    assert "  test_a.py::test_after" in tests
    assert not any("test_before" in line for line in tests)


def test_a_worker_that_stands_still_in_c_ends_the_run(tmp_path: Path) -> None:
    files = dict.fromkeys("bc", PASSING)
    done = run(tmp_path, "--timeout=1", "--silence-limit=10", a=STUCK, **files)
    assert done.returncode == watchdog.STATUS, done.stdout + done.stderr
    why, count, worker, *tests = section(done)
    assert why.startswith("no test began or ended for 10 s; ")
    assert why.endswith("--silence-limit")
    assert count == "2 of 7 tests unfinished"
    assert worker in ("gw0:", "gw1:")
    # pytest-xdist may still report that the worker is down.
    assert tests[:2] == ["  test_a.py::test_stuck, running", "  test_a.py::test_after"]


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    endless = "import time\ndef test_sleeps(): time.sleep(600)\ndef test_after(): pass\n"
    done = run(tmp_path, "--run-limit=6", a=endless, b=endless)
    assert done.returncode == watchdog.STATUS, done.stdout + done.stderr
    assert section(done)[0] == "the run took 6 s; give it longer with --run-limit"


@pytest.mark.parametrize("text", ["0", "soon", "nan"])
def test_limits_are_seconds(text: str, tmp_path: Path) -> None:
    done = run(tmp_path, f"--run-limit={text}", a=PASSING)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"--run-limit: is '{text}', must be a number of seconds above 0" in done.stderr
