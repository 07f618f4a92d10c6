"""Destination folder: complete, or not there at all."""

import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from vllm_fp4_plugin.quantizer.errors import QuantizerError

# Weights and their indexes, in every format that checkpoints come in.
_WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx",
    ".index.json",
)  # fmt: skip


def check_destination(src: Path, dst: Path) -> None:
    """Refuse a destination that is taken, has no parent, or overlaps the source.

    Raises:
        QuantizerError: naming ``dst``.
    """
    source, target = src.resolve(), dst.resolve()
    if source.is_relative_to(target) or target.is_relative_to(source):
        raise QuantizerError(f"dst: {dst} and {src} lie within each other; choose another folder")
    if os.path.lexists(dst):
        raise QuantizerError(f"dst: {dst} exists; choose another folder or remove it")
    if not dst.absolute().parent.is_dir():
        raise QuantizerError(f"dst: {dst.absolute().parent} is not a folder; create it first")


@contextmanager
def atomic_folder(dst: Path, nbytes: int) -> Iterator[Path]:
    """Make a hidden folder beside ``dst`` that becomes ``dst`` on success and is removed otherwise.

    An exception, Ctrl-C, SIGTERM and SIGHUP remove it; after SIGKILL ``.<dst>.*.partial`` stays.

    Raises:
        QuantizerError: less than ``nbytes`` are free there.
    """
    parent = dst.absolute().parent
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise QuantizerError(
            f"dst: {parent} has {free / 1e9:.1f} GB free, {nbytes / 1e9:.1f} GB are needed; "
            "choose another disk"
        )
    partial = parent / f".{dst.name}.{secrets.token_hex(4)}.partial"
    with _termination_raises():
        try:
            partial.mkdir()
            yield partial
            check_destination(partial, dst)
            partial.rename(dst)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def copy_companions(src: Path, dst: Path) -> None:
    """Copy tokenizer, chat template, generation config and the like: all but weights and config."""
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
