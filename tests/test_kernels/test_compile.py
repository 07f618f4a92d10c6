"""Kernels compiled in this process, and the kernel cache."""

import os
import stat
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nvfp4_kernels.runtime import compile as compiler
from nvfp4_kernels.runtime.compile import UnusableCache, compiled
from nvfp4_kernels.runtime.trusted_path import TRUST_VARIABLE
from tests import devices
from tests.emulator import EAGER
from tests.other_users import NOBODY, needs_root


@pytest.fixture
def bound() -> Iterator[None]:
    """Bind this process's CuTe DSL, before anything is patched."""
    with devices.emulated(EAGER, "sm_90"):
        yield


@pytest.fixture
def folder(bound: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "kept"))
    compiled.cache_clear()
    return tmp_path / "kept"


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """Paths of files that Python opens; an audit hook cannot be removed, so it is switched off."""
    paths: list[str] = []
    watching = [True]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if watching[0] and event == "open":
            path, _, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR)
            if isinstance(path, str) and not writes:
                paths.append(path)

    sys.addaudithook(hook)
    yield paths
    watching[0] = False


@contextmanager
def mask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def kernel(tokens: int) -> Any:
    from nvfp4_kernels.gemm.sm90.kernel import WeightOnlyGemm
    from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile

    return WeightOnlyGemm(Tile(tokens), EpilogueConfig())


