"""Build and load the library that stands in for CuTe's runtime library."""

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# The name that CuTe looks for in CUTE_DSL_LIBS.
_NAME = "libcute_dsl_runtime.so"
_SOURCE = Path(__file__).with_name("shim.c")

Words = ctypes.POINTER(ctypes.c_uint64)
_Dispatcher = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_char_p, Words, ctypes.c_int32)
# Arguments: name of the entry point, its arguments as 64-bit words, their number.
DispatchFunction = Callable[[bytes, Any, int], int]


def cache_directory() -> Path:
    """Folder of cached builds: ``XDG_CACHE_HOME``, else the user's temporary directory.

    Raises:
        RuntimeError: another user has created the temporary directory, or may write to it.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    root = Path(home) if home else _own_temporary_directory()
    return root / "blackwell-emulator"


def _own_temporary_directory() -> Path:
    folder = Path(tempfile.gettempdir(), f"cache-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    others_write = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid() or others_write:
        raise RuntimeError(
            f"{folder}: is a link, belongs to another user or may be written to by others, must be "
            "this user's own folder; set XDG_CACHE_HOME"
        )
    return folder


def build() -> Path:
    """Path of the built library; compiles the C source unless a build is cached.

    Raises:
        RuntimeError: there is no C compiler, or it fails.
    """
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    library = cache_directory() / digest / _NAME
    if library.exists():
        # A library in a shared temporary directory is loaded only if it belongs to this user.
        if library.stat().st_uid != os.getuid():
            raise RuntimeError(f"{library}: belongs to another user; set XDG_CACHE_HOME")
        return library
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError(
            "C compiler: none found as $CC, cc or gcc, and the emulator's runtime library is not "
            f"built yet ({library}); install gcc, or set CC"
        )
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder, _NAME)
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(built), str(_SOURCE)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise RuntimeError(f"C compiler: cannot run {compiler!r} ({error}); set CC") from error
        if result.returncode:
            raise RuntimeError(f"C compiler: {' '.join(command)} failed:\n{result.stderr}")
        built.rename(library)
    return library


class Library:
    """Handle of the loaded library.

    Args:
        path: path of the library.
        mode: dlopen mode; loading globally, before CuTe's own library, makes CuTe find this library
            first.
    """

    def __init__(self, path: Path, mode: int = ctypes.RTLD_GLOBAL) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path), mode=mode)
        self._dispatcher: object = None

        self._swap = self._library.emulator_set_dispatcher
        self._swap.restype = ctypes.c_void_p

    def dispatch_to(self, function: DispatchFunction | None) -> None:
        """Route the calls of every entry point to ``function``; None disconnects them."""
        dispatcher = _Dispatcher(function) if function else None
        self._swap(dispatcher)
        self._dispatcher = dispatcher  # ctypes keeps no reference

    @contextmanager
    def lent_to(self, function: DispatchFunction) -> Iterator[ctypes.CDLL]:
        """Context in which the calls of the entry points are routed to ``function``."""
        dispatcher = _Dispatcher(function)
        previous = self._swap(dispatcher)
        try:
            yield self._library
        finally:
            self._swap(ctypes.c_void_p(previous))

    def set_detail(self, text: str) -> None:
        """Set the text that belongs to the next error code."""
        self._library.emulator_set_detail(text.encode())
