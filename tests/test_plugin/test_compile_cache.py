"""Compiled graphs that vLLM keeps between starts: taken up by the same engine, and by no other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import _dynamo
from vllm.compilation.counter import compilation_counter

from tests.engine import Run, run
from vllm_fp4_plugin import sources

pytestmark = pytest.mark.slow

NO_FUSED_MLP = {"additional_config": {"nvfp4_tc": {"fuse_mlp": False}}}
NO_FUSED_NORM = {"additional_config": {"nvfp4_tc": {"fuse_norm": False}}}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder of its own, in which nothing is yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("vllm")))
        yield


def start(model: Path, **engine_args: Any) -> tuple[Run, int]:
    """What an engine says, and how many of its graphs it found in the cache."""
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


@pytest.mark.parametrize("option", [NO_FUSED_MLP, NO_FUSED_NORM], ids=["fuse_mlp", "fuse_norm"])
def test_another_option_takes_no_stale_graph(
    modelopt: Path, cold: Run, option: dict[str, Any]
) -> None:
    found, taken = start(modelopt, **option)
    assert not taken
    assert found.report != cold.report
    again, taken = start(modelopt, **option)
    assert taken == 1
    assert again == found


def test_other_sources_take_no_stale_graph(
    modelopt: Path, cold: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later version of the plugin may have the same number."""
    monkeypatch.setattr(sources, "digest", lambda: "of another version")
    found, taken = start(modelopt)
    assert not taken
    assert found == cold
