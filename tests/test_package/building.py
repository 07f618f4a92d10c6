"""Helpers that build a distribution and run the installed files without access to the checkout."""

import os
import subprocess
import sys
from pathlib import Path

from tests import limits

# Call of a build frontend: one hook, which takes the folder to build into.
CALL_HOOK = """
import sys
from setuptools import build_meta
getattr(build_meta, sys.argv[1])(sys.argv[2])
"""


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command without the variables through which Python would find the checkout."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONHOME", "PYTHONPATH")}
    return subprocess.run(
        [str(each) for each in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limits.PROCESS,
        check=False,
    )


def build(hook: str, source: Path, out: Path) -> Path:
    """Build the distribution of ``source`` by a setuptools hook into the empty folder ``out``."""
    done = run(sys.executable, "-c", CALL_HOOK, hook, out, cwd=source)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.iterdir()
    return built
