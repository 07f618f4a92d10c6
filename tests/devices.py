"""Devices of shared test bodies: the emulated GPU, or the machine's GPU.

``pytest --device emulator|cuda|both``; see ``tests/conftest.py``.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

import pytest
import torch
from torch import Tensor

from tests.emulator import B200, GB300, H200, Gpu, Schedule

# Emulated chips, by the architecture that kernels for them are compiled for.
EMULATED_CHIPS = {"sm_90": H200, "sm_100": B200, "sm_103": GB300}
on_cuda = False  # whether this run's kernels go to the GPU: with --device cuda
is_quick = False  # whether this run does without the emulator: with --quick
source_lines = True  # whether findings name the kernel's own lines: in tests with --source-lines
# Environment variable that names the folder of this run's compiled kernels, which its processes
# share; without it each compiles its own.
RUN_KERNELS = "TESTS_RUN_KERNELS"
binaries: Literal["plain", "none"] = (
    "plain"  # what ptxas makes of kernels here: see ``Runtime.make_binaries``
)


class KernelDevice(Protocol):
    """Device as seen by a shared test body.

    Attributes:
        arch: architecture that kernels are compiled for, e.g. ``"sm_100"``.
    """

    arch: str

    def put(self, name: str, tensor: Tensor) -> Tensor:
        """Make a tensor readable and writable for kernels; returns the tensor."""

    def output(self, name: str, like: Tensor) -> Tensor:
        """Poisoned tensor of ``like``'s shape and dtype, to be filled by kernels only."""


class Emulated:
    """The emulator with one schedule; findings are raised as errors."""

    def __init__(self, gpu: Gpu, arch: str = "sm_100") -> None:
        self.gpu = gpu
        self.arch = arch
        self._registered: list[int] = []

    def put(self, name: str, tensor: Tensor) -> Tensor:
        return self._register(name, tensor, initialised=True)

    def output(self, name: str, like: Tensor) -> Tensor:
        return self._register(name, _poisoned(like), initialised=False)

    def _register(self, name: str, tensor: Tensor, initialised: bool) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in self._registered:
            self.gpu.memory.register(
                storage.data_ptr(),
                storage.nbytes(),
                name=name,
                initialised=initialised,
                keep=storage,
            )
            self._registered.append(storage.data_ptr())
        return tensor

    def free(self) -> None:
        """Unregister every registered range."""
        for address in self._registered:
            self.gpu.memory.unregister(address)
        self._registered.clear()


class Cuda:
    """The first CUDA device."""

    def __init__(self) -> None:
        major, minor = torch.cuda.get_device_capability()
        self.arch = f"sm_{major}{minor}"

    def put(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.cuda()

    def output(self, name: str, like: Tensor) -> Tensor:
        return _poisoned(like).cuda()


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill every ``torch.empty`` in this context with NaN (floats) or the largest integer.

    Otherwise, memory that an op allocates may hold a right result that was freed before.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(8).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


def _poisoned(like: Tensor) -> Tensor:
    return torch.full_like(like, torch.nan if like.is_floating_point() else 0x7F)


@functools.cache
def _emulated_gpu(arch: str) -> Gpu:
    """Emulated GPU that all tests share, because it caches translated kernels."""
    return Gpu(EMULATED_CHIPS[arch], strict_tensor_fences=True)


def _kept_kernels() -> str:
    """Folder of compiled kernels, used by this run only; "" if none are kept."""
    folder = os.environ.get(RUN_KERNELS, "")
    if not folder:
        return ""
    return str(Path(folder, "with_source_lines" if source_lines else "without_source_lines"))


@contextmanager
def other_kernels() -> Iterator[None]:
    """Context that compiles every kernel anew and keeps none, because mutants change the sources.

    ptxas may be unable to assemble a mutant's PTX.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[__name__], "binaries", "none")
        patch.delenv(RUN_KERNELS, raising=False)
        if "NVFP4_KERNELS_CACHE" in os.environ:  # of a device that is there already
            patch.setenv("NVFP4_KERNELS_CACHE", "")
        yield


def cutlass_or_skip() -> None:
    """Skip the test or module if CuTe DSL is not installed.

    The check does not import CuTe DSL, which would bind it to a runtime.
    """
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("needs nvidia-cutlass-dsl", allow_module_level=True)


def bind_cutlass() -> None:
    """Bind CuTe DSL to the emulator before a vLLM model imports it, which would bind it to CUDA."""
    from tests.emulator.runtime import shim

    is_free = "cutlass" not in sys.modules and importlib.util.find_spec("cutlass") is not None
    if is_free and not on_cuda and not is_quick:
        shim.install(_emulated_gpu("sm_100"))


@contextmanager
def emulated(schedule: Schedule, arch: str = "sm_100") -> Iterator[Emulated]:
    """Context in which this process's CuTe kernels launch on the emulator in ``schedule``.

    CuTe compiles for ``arch``, a key of ``EMULATED_CHIPS``, and torch poisons allocated memory.
    Skips the test in a run with ``--device cuda``: CuTe DSL binds itself to one runtime.
    """
    from tests.emulator.runtime import shim

    if on_cuda:
        pytest.skip("--device cuda: needs the emulator")
    if is_quick:
        pytest.skip("--quick: needs the emulator")
    if shim.installed() is None and "cutlass" in sys.modules:
        pytest.fail(
            "something imported cutlass before the first test with a device: it is bound to CUDA "
            "now; import it inside of the tests that use it"
        )
    gpu = _emulated_gpu(arch)
    gpu.schedule = schedule
    runtime = shim.install(gpu, f"{arch}a")
    runtime.keep_source_lines(source_lines)
    runtime.guard_shared_arrays(True)
    runtime.make_binaries(binaries)
    device = Emulated(gpu, arch)
    with pytest.MonkeyPatch.context() as patch, poisoned_memory():
        patch.setenv("NVFP4_KERNELS_CACHE", _kept_kernels())
        try:
            yield device
        finally:
            device.free()
            runtime = shim.install(gpu)  # tests without a device compile for sm_100
            runtime.keep_source_lines(True)
            runtime.guard_shared_arrays(False)
            runtime.make_binaries("optimised")


@contextmanager
def emulated_ops(schedule: Schedule, arch: str = "sm_100") -> Iterator[Gpu]:
    """Context in which ops on CPU tensors run their kernels of ``arch`` on the emulator.

    Kernels may access the tensors passed to any launch so far, and no other memory.
    """
    from nvfp4_kernels.devices import standing_in
    from nvfp4_kernels.runtime import compile as compiler

    with emulated(schedule, arch) as device, pytest.MonkeyPatch.context() as patch:

        def know(tensors: list[Tensor]) -> None:
            for tensor in tensors:
                device.put(f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch."), tensor)

        patch.setattr(compiler, "watchers", [know])
        with standing_in("cpu", device.arch):
            yield device.gpu


def cuda_or_skip(arch: str | None) -> Cuda:
    """GPU of this machine; skips the test, with a reason, if there is none of the architecture."""
    if not torch.cuda.is_available():
        pytest.skip("--device cuda: this machine has no CUDA device")
    device = Cuda()
    if arch not in (None, device.arch):
        name = torch.cuda.get_device_name()
        pytest.skip(f"--device cuda: needs {arch}, {name} is {device.arch}")
    return device
