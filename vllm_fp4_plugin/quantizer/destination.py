"""Destination folder, which appears complete or not at all."""

import errno
import fcntl
import glob
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from vllm_fp4_plugin.quantizer.errors import QuantizerError

# Weights and their indexes, in all checkpoint formats.
_WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx",
    ".index.json",
)  # fmt: skip

# Errors of a failed write to an open file, which name no file.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def check_destination(src: Path, dst: Path) -> None:
    """Refuse a destination that exists, cannot be created, or overlaps the source.

    Raises:
        QuantizerError: the message names ``dst``.
    """
    source, target = src.resolve(), dst.resolve()
    if source.is_relative_to(target) or target.is_relative_to(source):
        raise QuantizerError(f"dst: {dst} and {src} lie within each other; choose another folder")
    if os.path.lexists(dst):
        raise QuantizerError(f"dst: {dst} exists; choose another folder or remove it")
    above = _lowest_there(dst)
    if not above.is_dir():
        raise QuantizerError(
            f"dst: {dst} cannot be made, as {above} is no folder; choose another folder"
        )
    if not os.access(above, os.W_OK | os.X_OK):
        raise QuantizerError(
            f"dst: {above} cannot be written to; allow writing there, or choose another folder"
        )


def check_room(dst: Path, nbytes: int) -> None:
    """Refuse a destination on a disk with less than ``nbytes`` free.

    Raises:
        QuantizerError: the message names ``dst``.
    """
    parent = _lowest_there(dst)
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise QuantizerError(
            f"dst: {parent} has {free / 1e9:.1f} GB free, {nbytes / 1e9:.1f} GB are needed; "
            "choose another disk"
        )


def _lowest_there(dst: Path) -> Path:
    """Nearest existing parent of a destination; may be a file."""
    return next(path for path in dst.absolute().parents if os.path.lexists(path))


@contextmanager
def atomic_folder(dst: Path, nbytes: int, say: Callable[[str], None]) -> Iterator[Path]:
    """Yield a hidden folder next to ``dst``; rename the folder ``dst`` on success, else remove it.

    Missing parents of ``dst`` are created. On an exception, Ctrl-C, SIGTERM or SIGHUP, the folder
    and these parents are removed. After SIGKILL the folder, ``.<dst>.*.partial``, stays: the next
    run to ``dst`` removes the folder and reports so with ``say``.

    Raises:
        QuantizerError: less than ``nbytes`` are free on the disk, the folder cannot be written to,
            or another run is writing ``dst``.
    """
    parent = dst.absolute().parent
    _remove_leftovers(parent, dst, say)
    check_room(dst, nbytes)
    partial = parent / f".{dst.name}.{secrets.token_hex(4)}.partial"
    with _termination_raises(), _made(parent):
        try:
            with _writable(parent, partial):
                partial.mkdir()
                with _locked(partial):
                    yield partial
                    check_destination(partial, dst)
                    partial.rename(dst)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextmanager
def _made(parent: Path) -> Iterator[None]:
    """Make a folder and its missing parents; remove those made here if the block raises."""
    missing = [path for path in (parent, *parent.parents) if not path.exists()]
    try:
        if missing:
            try:
                parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _unwritable(parent, error) from error
        yield
    except BaseException:
        for folder in missing:
            with suppress(OSError):  # another process may have put a file there
                folder.rmdir()
        raise


def _remove_leftovers(parent: Path, dst: Path, say: Callable[[str], None]) -> None:
    """Remove hidden folders that killed runs to ``dst`` left; raise if a live run holds one."""
    for left in sorted(parent.glob(f".{glob.escape(dst.name)}.*.partial")):
        with _locked(left) as is_ours:
            if not is_ours:
                raise QuantizerError(
                    f"dst: {left} is there, of another run that is writing {dst}; wait for it, or "
                    "choose another folder"
                )
            shutil.rmtree(left, ignore_errors=True)
        say(f"{left}: left by a run that was killed, {'stays' if left.exists() else 'removed'}")


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold a lock on a folder; the operating system releases the lock when the process ends.

    Yields True; or False if another process holds the lock, or the file system has no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


@contextmanager
def _writable(parent: Path, partial: Path) -> Iterator[None]:
    """Convert errors of writing to ``partial``, a folder in ``parent``, to ``QuantizerError``."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM and not str(error.filename).startswith(str(partial)):
            raise  # an error of the source, for instance
        raise _unwritable(parent, error) from error


def _unwritable(parent: Path, error: OSError) -> QuantizerError:
    return QuantizerError(
        f"dst: {parent} cannot be written to ({error.strerror}); make room there, or choose "
        "another folder"
    )


def copy_companions(src: Path, dst: Path) -> None:
    """Copy tokenizer, chat template, and all other files but weights, config and hidden files."""
    config = src / "config.json"
    for folder, folders, names in os.walk(src):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            file = Path(folder, name)
            if name.startswith(".") or name.endswith(_WEIGHT_SUFFIXES) or file == config:
                continue
            copy = dst / file.relative_to(src)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


@contextmanager
def _termination_raises() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise ``SystemExit``, so that clean-up runs."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    before = {s: signal.signal(s, _terminate) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the clean-up
    raise SystemExit(128 + number)
