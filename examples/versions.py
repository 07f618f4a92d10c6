"""Description of a run's environment: versions, machine, commit, optional modules."""

import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]


def installed(*distributions: str) -> dict[str, str]:
    """Versions of the installed distributions; missing distributions are left out."""
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


def check_importable(module: str, needed_by: str) -> None:
    """Check that an optional module is installed.

    Raises:
        ValueError: the module is missing; the message names ``needed_by``, the option or output
            that needs the module, and the remedy.
    """
    if find_spec(module) is None:
        raise ValueError(
            f"{module}: is not installed, {needed_by} needs it; pip install {module}, or go on "
            "where it is installed with the JSON file that was written"
        )


def check_vllm() -> None:
    """Check that vLLM is installed and runs on this machine.

    Raises:
        ImportError: vLLM is missing or does not run; the message has the remedy.
    """
    from vllm_fp4_plugin.engine import vllm_installation
    from vllm_fp4_plugin.versions import vllm_version

    vllm_installation.check_installed()
    if vllm_version().endswith("+cpu"):
        return  # vLLM's CPU build runs anywhere
    # In a separate process: vLLM's imports would otherwise stay during the measurement.
    command = [sys.executable, "-m", vllm_installation.__name__]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise vllm_installation.UnusableVllm(done.stderr.strip().rpartition("\n")[2])


def commit(folder: Path = Path(__file__).parent) -> str | None:
    """Commit of ``folder``'s checkout, ``+changes`` if files differ; None without a checkout."""
    try:
        revision = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{revision}+changes" if changed else revision


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
