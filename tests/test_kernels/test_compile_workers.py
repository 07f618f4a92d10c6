"""Kernels compiled by worker processes, into the cache that the launching process reads."""

import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nvfp4_kernels.runtime import compile as compiler
from nvfp4_kernels.runtime.compile_workers import build_apart
from tests import devices
from tests.emulator import EAGER

pytestmark = pytest.mark.processes


@dataclass(frozen=True)
class Unsound:
    """A kernel that does not compile."""

    def signature(self) -> tuple[Any, ...]:
        raise ValueError("not a kernel\nof any kind")

    def __call__(self, *arguments: Any) -> None: ...


@pytest.fixture
def bound() -> Iterator[None]:
    """Bind the CuTe DSL of this process, not of the workers, before anything is patched."""
    with devices.emulated(EAGER, "sm_90"):
        yield


@pytest.fixture(autouse=True)
def folder(bound: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "kept"))
    monkeypatch.setenv(compiler.ARCH_VARIABLE, "sm_90a")
    return tmp_path / "kept"


def kernels() -> list[Any]:
    from nvfp4_kernels.gemm.sm90.kernel import WeightOnlyGemm
    from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile

    return [WeightOnlyGemm(Tile(tokens), EpilogueConfig()) for tokens in (8, 16, 24)]


def test_all_are_kept_where_they_are_looked_for(folder: Path) -> None:
    made = kernels()
    there = compiler.object_path(made[1])
    assert there is not None
    there.parent.mkdir(0o755)
    there.write_text("as it is")
    assert build_apart(made, 2) == []
    places = [compiler.object_path(kernel) for kernel in made]
    assert sorted(folder.iterdir()) == sorted(place for place in places if place)
    assert there.read_text() == "as it is"
    assert all(place.stat().st_size > 10_000 for place in places if place and place != there)


def test_a_failure_says_why_and_costs_no_other_kernel(folder: Path) -> None:
    good = kernels()[0]
    assert build_apart([Unsound(), good], 1) == ["status 1: ValueError: not a kernel of any kind"]
    place = compiler.object_path(good)
    assert place is not None
    assert list(folder.iterdir()) == [place]


def test_a_process_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert build_apart(kernels()[:1], 1) == ["status 1: nothing said"]


def test_a_folder_that_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiler.CACHE_VARIABLE, "/proc/none")
    [said] = build_apart(kernels()[:1], 1)
    assert said.startswith("status 1: UnusableCache: NVFP4_KERNELS_CACHE: ")
    assert "/proc/none" in said


def test_modules_of_the_folder_it_runs_in_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may be started in any folder, such as /tmp."""
    (tmp_path / "pickle.py").write_text("raise SystemExit('planted')")
    monkeypatch.chdir(tmp_path)
    assert build_apart([], 1) == []


def _build_one() -> None:
    sys.exit(" ".join(build_apart(kernels()[:1], 1)) or 0)


def test_in_a_daemonic_process(folder: Path) -> None:
    """Daemonic processes, as vLLM's workers are, may have no multiprocessing children."""
    worker = multiprocessing.get_context("spawn").Process(target=_build_one, daemon=True)
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    assert len(list(folder.iterdir())) == 1
