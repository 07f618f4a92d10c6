"""What is compiled in this process, and kept."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nvfp4_kernels import compile as compiler
from nvfp4_kernels.compile import UnusableCache, compiled
from tests import devices
from tests.emulator import EAGER


@pytest.fixture
def bound() -> Iterator[None]:
    """Binds this process's CuTe DSL; ends after what is patched within."""
    with devices.emulated(EAGER, "sm_90"):
        yield


@pytest.fixture
def folder(bound: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "kept"))
    compiled.cache_clear()
    return tmp_path / "kept"


def kernel(tokens: int) -> Any:
    from nvfp4_kernels.gemm.sm90.kernel import WeightOnlyGemm
    from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile

    return WeightOnlyGemm(Tile(tokens), EpilogueConfig())


def compile_one(tokens: int) -> Any:
    return compiled(kernel(tokens), compiler.arch())


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "not kept"])
def test_by_several_threads(folder: Path, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may drive several GPUs, each from a thread of its own."""
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
    folder.mkdir()
    place.touch()  # as after a loss of power
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


@pytest.mark.parametrize("of", ["folder", "file"])
def test_what_everybody_may_write_to_is_not_run(folder: Path, of: str) -> None:
    assert callable(compile_one(8))
    (file,) = folder.iterdir()
    (folder if of == "folder" else file).chmod(0o777)
    compiled.cache_clear()
    with pytest.raises(UnusableCache, match=r"everybody may write to it, mode 777; chmod o-w"):
        compile_one(8)


def test_nothing_is_kept_where_everybody_may_write(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    said = rf"NVFP4_KERNELS_CACHE: {folder} holds code that is run, and everybody may write to it"
    with pytest.raises(UnusableCache, match=said):
        compile_one(8)
    assert not list(folder.iterdir())


def test_what_is_kept_is_its_owners_whatever_the_mask(folder: Path) -> None:
    before = os.umask(0)
    try:
        assert callable(compile_one(8))
    finally:
        os.umask(before)
    (file,) = folder.iterdir()
    assert not (folder.stat().st_mode | file.stat().st_mode) & 0o002
