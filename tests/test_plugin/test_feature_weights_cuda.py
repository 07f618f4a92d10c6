"""Weights replaced under CUDA graphs on a real GPU, and engines that sleep there.

Bit for bit what an engine says that was started on the weights, itself in CUDA graphs.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests import moe_checkpoints, tiny_llama
from tests.engine import Run, started
from tests.test_plugin.test_feature_weights import Pair, addresses, ask, changed
from vllm_fp4_plugin.kind import Kind
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pairs(
    bf16: Path, calibration: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("pairs")
    other = changed(bf16, folder / "bf16")

    def quantised(kind: str, **settings: Any) -> Pair:
        paths = folder / f"{kind}-1", folder / f"{kind}-2"
        for model, path in zip((bf16, other), paths, strict=True):
            quantize_checkpoint(model, path, **settings)
        return Pair(*paths)

    def experts() -> Pair:
        first = moe_checkpoints.save_random(
            folder / "moe", moe_checkpoints.qwen3(moe_intermediate_size=256)
        )
        models = first, changed(first, folder / "moe-changed")
        paths = []
        for number, model in enumerate(models, 1):
            (made := folder / f"experts-{number}").mkdir()
            kinds = {"experts": Kind.NVFP4_A16}
            paths.append(moe_checkpoints.write(made, model, kinds).path)
        return Pair(*paths)

    return {
        "16 bits": Pair(bf16, other),
        "weights": quantised("weights"),
        "activations": quantised("activations", calibrate=calibration, seq_len=128),
        "head of 64": _heads_of_64(folder),
        "experts": experts(),
    }


def _heads_of_64(folder: Path) -> Pair:
    """Models that our decode attention takes."""
    plain = tiny_llama.save(folder / "heads", head_dim=64)
    models = plain, changed(plain, folder / "heads-changed")
    paths = folder / "heads-1", folder / "heads-2"
    for model, path in zip(models, paths, strict=True):
        quantize_checkpoint(model, path)
    return Pair(*paths)


def engine(model: Path, **settings: Any) -> AbstractContextManager[Any]:
    """An engine in this process, compiled by vLLM, in CUDA graphs."""
    graphs = {
        "enforce_eager": False,
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": 1 << 26,  # unmeasured: other processes may come and go
        "kv_cache_dtype": "bfloat16",
    }
    return started(str(model), **(graphs | settings))


@pytest.fixture(scope="module")
def fresh() -> Callable[[Path], Run]:
    """What an engine says that was started on a checkpoint."""

    @functools.cache
    def said(model: Path) -> Run:
        with engine(model) as llm:
            answer = ask(llm)
            del llm
        return answer

    return said


@pytest.fixture(autouse=True)
def functions_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")


@contextmanager
def unmoved(llm: Any) -> Iterator[None]:
    before = llm.collective_rpc(addresses)
    yield
    assert llm.collective_rpc(addresses) == before


KINDS = pytest.mark.parametrize(
    "kind", ["16 bits", "weights", "activations", "head of 64", "experts"]
)


@KINDS
def test_reload_and_sleep(kind: str, pairs: dict[str, Pair], fresh: Callable[[Path], Run]) -> None:
    """Other weights and back, each level of sleep, and other weights once awake."""
    pair = pairs[kind]
    first, second = fresh(pair.first), fresh(pair.second)
    assert first != second
    with engine(pair.first, enable_sleep_mode=True) as llm:
        assert ask(llm) == first
        with unmoved(llm):
            _reload(llm, pair.second)
            assert ask(llm) == second
            _reload(llm, pair.first)
            assert ask(llm) == first
            llm.sleep(1)
            llm.wake_up()
            assert ask(llm) == first
            for path, expected in ((pair.first, first), (pair.second, second)):
                llm.sleep(2)
                llm.wake_up(tags=["weights"])
                _reload(llm, path)
                llm.wake_up(tags=["kv_cache"])
                assert ask(llm) == expected
        del llm


def _reload(llm: Any, path: Path) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
