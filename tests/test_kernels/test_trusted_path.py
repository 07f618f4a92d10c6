"""Paths of code that is run: accepted owners and write permissions."""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvfp4_kernels.runtime.trusted_path import (
    TRUST_VARIABLE,
    UnknownTrust,
    UntrustedPath,
    check_trusted,
    create_folder,
    read_trusted,
)
from tests.other_users import NOBODY, acting_as, needs_root

ANOTHER = 54321  # neither root nor nobody, and without a name


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """Give files the usual mode, whoever runs the tests."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A private file in a private folder."""
    folder = tmp_path / "parent" / "kept"
    folder.mkdir(parents=True)
    path = folder / "kernel.o"
    path.write_bytes(b"code")
    path.chmod(0o644)
    return path


@pytest.fixture
def shared(file: Path, tmp_path: Path) -> Path:
    """A folder like /tmp, with a user's link to the file's folder."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "link").symlink_to(file.parent)
    return shared


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder directly in the machine's own /tmp, which other users can reach."""
    path = Path(tempfile.mkdtemp(prefix="trusted-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def refused(path: Path, message: str) -> None:
    with pytest.raises(UntrustedPath, match=message):
        read_trusted(path)


# --- accepted -----------------------------------------------------------------------------------


def test_a_private_file_is_read(file: Path) -> None:
    assert check_trusted(file) == file.resolve()
    assert read_trusted(file) == b"code"


def test_a_folder_of_ones_own_in_a_sticky_one(shared: Path) -> None:
    own = shared / "own"
    own.mkdir(0o700)
    (own / "kernel.o").write_bytes(b"code")
    assert read_trusted(own / "kernel.o") == b"code"


def test_a_folder_of_ones_own_in_tmp(open_to_all: Path) -> None:
    (open_to_all / "kernel.o").write_bytes(b"code")
    assert read_trusted(open_to_all / "kernel.o") == b"code"


def test_links_of_ones_own(file: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file.parent / "other.o").symlink_to("../kept/kernel.o")
    for path in (shared / "link" / "kernel.o", file.parent / "other.o"):
        assert check_trusted(path) == file.resolve()
    monkeypatch.chdir(file.parent)
    assert read_trusted(Path("../kept/other.o")) == b"code"


def test_what_root_owns_is_any_users_to_run(open_to_all: Path) -> None:
    (open_to_all / "kernel.o").write_bytes(b"code")
    with acting_as(NOBODY):
        assert read_trusted(open_to_all / "kernel.o") == b"code"


def test_what_a_user_owns_is_the_users_to_run(open_to_all: Path) -> None:
    (open_to_all / "kernel.o").write_bytes(b"code")
    needs_root()
    os.chown(open_to_all, NOBODY, NOBODY)
    os.chown(open_to_all / "kernel.o", NOBODY, NOBODY)
    with acting_as(NOBODY):
        assert read_trusted(open_to_all / "kernel.o") == b"code"
    with acting_as(ANOTHER):
        refused(
            open_to_all / "kernel.o",
            rf"^{open_to_all} belongs to .*uid {NOBODY}\)?, must belong to uid {ANOTHER}, who runs "
            rf"this, or root; chown it, or trust its owner with {TRUST_VARIABLE}=user:{NOBODY}$",
        )


# --- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o644, 0o600])
def test_a_file_of_another_user(file: Path, mode: int) -> None:
    needs_root()
    file.chmod(mode)
    os.chown(file, ANOTHER, ANOTHER)
    refused(file, rf"^{file} belongs to uid {ANOTHER}, must belong to root; chown it, or trust")


@pytest.mark.parametrize("above", [0, 1, 2], ids=["folder", "parent", "parent of it"])
def test_a_folder_of_another_user(file: Path, above: int) -> None:
    needs_root()
    folder = file.parents[above]
    os.chown(folder, ANOTHER, ANOTHER)
    refused(file, rf"^{folder} belongs to uid {ANOTHER}")


@pytest.mark.parametrize("above", [0, 1, 2], ids=["folder", "parent", "parent of it"])
@pytest.mark.parametrize(
    ("mode", "remedy"),
    [
        (0o775, rf"chmod g-w .*, or trust the group with {TRUST_VARIABLE}=group:\d+$"),
        (0o757, "chmod o-w"),
        (0o777, "chmod o-w"),
    ],
    ids=["group", "others", "everybody"],
)
def test_a_folder_that_others_may_write_to(file: Path, above: int, mode: int, remedy: str) -> None:
    folder = file.parents[above]
    folder.chmod(mode)
    refused(file, rf" may write to {folder}, mode {mode:o}, only its owner may; {remedy}")


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666], ids=oct)
def test_a_file_that_others_may_write_to(file: Path, mode: int) -> None:
    file.chmod(mode)
    refused(file, rf" may write to {file}, mode {mode:o}, only its owner may; chmod")


