"""Trust in paths: no untrusted user may change or replace a file that is executed.

Trusted are root, the user of this process, and users and groups in ``NVFP4_KERNELS_CACHE_TRUST``.
"""

import errno
import grp
import os
import pwd
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

TRUST_VARIABLE = "NVFP4_KERNELS_CACHE_TRUST"
_ROOT = 0
_MAX_LINKS = 40  # Linux's limit


class UntrustedPath(ValueError):
    """Path that an untrusted user could change; the message is worded to follow the path."""


class UnknownTrust(ValueError):
    """Name in ``NVFP4_KERNELS_CACHE_TRUST`` that is neither a user nor a group."""


class Trust(NamedTuple):
    """Users and groups that may change executed files.

    Attributes:
        users: users that may own files, folders and links.
        groups: groups whose files, folders and links may be group-writable and owned by any user:
            on Linux only root and a group's members can give a file to the group.
    """

    users: frozenset[int]
    groups: frozenset[int]

    def check_owner(self, path: Path, status: os.stat_result) -> None:
        """Check the owner of a file, a folder or a link itself.

        Raises:
            UntrustedPath: neither the owner nor the group is trusted.
        """
        if status.st_uid in self.users:
            return
        # In a world-writable folder a new file's group may be the folder's, for any writer.
        if status.st_gid in self.groups and not path.parent.lstat().st_mode & stat.S_IWOTH:
            return
        own = _user(os.geteuid())
        accepted = "root" if os.geteuid() == _ROOT else f"{own}, who runs this, or root"
        raise UntrustedPath(
            f"{path} belongs to {_user(status.st_uid)}, must belong to {accepted}; chown it, or "
            f"trust its owner with {TRUST_VARIABLE}=user:{status.st_uid}"
        )

    def check(self, path: Path, status: os.stat_result, *, may_be_sticky: bool) -> None:
        """Check the owner and the write permissions of a file or folder.

        Args:
            path: path without links.
            status: ``stat`` of the path.
            may_be_sticky: whether a world-writable folder is accepted if sticky, as ``/tmp``.

        Raises:
            UntrustedPath: the path is untrusted; the message has the accepted state and the remedy.
        """
        self.check_owner(path, status)
        mode, permissions = status.st_mode, f"mode {stat.S_IMODE(status.st_mode):o}"
        is_sticky = stat.S_ISDIR(mode) and bool(mode & stat.S_ISVTX)
        if is_sticky and may_be_sticky:
            return
        if mode & stat.S_IWOTH:
            remedy = "take a folder of your own in it" if is_sticky else f"chmod o-w {path}"
            raise UntrustedPath(
                f"everybody may write to {path}, {permissions}, only its owner may; {remedy}"
            )
        # An access control list shows here, too: the group's bits are its mask.
        if mode & stat.S_IWGRP and status.st_gid not in self.groups:
            raise UntrustedPath(
                f"{_group(status.st_gid)} may write to {path}, {permissions}, only its owner may; "
                f"chmod g-w {path}, or trust the group with {TRUST_VARIABLE}=group:{status.st_gid}"
            )


def given_trust() -> Trust:
    """Trust in root, this process's user, and ``NVFP4_KERNELS_CACHE_TRUST``.

    Raises:
        UnknownTrust: ``NVFP4_KERNELS_CACHE_TRUST`` has a name that is neither a user nor a group.
    """
    users, groups = {_ROOT, os.geteuid()}, set[int]()
    for word in filter(None, os.environ.get(TRUST_VARIABLE, "").split(",")):
        kind, _, name = word.strip().partition(":")
        if kind == "user":
            users.add(_number(word, name, lambda name: pwd.getpwnam(name).pw_uid))
        elif kind == "group":
            groups.add(_number(word, name, lambda name: grp.getgrnam(name).gr_gid))
        else:
            raise _unknown(word, "has neither user: nor group:")
    return Trust(frozenset(users), frozenset(groups))


def check_trusted(path: Path) -> Path:
    """Check that no untrusted user can change or replace a file or folder.

    The check covers each folder, link and link target from the root on. Once a folder is known to
    be writable by trusted users only, no other user can replace its entries. An ancestor that
    others may write to is accepted if sticky, like ``/tmp``; the folder that directly contains a
    file must be writable by trusted users only.

    Returns:
        The path without links.

    Raises:
        UntrustedPath: an untrusted user can change or replace the path.
        UnknownTrust: see ``given_trust``.
        OSError: the path does not exist, or is not accessible.
    """
    trust, links = given_trust(), 0
    at, rest = Path("/"), [*reversed(path.absolute().parts)]
    while rest:
        part = rest.pop()
        at = at.parent if part == ".." else at / part
        status = at.lstat()
        if stat.S_ISLNK(status.st_mode):
            trust.check_owner(at, status)
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            rest += reversed(Path(os.readlink(at)).parts)
            at = at.parent
        else:
            trust.check(at, status, may_be_sticky=bool(rest))
    if not at.is_dir():
        trust.check(at.parent, at.parent.lstat(), may_be_sticky=False)
    return at


def read_trusted(path: Path) -> bytes:
    """Content of a trusted file, read from the very file that was checked.

    Raises:
        UntrustedPath: an untrusted user can change the file, or it is not a regular file.
        OSError: the file cannot be read.
    """
    # A pipe in its place must not hold this process up.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(check_trusted(path), flags), "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedPath(f"{path} is no regular file, must be one; delete it")
        given_trust().check(path, status, may_be_sticky=False)
        return stream.read()


def create_folder(path: Path, mode: int) -> None:
    """Create a folder and missing parents, with permissions ``mode`` less the umask.

    Raises:
        OSError: the folder cannot be created.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):  # ``Path.mkdir`` creates parents with 777 less the umask
        each.mkdir(mode, exist_ok=True)
    path.mkdir(exist_ok=True)  # raises where something else has the name


def _number(word: str, name: str, look_up: Callable[[str], int]) -> int:
    try:
        return int(name) if name.isdecimal() else look_up(name)
    except KeyError:
        raise _unknown(word, "names nobody here") from None


def _unknown(word: str, why: str) -> UnknownTrust:
    return UnknownTrust(
        f"{TRUST_VARIABLE}: {word!r} {why}, must be user:NAME or group:NAME, or a number for NAME, "
        "with commas between several; name an existing one"
    )


def _user(number: int) -> str:
    try:
        return f"{pwd.getpwuid(number).pw_name} (uid {number})"
    except KeyError:
        return f"uid {number}"


def _group(number: int) -> str:
    try:
        return f"group {grp.getgrgid(number).gr_name} (gid {number})"
    except KeyError:
        return f"gid {number}"
