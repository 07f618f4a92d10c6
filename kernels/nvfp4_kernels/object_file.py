"""Object files of compiled kernels, which a process runs: whole, and nobody else's to change.

A digest of the content stands behind it, where an ELF reader does not look. It finds what a disk or
a copy has damaged; who may write to the folder could replace both, so that must not be everybody.
"""

import hashlib
import stat
from pathlib import Path

_MARK = b"nvfp4_kernels sha256 "
_SEAL_BYTES = len(_MARK) + hashlib.sha256().digest_size


class UntrustedFile(ValueError):
    """A file, or its folder, that is not to be run; says why, in words to follow its name."""


def seal(file: Path) -> None:
    """Append the digest of a file's content, and let only its owner and group write to it."""
    content = file.read_bytes()
    with file.open("ab") as stream:
        stream.write(_MARK + hashlib.sha256(content).digest())
    file.chmod(file.stat().st_mode & ~stat.S_IWOTH)


def check_sealed(file: Path) -> None:
    """Check that a file is as it was sealed.

    Raises:
        UntrustedFile: it is not, or anybody may write to it.
    """
    check_private(file)
    content = file.read_bytes()
    body, end = content[:-_SEAL_BYTES], content[-_SEAL_BYTES:]
    if end != _MARK + hashlib.sha256(body).digest():
        raise UntrustedFile("its content has not the digest that it was written with")


def check_private(path: Path) -> None:
    """Check that not everybody may write to a file or folder.

    Raises:
        UntrustedFile: everybody may.
    """
    mode = path.stat().st_mode
    if mode & stat.S_IWOTH:
        raise UntrustedFile(
            f"everybody may write to it, mode {stat.S_IMODE(mode):o}; chmod o-w {path}"
        )
