"""Output paths of commands, checked before anything is compiled or run."""

import os
from pathlib import Path

from nvfp4_kernels.runtime.trusted_path import create_folder


def check_file(option: str, path: Path) -> None:
    """Raise if a file cannot be written; ``option`` is the option's name, for the error.

    Raises:
        OSError: the parent directory is missing, the path is a directory, or writing is forbidden.
    """
    if not path.parent.is_dir():
        raise NotADirectoryError(f"{option}: {path.parent} is no directory; create it first")
    if path.is_dir():
        raise IsADirectoryError(f"{option}: {path} is a directory, must be a file; name one in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"{option}: {path} must not be written to; choose another file")


def make_folder(option: str, path: Path) -> None:
    """Create a folder that only its owner may write to, unless the folder exists.

    ``option`` is the option's name, for the error.

    Raises:
        OSError: the folder cannot be created or written to.
    """
    try:
        create_folder(path, 0o755)
    except OSError as error:
        raise OSError(
            f"{option}: {path} cannot be made a folder ({error.strerror}); choose another"
        ) from error
    if not os.access(path, os.W_OK):
        raise PermissionError(f"{option}: {path} must not be written to; choose another folder")
