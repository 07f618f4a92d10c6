"""Object files of compiled kernels, sealed with a digest against damage.

The digest follows the content, where an ELF reader does not look. It detects damage by a disk or a
copy, but not changes by a user with write access, who could replace the digest too; against such
changes see ``trusted_path``.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nvfp4_kernels.runtime.trusted_path import read_trusted

_MARK = b"nvfp4_kernels sha256 "
_SEAL_BYTES = len(_MARK) + hashlib.sha256().digest_size


class DamagedFile(ValueError):
    """Sealed file that is damaged; the message is worded to follow the file's name."""


def seal(file: Path) -> None:
    """Append the digest of a file's content, and make the file writable by its owner only."""
    content = file.read_bytes()
    with file.open("ab") as stream:
        stream.write(_MARK + hashlib.sha256(content).digest())
    file.chmod(file.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))


def read_sealed(file: Path) -> bytes:
    """Content of a sealed file, without its digest.

    Raises:
        DamagedFile: the content does not match the digest.
        UntrustedPath: another user could have sealed the file.
        OSError: the file cannot be read.
    """
    content = read_trusted(file)
    body, end = content[:-_SEAL_BYTES], content[-_SEAL_BYTES:]
    if end != _MARK + hashlib.sha256(body).digest():
        raise DamagedFile("its content has not the digest that it was written with")
    return body


@contextmanager
def in_memory(content: bytes) -> Iterator[str]:
    """Context with the path of an in-memory copy of ``content``, for loaders that need a path.

    The loader thus reads the checked content, even if the file on disk has changed since.
    """
    descriptor = os.memfd_create("kernel.o")
    with open(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        yield f"/proc/self/fd/{descriptor}"
