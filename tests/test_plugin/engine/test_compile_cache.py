"""Compiled graphs that vLLM keeps between starts: reused only by the same engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import _dynamo
from vllm.compilation.counter import compilation_counter
from vllm.config import CompilationMode
from vllm.platforms.cpu import CpuPlatform

from tests.engine import Run, run
from vllm_fp4_plugin import sources

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Empty cache folder, and graphs compiled piecewise as on a GPU.

    On a CPU, vLLM's usual way of compiling keeps the graphs too, but cannot reuse them.
    """
    update = CpuPlatform.check_and_update_config.__func__

    def piecewise(cls: Any, vllm_config: Any) -> None:
        update(cls, vllm_config)
        vllm_config.compilation_config.mode = CompilationMode.VLLM_COMPILE
        vllm_config.compilation_config.compile_sizes = []

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("vllm")))
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(piecewise))
        yield


def start(model: Path, **engine_args: Any) -> tuple[Run, int]:
    """Answer of an engine, and the number of the engine's graphs that came from the cache."""
    _dynamo.reset()  # as in a new process
    before = compilation_counter.clone()
    found = run(str(model), enforce_eager=False, **engine_args)
    taken = compilation_counter.num_aot_artifacts_loaded - before.num_aot_artifacts_loaded
    made = compilation_counter.num_aot_compiles - before.num_aot_compiles
    assert taken + made == 1
    return found, taken


@pytest.fixture(scope="module")
def cold(modelopt: Path, cache: None) -> Run:
    found, taken = start(modelopt)
    assert not taken
    return found


def test_a_warm_start_says_the_same(modelopt: Path, cold: Run) -> None:
    found, taken = start(modelopt)
    assert taken == 1
    assert found == cold


def test_another_option_takes_no_stale_graph(modelopt: Path, cold: Run) -> None:
    found, taken = start(modelopt, additional_config={"nvfp4_tc": {"fuse_mlp": False}})
    assert not taken
    assert found.report != cold.report


def test_other_sources_take_no_stale_graph(
    modelopt: Path, cold: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later version of the plugin may have the same version number."""
    monkeypatch.setattr(sources, "digest", lambda: "of another version")
    found, taken = start(modelopt)
    assert not taken
    assert found == cold
