"""Files and folders named by options, checked before any long work.

This module imports only the standard library, so that results can be shown without torch.
"""

import os
from pathlib import Path


def check_folder(folder: Path, argument: str) -> None:
    """Check that a folder exists or can be created, and is writable; creates nothing.

    Raises:
        ValueError: the folder is unusable; the message names the argument, and the remedy.
    """
    folder = folder.resolve()
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not there.is_dir():
        raise ValueError(
            f"{argument}: {folder} cannot be a folder, {there} is a file; name another folder"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(
            f"{argument}: {there} cannot be written to; name another folder, or allow writing there"
        )


def check_file(file: Path, argument: str) -> None:
    """Check that a file can be written, in an existing folder.

    Raises:
        ValueError: the file cannot be written; the message names the argument, and the remedy.
    """
    if file.is_dir():
        raise ValueError(f"{argument}: {file} is a folder, must be a file; name one in it")
    folder = file.parent
    if not folder.is_dir():
        raise ValueError(f"{argument}: {folder} is no folder; create it first")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise ValueError(
            f"{argument}: {file} cannot be written; name another file, or allow writing there"
        )


def read_results(file: Path, written_by: str) -> str:
    """Read a file of results; ``written_by`` is the command that writes such files.

    Raises:
        ValueError: the file cannot be read; the message names the argument, and the remedy.
    """
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"results: {file} cannot be read ({error}); give the file that "
            f"`{written_by}` has written"
        ) from error
