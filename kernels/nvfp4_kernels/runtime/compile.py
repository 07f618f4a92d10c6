"""Compilation, cache and launch of CuTe DSL kernels, common to all ops.

A kernel is a frozen dataclass whose fields are its configuration. Its compiled form, host code and
cubin in one object file, is cached under a digest of the configuration, this package's source and
the compiler, so that a kernel is compiled only once.
"""

import functools
import hashlib
import os
import platform
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nvfp4_kernels.runtime.object_file import in_memory, read_sealed, seal
from nvfp4_kernels.runtime.recording import active
from nvfp4_kernels.runtime.trusted_path import (
    UnknownTrust,
    UntrustedPath,
    check_trusted,
    create_folder,
)
from nvfp4_kernels.settings import CACHE_VARIABLE

_DEFAULT_CACHE = "~/.cache/nvfp4_kernels"
ARCH_VARIABLE = "CUTE_DSL_ARCH"
COMPILERS_CACHE_VARIABLE = "CUTE_DSL_CACHE_DIR"
_SYMBOL = "launch"
# CuTe's settings for paths, which do not affect compilation; the arch is handled separately.
_PLACES = ("_ARCH", "_DIR", "_LIBS")
# LLVM's name and feature for any processor of a kind.
_ANY_HOST = {"x86_64": ("x86-64", "+sse2"), "aarch64": ("generic", "+neon")}

# CuTe DSL compiles in state that all threads share.
_one_at_a_time = threading.Lock()

# Hook called with a launch's tensors before it: an emulator must know the device's memory.
watchers: list[Callable[[list[Tensor]], None]] = []


class UnusableCache(OSError):
    """Folder for compiled kernels that is not writable, or that untrusted users may write to.

    Also raised for a cached file that is damaged, or that an untrusted user may change.
    """


class DeviceKernel(Protocol):
    """CuTe DSL kernel in one configuration; a frozen dataclass with a complete ``repr``.

    ``__call__`` is the ``@cute.jit`` host function. Its arguments are those of ``signature``, then
    a stream.
    """

    def signature(self) -> tuple[Any, ...]:
        """Example of each argument of the host function, except for the stream."""

    def __call__(self, *arguments: Any) -> None: ...
    def __hash__(self) -> int: ...


def launch(kernel: DeviceKernel, *arguments: Any) -> None:
    """Launch ``kernel`` on the current stream of the first tensor's device.

    Args:
        kernel: kernel, compiled on first use unless cached.
        arguments: arguments for the kernel's signature: tensors for pointers (None: a null
            pointer), numbers, and tuples of both.
    """
    tensors: list[Tensor] = []
    words = _words(arguments, tensors)
    recording = active()
    if recording is not None:
        recording.launched(kernel, arguments)
    for watch in watchers:
        watch(tensors)
    start(functools.partial(compiled, kernel), words, tensors[0].device)


def start(
    host: Callable[[str], Callable[..., None]], words: tuple[Any, ...], device: torch.device
) -> None:
    """Call a kernel's host function on the current stream of a device.

    Args:
        host: function that returns the host function compiled for an architecture.
        words: arguments of the host function, except for the stream.
        device: device of the first tensor; if no GPU, 0 is passed as the stream.
    """
    if device.type != "cuda":
        host(arch())(*words, 0)
        return
    with torch.cuda.device(device):
        host(arch())(*words, torch.cuda.current_stream().cuda_stream)


def _words(given: tuple[Any, ...], tensors: list[Tensor]) -> tuple[Any, ...]:
    """Arguments for compiled host code, addresses for tensors; appends tensors to ``tensors``."""
    words: list[Any] = []
    for each in given:
        if isinstance(each, Tensor):
            tensors.append(each)
            words.append(each.data_ptr())
        elif isinstance(each, tuple):
            words.append(_words(each, tensors))
        else:
            words.append(0 if each is None else each)
    return tuple(words)


