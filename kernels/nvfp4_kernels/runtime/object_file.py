"""Object files of compiled kernels, which a process runs: whole, and nobody else's to change.

A digest of the content stands behind it, where an ELF reader does not look. It finds what a disk or
a copy has damaged; who may write to the folder could replace both: see ``trusted_path``.
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
    """A file that is not as it was sealed; says so in words to follow its name."""


def seal(file: Path) -> None:
    """Append the digest of a file's content, and let only its owner write to it."""
    content = file.read_bytes()
    with file.open("ab") as stream:
        stream.write(_MARK + hashlib.sha256(content).digest())
    file.chmod(file.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))


def read_sealed(file: Path) -> bytes:
    """Content of a sealed file, without its digest.

    Raises:
        DamagedFile: it is not as it was sealed.
        UntrustedPath: somebody else could have sealed it.
        OSError: it cannot be read.
    """
    content = read_trusted(file)
    body, end = content[:-_SEAL_BYTES], content[-_SEAL_BYTES:]
    if end != _MARK + hashlib.sha256(body).digest():
        raise DamagedFile("its content has not the digest that it was written with")
    return body


@contextmanager
def in_memory(content: bytes) -> Iterator[str]:
    """Context with a path of ``content`` in memory, for a loader that takes nothing but paths.

    The loader reads what was checked, whatever has happened to the file since.
    """
    descriptor = os.memfd_create("kernel.o")
    with open(descriptor, "wb") as stream:
        stream.write(content)
        stream.flush()
        yield f"/proc/self/fd/{descriptor}"
