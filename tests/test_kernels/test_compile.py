"""What is compiled in this process, and kept."""

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