@functools.cache
def compiled(kernel: DeviceKernel, target: str) -> Callable[..., None]:
    """Host function of a kernel, from the cache, or compiled and then cached.

    Args:
        kernel: kernel in one configuration.
        target: current result of ``arch``, a key of this function's cache, as a process may launch
            on devices of several architectures.

    Raises:
        UnusableCache: the kernel cannot be cached, or the cached file cannot be loaded.
    """
    with _one_at_a_time:
        place = object_path(kernel)
        if place is None:
            return compile_kernel(kernel, callable_here=True)
        with _kept_in(place.parent):
            is_kept = place.exists()
        if not is_kept:
            build(kernel, place)
        return _load(place)


def _load(place: Path) -> Callable[..., None]:
    from cutlass.cute.runtime import load_module

    content = read_kept(place)
    with _loadable(place), in_memory(content) as path:
        module = load_module(path, enable_tvm_ffi=True)
        function: Callable[..., None] = getattr(module, _SYMBOL)
    return function


def read_kept(place: Path) -> bytes:
    """Read a kernel's cached object file for execution.

    Raises:
        UnusableCache: the file is damaged, or an untrusted user could have written it.
    """
    with _loadable(place), _trusted(CACHE_VARIABLE, place.parent):
        return read_sealed(place)


def build(kernel: DeviceKernel, place: Path) -> None:
    """Compile ``kernel`` into an object file at ``place``; a failure leaves no partial file.

    Raises:
        UnusableCache: the folder is not writable, or is writable by untrusted users.
    """
    with _kept_in(place.parent):
        # A folder set by the user may be readable by others; the default folder is private.
        create_folder(place.parent, 0o755 if CACHE_VARIABLE in os.environ else 0o700)
        check_folder(CACHE_VARIABLE, place.parent)
    function = compile_kernel(kernel)
    _generalise_host(function)
    with _kept_in(place.parent), tempfile.TemporaryDirectory(dir=place.parent) as folder:
        written = Path(folder) / "kernel.o"
        function.export_to_c(str(written), _SYMBOL)
        seal(written)
        with written.open("rb") as file:
            os.fsync(file)  # before the rename
        os.replace(written, place)


def check_folder(name: str, folder: Path) -> None:
    """Check that no untrusted user could write to a folder of kernels.

    Such a folder is refused, and its permissions are not mended: files that others have written
    would be executed.

    Args:
        name: name of the setting for the folder.
        folder: existing folder.

    Raises:
        UnusableCache: an untrusted user could write to the folder.
    """
    with _trusted(name, folder):
        check_trusted(folder)


@contextmanager
def _trusted(name: str, folder: Path) -> Iterator[None]:
    """Context that turns trust errors of a folder, or of a file in it, into ``UnusableCache``."""
    try:
        yield
    except UnknownTrust as error:
        raise UnusableCache(str(error)) from error
    except UntrustedPath as error:
        raise UnusableCache(
            f"{name}: {folder} holds code that is run, and {error}, or set {name} to a folder of "
            "your own"
        ) from error


@contextmanager
def _loadable(place: Path) -> Iterator[None]:
    """Context that turns errors in loading an object file into ``UnusableCache``."""
    try:
        yield
    except UnusableCache:
        raise
    except Exception as error:  # the linker has its own exception classes
        raise UnusableCache(
            f"{CACHE_VARIABLE}: {place} cannot be loaded ({_line(error)}), must be as it was "
            "compiled; if it is damaged, delete it, and it is compiled again"
        ) from error