def test_a_file_in_a_sticky_folder_itself(shared: Path) -> None:
    """Another user can have linked a file into a sticky folder."""
    path = shared / "kernel.o"
    path.write_bytes(b"code")
    for each in (path, shared):
        with pytest.raises(
            UntrustedPath,
            match=rf"write to {shared}, mode 1777, .*; take a folder of your own in it$",
        ):
            check_trusted(each)


def test_a_link_of_another_user(shared: Path) -> None:
    needs_root()
    os.chown(shared / "link", ANOTHER, ANOTHER, follow_symlinks=False)
    refused(shared / "link" / "kernel.o", rf"^{shared / 'link'} belongs to uid {ANOTHER}")


def test_a_link_into_a_folder_of_another_user(file: Path, shared: Path) -> None:
    needs_root()
    os.chown(file.parent.parent, ANOTHER, ANOTHER)
    refused(shared / "link" / "kernel.o", rf"^{file.parent.parent} belongs to uid {ANOTHER}")


def test_a_link_in_a_folder_that_others_may_write_to(shared: Path) -> None:
    """The link's target is private, but other users can replace the link."""
    shared.chmod(0o777)
    refused(shared / "link" / "kernel.o", rf"everybody may write to {shared}, mode 777")


def test_a_file_that_is_a_link_of_another_user(file: Path) -> None:
    needs_root()
    link = file.with_name("other.o")
    link.symlink_to(file)
    os.chown(link, ANOTHER, ANOTHER, follow_symlinks=False)
    refused(link, rf"^{link} belongs to uid {ANOTHER}")


def test_links_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match=r"Too many levels of symbolic links"):
        check_trusted(tmp_path / "a" / "kernel.o")


def test_a_pipe_in_the_place_of_a_file(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)
    refused(file, "is no regular file, must be one; delete it")


# --- other trusted users -------------------------------------------------------------------------


def test_a_user_that_is_trusted(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root of a container trusts files of a user of the machine."""
    needs_root()
    for path in (file, file.parent):
        os.chown(path, ANOTHER, ANOTHER)
    monkeypatch.setenv(TRUST_VARIABLE, f"group:7, user:{ANOTHER}")
    assert read_trusted(file) == b"code"
    file.parent.chmod(0o775)  # its group is not trusted
    refused(file, f"^gid {ANOTHER} may write to {file.parent}")


def test_a_group_that_is_trusted(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of a team have made files in the team's folder."""
    needs_root()
    os.chown(file, ANOTHER, 100)
    os.chown(file.parent, NOBODY, 100)
    file.parent.chmod(0o2775)
    refused(file, "belongs to")
    monkeypatch.setenv(TRUST_VARIABLE, "group:100")
    assert read_trusted(file) == b"code"
    monkeypatch.setenv(TRUST_VARIABLE, "group:101")
    refused(file, "belongs to")


def test_what_everybody_may_write_to_is_nobodys_to_trust(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.parent.chmod(0o777)
    monkeypatch.setenv(TRUST_VARIABLE, f"user:{os.geteuid()},group:{file.parent.stat().st_gid}")
    refused(file, rf"everybody may write to {file.parent}, mode 777")


def test_a_trusted_groups_sticky_folder(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything made in such a folder has the folder's group, so the group proves nothing."""
    needs_root()
    os.chown(shared, 0, 100)
    shared.chmod(0o3777)
    own = shared / "anybody's"
    own.mkdir(0o755)
    os.chown(own, ANOTHER, 100)
    (own / "kernel.o").write_bytes(b"code")
    monkeypatch.setenv(TRUST_VARIABLE, "group:100")
    refused(own / "kernel.o", rf"belongs to uid {ANOTHER}")


def test_names_of_users_and_groups(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRUST_VARIABLE, "user:root,group:root,")
    assert read_trusted(file) == b"code"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("root", "'root' has neither user: nor group:"),
        ("user:root,groups:7", "'groups:7' has neither"),
        ("user:no such user", "'user:no such user' names nobody here"),
        ("group:", "'group:' names nobody here"),
        ("user:-1", "'user:-1' names nobody here"),
    ],
)
def test_trust_in_what_is_no_name(
    file: Path, monkeypatch: pytest.MonkeyPatch, given: str, why: str
) -> None:
    monkeypatch.setenv(TRUST_VARIABLE, given)
    with pytest.raises(UnknownTrust, match=rf"^{TRUST_VARIABLE}: {why}.*, must be user:NAME or"):
        read_trusted(file)


# --- folders created by the package ------------------------------------------------------------


@pytest.mark.parametrize("mask", [0, 0o022, 0o077], ids=oct)
def test_folders_are_made_with_no_more_than_asked_for(tmp_path: Path, mask: int) -> None:
    os.umask(mask)
    create_folder(tmp_path / "a" / "b", 0o755)
    for folder in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755 & ~mask


def test_a_folder_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    create_folder(tmp_path, 0o700)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o750
