"""Destinations of commands' files, checked before anything is compiled or run."""

import os
from pathlib import Path

from nvfp4_kernels.runtime.trusted_path import create_folder


def check_file(option: str, path: Path) -> None:
    """Refuse a file that cannot be written; ``option`` is what it was given as.

    Raises:
        OSError: its directory is missing, it is a directory itself, or nobody may write there.
    """
    if not path.parent.is_dir():
        raise NotADirectoryError(f"{option}: {path.parent} is no directory; create it first")
    if path.is_dir():
        raise IsADirectoryError(f"{option}: {path} is a directory, must be a file; name one in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"{option}: {path} must not be written to; choose another file")


def make_folder(option: str, path: Path) -> None:
    """Create a folder that its owner alone may write to, unless there is one.

    ``option`` is what it was given as.

    Raises:
        OSError: it cannot be created, or nobody may write there.
    """
    try:
        create_folder(path, 0o755)
    except OSError as error:
        raise OSError(
            f"{option}: {path} cannot be made a folder ({error.strerror}); choose another"
        ) from error
    if not os.access(path, os.W_OK):
        raise PermissionError(f"{option}: {path} must not be written to; choose another folder")
