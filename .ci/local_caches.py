"""Run a command of this Python's environment with all its caches kept inside the checkout.

Usage: ``local_caches.py COMMAND [ARGUMENT ...]``; exits with the command's status.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEGMENTS = Path("/dev/shm")  # noqa: S108 (what POSIX shared memory is, nothing is made here)

CACHES = {
    "CUDA_CACHE_PATH": "cuda",
    "CUTE_DSL_CACHE_DIR": "cute_dsl",
    "HF_HOME": "huggingface",
    "HYPOTHESIS_STORAGE_DIRECTORY": "hypothesis",
    "MPLCONFIGDIR": "matplotlib",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_HOME": "triton",
    "VLLM_CACHE_ROOT": "vllm",
    "VLLM_CONFIG_ROOT": "vllm",
    "XDG_CACHE_HOME": "xdg",
    "XDG_CONFIG_HOME": "xdg",
    "XDG_DATA_HOME": "xdg",
}
SWITCHES = {"DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def main() -> int:
    """Run the command given on the command line and return its exit status."""
    # A terminated run must still remove its temporary files.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    segments = set(SEGMENTS.glob("vllm_dist_*"))
    # Not inside the checkout: the path of a Unix socket may hold 107 bytes only.
    with tempfile.TemporaryDirectory(prefix="nvfp4-", ignore_cleanup_errors=True) as scratch:
        environment = {
            **SWITCHES,
            **os.environ,
            **{name: str(ROOT / ".cache" / folder) for name, folder in CACHES.items()},
            "PATH": f"{Path(sys.prefix, 'bin')}{os.pathsep}{os.environ['PATH']}",
            "TMPDIR": scratch,
        }
        try:
            status = subprocess.run(sys.argv[1:], env=environment, check=False).returncode
        finally:
            remove_orphans(set(SEGMENTS.glob("vllm_dist_*")) - segments)
    return status if status >= 0 else 128 - status


def remove_orphans(segments: set[Path]) -> None:
    """Remove shared memory that vLLM's tensor-parallel CPU workers left and no process maps."""
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # the process ended, or is someone else's
            mapped += maps.read_text()
    for segment in segments:
        if segment.name not in mapped:
            segment.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
