"""Object files of compiled kernels: sealed against damage and foreign writes.

A digest follows the content, where an ELF reader does not look. The digest detects damage by a disk
or a copy, but not a user with write access, who could replace both: see ``trusted_path``.
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
    """A damaged sealed file; the message is worded to follow the file's name."""


def seal(file: Path) -> None:
    """Append the digest of a file's content, and make the file writable by its owner only."""
    content = file.read_bytes()
    with file.open("ab") as stream:
        stream.write(_MARK + hashlib.sha256(content).digest())
    file.chmod(file.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))


def read_sealed(file: Path) -> bytes:
    """Content of a sealed file, without its digest.

    Raises:
        DamagedFile: the file is not as it was sealed.
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
    """Context with a path of ``content`` in memory, for loaders that accept only paths.

    The loader reads the checked content, even if the file has changed since.
    """
    descriptor = os.memfd_create("kernel.o")
    with open(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        yield f"/proc/self/fd/{descriptor}"
