"""Parallel compilation of many kernels in separate processes.

Written for a server's worker process, where multiprocessing is unsuitable: a daemonic process may
not have children, and new processes import the main module, an arbitrary script. The processes of
this module receive kernels on standard input instead.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack

from nvfp4_kernels.runtime.compile import ARCH_VARIABLE, DeviceKernel, arch, build, object_path


def build_apart(kernels: Sequence[DeviceKernel], jobs: int) -> list[str]:
    """Compile and cache kernels that are not cached yet, in ``jobs`` processes.

    Args:
        kernels: kernels of importable modules; ``NVFP4_KERNELS_CACHE`` must not be empty.
        jobs: number of processes; each takes every ``jobs``-th kernel.

    Returns:
        One line of error per failed process; some kernels of a failed process are missing.
    """
    with ExitStack() as stack:
        started = []
        for job in range(jobs):
            errors = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                # -P: no module of the folder that this happens to run in, /tmp say.
                [sys.executable, "-P", "-m", __name__],
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            stack.callback(process.kill)
            started.append((process, kernels[job::jobs], errors))
        for process, share, _ in started:
            assert process.stdin is not None
            try:
                with process.stdin as to_process:
                    pickle.dump(list(share), to_process)
            except BrokenPipeError:
                continue  # its output has the reason
        failures = []
        for process, _, errors in started:
            status = process.wait()
            if status:
                errors.seek(0)
                said = errors.read().decode(errors="replace").strip().splitlines()
                failures.append(f"status {status}: {said[-1] if said else 'nothing said'}")
    return failures


def _environment() -> dict[str, str]:
    """Environment of a worker: this process's module search path and architecture, and no GPU."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "CUDA_VISIBLE_DEVICES": "",
        ARCH_VARIABLE: arch(),
    }


def _main() -> None:
    failures = []
    for kernel in pickle.load(sys.stdin.buffer):  # noqa: S301 (of the process that started this)
        place = object_path(kernel)
        assert place is not None, "a folder to keep kernels in"
        try:
            if not place.exists():
                build(kernel, place)
        except Exception as error:  # the compiler has its own exception classes
            failures.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
    if failures:
        sys.exit(failures[0])


if __name__ == "__main__":
    _main()