@contextmanager
def _kept_in(folder: Path) -> Iterator[None]:
    """Context that turns errors in writing to a folder into ``UnusableCache``."""
    try:
        yield
    except UnusableCache:
        raise
    except OSError as error:
        raise UnusableCache(
            f"{CACHE_VARIABLE}: kernels cannot be kept in {folder} ({_line(error)}), must be a "
            "folder that can be written to; set it to one, or to nothing to keep none"
        ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def compile_kernel(kernel: DeviceKernel, *, callable_here: bool = False) -> Any:
    """Compile a kernel to CuTe DSL's compiled function, bypassing the cache.

    Args:
        kernel: kernel in one configuration.
        callable_here: whether to load the host code into this process. Otherwise the result can
            only be inspected and exported, and compilation takes a quarter less time.

    Raises:
        UnusableCache: CuTe DSL would read files that others may have written.
    """
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    _check_compilers_cache()
    options = f"--enable-tvm-ffi --gpu-arch {arch()}"
    return cute.compile(
        kernel,
        *kernel.signature(),
        make_fake_stream(),
        options=options,
        no_jit_engine=not callable_here,
    )


def _check_compilers_cache() -> None:
    """Refuse CuTe DSL's own cache folder if the compiler reads from it and others can write to it.

    ``cute.compile`` never reads kernels from this folder, ``/tmp`` by default. With PyIR, which is
    off unless ``CUTE_DSL_ENABLE_PYIR`` is set, the compiler reads class data from the folder.
    """
    from cutlass.base_dsl.cache_helpers import get_default_generated_ir_path
    from cutlass.cutlass_dsl.cutlass import CuTeDSL

    settings = CuTeDSL._get_dsl().envar
    folder = Path(get_default_generated_ir_path())
    if settings.enable_pyir and not settings.disable_file_caching and folder.exists():
        check_folder(COMPILERS_CACHE_VARIABLE, folder)


def _generalise_host(function: Any) -> None:
    """Keep CuTe from using instructions specific to this machine's CPU, e.g. AVX-512.

    The object may run on another CPU, and host code is not performance-critical.
    """
    from cutlass._mlir import ir

    if platform.machine() not in _ANY_HOST:
        return
    cpu, feature = _ANY_HOST[platform.machine()]
    with function.ir_module.context:
        for operation in function.ir_module.body.operations:
            if operation.operation.name == "llvm.func":
                operation.attributes["target_cpu"] = ir.StringAttr.get(cpu)
                features = ir.Attribute.parse(f'#llvm.target_features<["{feature}"]>')
                operation.attributes["target_features"] = features


def arch() -> str:
    """Compilation target as CuTe spells it: ``CUTE_DSL_ARCH``, else the current GPU's."""
    return os.environ.get(ARCH_VARIABLE) or _device_arch(torch.cuda.current_device())


@functools.cache
def _device_arch(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def cache_folder() -> Path | None:
    """Folder of compiled kernels; None if ``NVFP4_KERNELS_CACHE`` is empty."""
    folder = os.environ.get(CACHE_VARIABLE, _DEFAULT_CACHE)
    return Path(folder).expanduser() if folder else None


def object_path(kernel: DeviceKernel) -> Path | None:
    """Path of the compiled form of ``kernel``; None if ``NVFP4_KERNELS_CACHE`` is empty."""
    folder = cache_folder()
    if folder is None:
        return None
    kind = type(kernel)
    what = f"{kind.__module__}.{kind.__qualname__} {kernel!r} {_toolchain(arch())}"
    name = hashlib.sha256(what.encode()).hexdigest()[:32]
    return folder / f"{name}.o"


@functools.cache
def _toolchain(target: str) -> str:
    """Text that identifies the inputs of compilation other than the kernel itself.

    Covers the package's sources other than ``precompile`` and ``tool``, as a digest, the compiler,
    settings, host CPU architecture and target. Equal on a build machine without a GPU and on the
    target machine.
    """
    from cutlass.base_dsl.version_info import CUDA_VERSION

    root = Path(__file__).parents[1]
    sources = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] not in ("precompile", "tool"):
            sources.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    settings = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("CUTE_DSL_") and not name.endswith(_PLACES)
    }
    versions = [version(name) for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi")]
    toolchain = (*versions, CUDA_VERSION.major, platform.machine(), target, settings)
    return f"{sources.hexdigest()} {toolchain}"
