"""Replacement of the CUDA runtime that makes CuTe DSL launch into an emulated device.

    runtime = shim.install(Gpu())        # before anything imports cutlass
    compiled = cute.compile(..., options="--enable-tvm-ffi")
    compiled(...)                        # raises the emulator's findings as they are

A function compiled without TVM FFI needs ``runtime.bind(compiled)`` before its first call.
"""

import atexit
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from tests.emulator.runtime.device import Device
from tests.emulator.runtime.driver import Driver
from tests.emulator.runtime.library import Library, build, cache_directory

Binaries = Literal["optimised", "plain", "none"]

_CAPABILITIES = {"sm_90a": (9, 0), "sm_100a": (10, 0), "sm_103a": (10, 3)}
# Kind of the TVM FFI errors that the library raises, registered to come out as the exceptions.
_FFI_KIND = "EmulatorError"

_installed: "Runtime | None" = None


class Runtime:
    """The installed runtime.

    Attributes:
        arch: architecture that kernels are compiled for; may change.
        library: path of the library that CuTe loads instead of the CUDA runtime.
    """

    def __init__(self, device: Device, arch: str, library: Library) -> None:
        self.library = library.path
        self._library = library
        self._driver = Driver(device, _CAPABILITIES[arch], library.set_detail)
        self.arch = arch
        library.dispatch_to(self._driver.dispatch)

    def compile_for(self, arch: str) -> None:
        """Make CuTe compile for another architecture; functions already compiled stay valid."""
        from cutlass.cutlass_dsl.cutlass import CuTeDSL, CuteExperimentalDSL

        self.arch = os.environ["CUTE_DSL_ARCH"] = arch
        self._driver.capability = _CAPABILITIES[arch]
        for dsl in (CuTeDSL._get_dsl(), CuteExperimentalDSL._get_dsl()):
            dsl.envar.arch = arch

    def keep_source_lines(self, kept: bool) -> None:
        """Switch line information in the PTX compiled by CuTe on or off.

        With line information, findings name lines of the kernel's source; line information takes a
        third of the compilation time.
        """
        from cutlass.cutlass_dsl.cutlass import CuTeDSL, CuteExperimentalDSL

        for dsl in (CuTeDSL._get_dsl(), CuteExperimentalDSL._get_dsl()):
            dsl.envar.lineinfo = kept

    def guard_shared_arrays(self, guarded: bool) -> None:
        """Switch guards between CuTe's shared arrays on or off; no access may touch a guard."""
        from cutlass.cutlass_dsl.cutlass import CuTeDSL, CuteExperimentalDSL

        for dsl in (CuTeDSL._get_dsl(), CuteExperimentalDSL._get_dsl()):
            dsl.compiler_provider.guards = guarded

    def make_binaries(self, binaries: Binaries) -> None:
        """Set the work that CuTe leaves to ptxas: the emulator runs the PTX, not the binary.

        Args:
            binaries: "optimised", CuTe's default; "plain", which saves 15% of the compilation time;
                or "none": ptxas reads the PTX without assembling it, which saves another 15%.
        """
        from cutlass.cutlass_dsl.cutlass import CuTeDSL, CuteExperimentalDSL

        for dsl in (CuTeDSL._get_dsl(), CuteExperimentalDSL._get_dsl()):
            dsl.compiler_provider.binaries = binaries

    @property
    def device(self) -> Device:
        """Device that runs the kernels; replaceable at any time, compiled functions stay valid."""
        return self._driver.device

    @device.setter
    def device(self, device: Device) -> None:
        self._driver.device = device

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Context that raises the error behind a failed launch instead of CuTe's error code."""
        self._driver.take_pending()
        try:
            yield
        except Exception as error:
            pending = self._driver.take_pending()
            if pending is None or pending is error:
                raise
            raise pending from None
        pending = self._driver.take_pending()
        if pending is not None:
            raise pending

    def bind(self, compiled: Any) -> Any:
        """Make a function compiled without TVM FFI callable, with findings raised as they are.

        CuTe would count devices and unload the library through CUDA's own Python bindings, which
        know nothing of this runtime.
        """
        load, to = compiled._load_cuda_library, compiled.to

        def load_and_forget() -> list[object]:
            with self.raising():
                load()
            return []

        def to_raising(device: object = None) -> Any:
            executor = to(device)
            run = executor.run_compiled_program

            def run_raising(arguments: list[object]) -> object:
                with self.raising():
                    return run(arguments)

            executor.run_compiled_program = run_raising
            return executor

        compiled.num_devices = 1
        compiled._load_cuda_library = load_and_forget
        compiled.to = to_raising
        return compiled

    def error_class(self) -> type[BaseException]:
        """Exception class for TVM FFI: its instances are this thread's pending exceptions."""
        take_pending = self._driver.take_pending

        class Pending(RuntimeError):
            def __new__(cls, message: str) -> BaseException:  # type: ignore[misc]
                return take_pending() or super().__new__(cls, message)

        return Pending


def installed() -> Runtime | None:
    """The installed runtime of this process, or None."""
    return _installed


def install(device: Device, arch: str = "sm_100a") -> Runtime:
    """Make CuTe DSL, from now on, compile for ``arch`` and launch on ``device`` in this process.

    Args:
        device: device that runs the kernels. Installing again replaces the device.
        arch: "sm_100a", "sm_103a" or "sm_90a". Installing again changes the architecture.

    Raises:
        RuntimeError: cutlass is imported already, or there is no C compiler.
        ValueError: the arch is unknown.
    """
    global _installed
    if arch not in _CAPABILITIES:
        raise ValueError(f"arch: {arch!r}, accepted are {sorted(_CAPABILITIES)}")
    if _installed is not None:
        if _installed.arch != arch:
            _installed.compile_for(arch)
        _installed.device = device
        return _installed
    if "cutlass" in sys.modules:
        raise RuntimeError(
            "the emulator's runtime comes too late: cutlass is imported and bound to CUDA; call "
            "install() before the first import of cutlass, or in a fresh process"
        )
    library = Library(build())
    os.environ["CUTE_DSL_LIBS"] = str(library.path)
    os.environ["CUTE_DSL_ARCH"] = arch
    os.environ["CUTE_DSL_LINEINFO"] = "1"  # findings name the kernel's own lines
    # CuTe's other cache entries have no PTX embedded.
    os.environ["CUTE_DSL_CACHE_DIR"] = str(cache_directory() / "cute")
    runtime = Runtime(device, arch, library)
    _use_embedding_compiler()
    if importlib.util.find_spec("tvm_ffi"):
        importlib.import_module("tvm_ffi").register_error(_FFI_KIND, runtime.error_class())
    atexit.register(library.dispatch_to, None)
    _installed = runtime
    return runtime


def _use_embedding_compiler() -> None:
    from cutlass.cutlass_dsl.cutlass import CuTeDSL, CuteExperimentalDSL

    from tests.emulator.runtime.embedding import PtxEmbedding, leave_host_code_as_it_is

    leave_host_code_as_it_is()
    for dsl in (CuTeDSL._get_dsl(), CuteExperimentalDSL._get_dsl()):
        given = dsl.compiler_provider
        dsl.compiler_provider = PtxEmbedding(given.passmanager, given.execution_engine)
