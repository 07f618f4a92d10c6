"""Versions of what a run depends on."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def installed(*distributions: str) -> dict[str, str]:
    """Versions of the distributions that are installed; the others are left out."""
    found = {}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str]:
    """Python, operating system and processor of this machine."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = f"{names[0]}, {len(names)} CPUs" if names else platform.processor()
    return {"python": platform.python_version(), "os": platform.platform(), "cpu": processor}


def commit() -> str | None:
    """Commit of the checkout this runs from, ``+changes`` if files differ; None if it is none."""
    here = Path(__file__).parent
    try:
        revision = _git(here, "rev-parse", "HEAD")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{revision}+changes" if changed else revision


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
