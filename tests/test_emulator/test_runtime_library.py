import ctypes
import os
from pathlib import Path

import pytest

from tests.emulator.runtime import library
from tests.other_users import NOBODY, needs_root


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_it_is_built_once(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = library.build()
    assert built.is_relative_to(empty_cache)
    assert [p.name for p in built.parent.iterdir()] == ["libcute_dsl_runtime.so"]
    monkeypatch.setenv("CC", "a compiler that is not there")
    assert library.build() == built


def test_another_source_is_another_library(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = library.build()
    source = tmp_path / "other.c"
    source.write_text("int other;")
    monkeypatch.setattr(library, "_SOURCE", source)
    assert library.build() != built


@pytest.mark.usefixtures("empty_cache")
def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"none found as \$CC, cc or gcc.*install gcc"):
        library.build()


def test_a_failing_compiler_is_quoted_and_leaves_nothing(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = empty_cache / "broken.c"
    source.write_text("no C at all")
    monkeypatch.setattr(library, "_SOURCE", source)
    with pytest.raises(RuntimeError, match=r"(?s)failed:.*broken\.c:1"):
        library.build()
    assert not list(empty_cache.rglob("*.so"))
    monkeypatch.setenv("CC", "a compiler that is not there")
    with pytest.raises(RuntimeError, match="cannot run 'a compiler that is not there'"):
        library.build()


def test_a_folder_of_somebody_else_is_not_trusted(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.build()
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(RuntimeError, match="belongs to another user; set XDG_CACHE_HOME"):
        library.build()


@pytest.mark.parametrize("what", ["link", "another user's", "writable"])
def test_a_temporary_directory_of_somebody_else_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(library.tempfile, "gettempdir", lambda: str(tmp_path))
    root = library.cache_directory().parent
    assert root.parent == tmp_path
    assert root.stat().st_mode & 0o777 == 0o700
    if what == "link":
        root.rename(tmp_path / "elsewhere")
        root.symlink_to(tmp_path / "elsewhere")
    elif what == "writable":
        root.chmod(0o777)
    else:
        needs_root()
        os.chown(root, NOBODY, NOBODY)
    with pytest.raises(
        RuntimeError, match=rf"^{root}: .*, must be this user's own folder; set XDG"
    ):
        library.cache_directory()


def test_lending_gives_the_dispatcher_back() -> None:
    calls: list[str] = []

    def to(name: str) -> library.DispatchFunction:
        def dispatch(entry: bytes, words: object, count: int) -> int:
            calls.append(f"{name}: {entry.decode()}")
            return 0

        return dispatch

    lent = library.Library(library.build(), ctypes.RTLD_LOCAL)
    with lent.lent_to(to("outer")) as entry_points:
        with lent.lent_to(to("inner")):
            entry_points._cudaDeviceSynchronize()
        entry_points._cudaDeviceSynchronize()
    assert calls == ["inner: _cudaDeviceSynchronize", "outer: _cudaDeviceSynchronize"]


def test_without_a_device_calls_fail(capfd: pytest.CaptureFixture[str]) -> None:
    lent = library.Library(library.build(), ctypes.RTLD_LOCAL)
    with lent.lent_to(lambda name, words, count: 0) as entry_points:
        lent.dispatch_to(None)
        assert entry_points._cudaDeviceSynchronize() == 3
    assert "_cudaDeviceSynchronize called while no device is installed" in capfd.readouterr().err
