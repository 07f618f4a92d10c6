"""Compilation of a set of kernels into a folder, several at a time."""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.runtime import compile as compiler
from nvfp4_kernels.settings import CACHE_VARIABLE


@dataclass(frozen=True)
class Built:
    """Outcome of building one kernel.

    Attributes:
        spec: the kernel.
        path: path of the object file.
        nbytes: size of the file; 0 if it is missing.
        seconds: compile time; 0 if cached.
        error: reason why the file is missing, else empty.
    """

    spec: KernelSpec
    path: Path
    nbytes: int
    seconds: float
    error: str = ""


def prepare(arch: str, out: Path | None = None) -> None:
    """Set this process to compile for ``arch``, with ``out`` as the cache; None: no cache.

    Must precede any compilation. A server on a GPU of ``arch`` finds the kernels if
    ``NVFP4_KERNELS_CACHE`` is ``out``.
    """
    os.environ[compiler.ARCH_VARIABLE] = arch
    os.environ[CACHE_VARIABLE] = str(out or "")


def build_one(spec: KernelSpec) -> Built:
    """Compile one kernel, unless a usable object file exists; ``prepare`` must come first."""
    kernel = spec.kernel()
    path = compiler.object_path(kernel)
    assert path is not None, "prepared"
    started = time.monotonic()
    try:
        if path.exists():
            compiler.read_kept(path)
            return Built(spec, path, path.stat().st_size, 0.0)
        compiler.build(kernel, path)
    except OSError:
        raise  # the folder is at fault, and will be for the next one too
    except Exception as error:
        # The compiler raises its own exception classes; any of them costs only this kernel.
        return Built(spec, path, 0, time.monotonic() - started, f"{type(error).__name__}: {error}")
    return Built(spec, path, path.stat().st_size, time.monotonic() - started)


def build_all(specs: Sequence[KernelSpec], out: Path, arch: str, jobs: int) -> Iterator[Built]:
    """Build kernels in ``jobs`` processes (1: in this process); yield outcomes in any order.

    No kernels have no outcomes, and start no process.

    Raises:
        OSError: ``out`` cannot be written to, or its content must not be executed.
        BrokenProcessPool: a process died.
    """
    if jobs == 1 or not specs:
        prepare(arch, out)
        yield from map(build_one, specs)
        return
    # Forked processes would share this one's compiler, threads and all.
    pool = ProcessPoolExecutor(
        min(jobs, len(specs)), get_context("spawn"), initializer=prepare, initargs=(arch, out)
    )
    with pool:
        futures = [pool.submit(build_one, spec) for spec in specs]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)
