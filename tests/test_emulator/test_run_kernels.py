"""Compiled kernels, shared by the processes of a run or kept apart."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import devices
from tests.emulator import EAGER


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Empty folder of a run; this process forgets its loaded kernels."""
    devices.cutlass_or_skip()
    from nvfp4_kernels.runtime import compile as compiler

    monkeypatch.setenv(devices.RUN_KERNELS, str(tmp_path))
    compiler.compiled.cache_clear()
    yield tmp_path
    compiler.compiled.cache_clear()


def launched(patch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Number of kernels that a fresh process compiles for one launch, and the launched PTX."""
    with devices.emulated(EAGER) as device:
        from nvfp4_kernels.runtime import compile as compiler
        from tests.test_emulator.kernels.placing import ARRAYS, Placing

        compiler.compiled.cache_clear()
        compiled: list[object] = []
        compile_kernel = compiler.compile_kernel
        with patch.context() as within:
            within.setattr(
                compiler,
                "compile_kernel",
                lambda kernel, **given: (compiled.append(kernel), compile_kernel(kernel, **given))[
                    1
                ],
            )
            out = device.output("out", torch.empty(len(ARRAYS), dtype=torch.int32))
            compiler.launch(Placing(), out)
        lines = device.gpu.launches[-1].program.module.lines
        return len(compiled), "\n".join(lines)


def test_a_run_compiles_a_kernel_once(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = launched(monkeypatch)
    assert len(list(kept.rglob("*.o"))) == 1
    assert launched(monkeypatch) == (0, first[1])
    assert first[0] == 1


def test_other_kernels_are_not_shared(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with devices.other_kernels():
        assert launched(monkeypatch)[0] == 1
    assert not list(kept.rglob("*.o"))
    assert launched(monkeypatch)[0] == 1
    with devices.other_kernels():
        assert launched(monkeypatch)[0] == 1


def test_source_lines_are_kept_apart(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source_lines in (False, True):
        monkeypatch.setattr(devices, "source_lines", source_lines)
        count, ptx = launched(monkeypatch)
        assert count == 1
        assert bool(re.search(r"\.loc\s", ptx)) == source_lines


def test_binaries_change_no_ptx(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are not assembled have the same PTX, except for an additional empty kernel."""
    texts = {}
    for binaries in ("optimised", "plain", "none"):
        with devices.other_kernels():
            monkeypatch.setattr(devices, "binaries", binaries)
            _, text = launched(monkeypatch)
        empty = (
            r"(\s// \.globl\s+assembled_alone)?\s\.visible \.entry assembled_alone\(\)\s*\{.*?\n\}"
        )
        texts[binaries] = re.sub(empty, "", text, flags=re.DOTALL).split()
        assert ("assembled_alone" in text) == (binaries == "none")
    assert texts["optimised"] == texts["plain"] == texts["none"]