def compile_one(tokens: int) -> Any:
    return compiled(kernel(tokens), compiler.arch())


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "not kept"])
def test_by_several_threads(folder: Path, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may drive several GPUs, each from a thread."""
    if not kept:
        monkeypatch.setenv(compiler.CACHE_VARIABLE, "")
    with ThreadPoolExecutor(4) as pool:
        functions = list(pool.map(compile_one, (8, 16, 8, 24)))
    assert all(map(callable, functions))
    assert len(list(folder.iterdir()) if kept else []) == (3 if kept else 0)


def test_a_folder_that_cannot_be_written_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler.CACHE_VARIABLE, "/proc/none")
    with pytest.raises(
        UnusableCache,
        match=r"NVFP4_KERNELS_CACHE: kernels cannot be kept in /proc/none \(.*No such file.*\), "
        "must be a folder that can be written to; set it to one, or to nothing to keep none",
    ):
        compile_one(8)


def test_a_file_that_is_damaged(folder: Path) -> None:
    place = compiler.object_path(kernel(8))
    assert place is not None
    folder.mkdir(0o755)
    place.touch(0o644)  # as after a loss of power
    with pytest.raises(
        UnusableCache, match=rf"{place} cannot be loaded .*; if it is damaged, delete"
    ):
        compile_one(8)
    place.unlink()
    assert callable(compile_one(8))


@pytest.mark.parametrize("place", ["middle", "end", "seal"])
def test_one_bit_that_is_another_is_found(folder: Path, place: str) -> None:
    assert callable(compile_one(8))
    (file,) = folder.iterdir()
    content = bytearray(file.read_bytes())
    content[{"middle": len(content) // 2, "end": -60, "seal": -1}[place]] ^= 1
    file.write_bytes(content)
    compiled.cache_clear()
    with pytest.raises(UnusableCache, match=rf"{file} cannot be loaded \(its content has not the"):
        compile_one(8)


def test_a_file_that_is_cut_short_is_found(folder: Path) -> None:
    assert callable(compile_one(8))
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    compiled.cache_clear()
    with pytest.raises(UnusableCache, match="its content has not the digest"):
        compile_one(8)


@pytest.mark.parametrize("of", ["parent", "folder", "file"])
@pytest.mark.parametrize(
    ("mode", "who"),
    [(0o757, "everybody"), (0o775, r"(group \S+ \()?gid \d+\)?")],
    ids=["everybody", "group"],
)
def test_what_others_may_write_to_is_not_run(folder: Path, of: str, mode: int, who: str) -> None:
    assert callable(compile_one(8))
    (file,) = folder.iterdir()
    place = {"parent": folder.parent, "folder": folder, "file": file}[of]
    place.chmod(mode)
    compiled.cache_clear()
    said = rf"NVFP4_KERNELS_CACHE: {folder} holds code that is run, and {who} may write to"
    with pytest.raises(UnusableCache, match=rf"{said} {place}, mode {mode:o}, only its owner may"):
        compile_one(8)


@pytest.mark.parametrize("of", ["parent", "folder", "file"])
def test_what_another_user_owns_is_not_run(folder: Path, of: str) -> None:
    needs_root()
    assert callable(compile_one(8))
    (file,) = folder.iterdir()
    place = {"parent": folder.parent, "folder": folder, "file": file}[of]
    os.chown(place, NOBODY, NOBODY)
    compiled.cache_clear()
    with pytest.raises(UnusableCache, match=rf"and {place} belongs to .*uid {NOBODY}.*, must"):
        compile_one(8)


def test_a_folder_reached_through_anothers_link_is_not_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_root()
    assert callable(compile_one(8))
    link = tmp_path / "link"
    link.symlink_to(folder)
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(link))
    compiled.cache_clear()
    assert callable(compile_one(8))
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    compiled.cache_clear()
    with pytest.raises(UnusableCache, match=rf"and {link} belongs to .*uid {NOBODY}"):
        compile_one(8)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777], ids=oct)
def test_nothing_is_kept_where_others_may_write(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    said = rf"NVFP4_KERNELS_CACHE: {folder} holds code that is run, and .* may write to {folder},"
    with pytest.raises(UnusableCache, match=said):
        compile_one(8)
    assert not list(folder.iterdir())


def test_a_folder_of_a_trusted_group(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_root()
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    folder.chmod(0o2775)
    with pytest.raises(UnusableCache, match=rf"trust its owner with .*_TRUST=user:{NOBODY}, or"):
        compile_one(8)
    monkeypatch.setenv(TRUST_VARIABLE, f"group:{NOBODY}")
    assert callable(compile_one(8))
    (file,) = folder.iterdir()
    assert file.stat().st_gid == NOBODY
    assert not file.stat().st_mode & 0o022


def test_a_name_that_nobody_has_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRUST_VARIABLE, "user:no such user")
    said = r"^NVFP4_KERNELS_CACHE_TRUST: 'user:no such user' names nobody here, must be user:NAME"
    with pytest.raises(UnusableCache, match=said):
        compile_one(8)


def test_what_is_loaded_is_what_was_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is replaced after its check is not read again."""
    assert callable(compile_one(8))
    (file,) = folder.iterdir()
    checked = compiler.read_kept

    def exchange(place: Path) -> bytes:
        content = checked(place)
        place.write_bytes(b"another's")
        return content

    monkeypatch.setattr(compiler, "read_kept", exchange)
    compiled.cache_clear()
    assert callable(compile_one(8))
    assert file.read_bytes() == b"another's"


def test_folders_that_are_made_are_the_users_own_by_default(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(compiler.CACHE_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with mask(0):
        assert callable(compile_one(8))
    made = tmp_path / "home" / ".cache" / "nvfp4_kernels"
    for each in (made, made.parent, made.parent.parent):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700
    assert len(list(made.iterdir())) == 1


def test_a_default_folder_that_others_may_write_to_is_not_mended(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that other users put into the folder would be run."""
    monkeypatch.delenv(compiler.CACHE_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    kept = tmp_path / ".cache" / "nvfp4_kernels"
    kept.parent.mkdir(0o755)
    kept.mkdir()
    kept.chmod(0o775)
    with pytest.raises(UnusableCache, match=rf"; chmod g-w {kept}, or trust the group with NVFP4"):
        compile_one(8)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o775


def test_nothing_of_the_compilers_own_cache_is_read(folder: Path, opened: list[str]) -> None:
    """CuTe DSL's cache is under /tmp by default."""
    assert callable(compile_one(8))
    assert str(next(folder.iterdir())) in opened
    assert not [path for path in opened if path.startswith(os.environ["CUTE_DSL_CACHE_DIR"])]


def test_the_compilers_own_cache_where_it_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cutlass.cutlass_dsl.cutlass import CuTeDSL

    own = tmp_path / "cute"
    own.mkdir()
    own.chmod(0o777)
    monkeypatch.setenv("CUTE_DSL_CACHE_DIR", str(own))
    monkeypatch.setattr(CuTeDSL._get_dsl().envar, "enable_pyir", True)
    with pytest.raises(UnusableCache, match=rf"^CUTE_DSL_CACHE_DIR: .* everybody may .* {own}"):
        compile_one(8)


def test_what_is_kept_is_its_owners_whatever_the_mask(folder: Path) -> None:
    with mask(0):
        assert callable(compile_one(8))
    (file,) = folder.iterdir()
    assert not (folder.stat().st_mode | file.stat().st_mode) & 0o022
