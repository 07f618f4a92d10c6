"""Rotary store kernels compiled ahead: exactly the kernels that the op launches."""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_kernels.precompile.rotary_store import rotary_store_kernels
from nvfp4_kernels.rotary.store.call import RotaryStoreCall
from nvfp4_kernels.runtime.compile import DeviceKernel
from nvfp4_kernels.tool.model import read_model
from tests import devices
from tests.emulator import EAGER
from tests.test_kernels.precompile.model_configs import LLAMA_8B, LLAMA_70B

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "8B": ({}, {}),
    "8B, float16": ({"dtype": "float16"}, {}),
    "70B on four GPUs": (LLAMA_70B, {"tensor_parallel": 4}),
    "a quarter turned": ({"partial_rotary_factor": 0.25}, {}),
    "norms": ({"model_type": "qwen3"}, {}),
    "neighbours": ({"model_type": "glm4"}, {}),
    "wide heads": ({"head_dim": 256}, {}),
}
TOKENS = (1, 2, 29, 30, 64, 2048)
PAGE_SIZE = 32


@pytest.fixture(autouse=True)
def emulator() -> Iterator[None]:
    """Emulate a GPU: kernels are named by classes, whose import binds CuTe DSL to a runtime."""
    devices.cutlass_or_skip()
    with devices.emulated_ops(EAGER):
        yield


def read(folder: Path, changed: dict[str, Any], **options: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(LLAMA_8B | changed))
    return read_model(folder, **options)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_built_is_what_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    changed, options = MODELS[name]
    model = read(tmp_path, changed, **options)
    attention, dtype = model.attention, getattr(torch, model.dtype)
    launched: set[DeviceKernel] = set()
    module = import_module("nvfp4_kernels.rotary.store.launch")
    monkeypatch.setattr(module, "launch", lambda kernel, *_: launched.add(kernel))
    width = attention.head_dim
    table = torch.zeros(1, int(width * changed.get("partial_rotary_factor", 1)), dtype=dtype)
    weight = torch.ones(width, dtype=dtype) if name == "norms" else None
    for tokens in TOKENS:
        for cache_dtype in (dtype, torch.float8_e4m3fn):
            heads = attention.query_heads, attention.kv_heads, attention.kv_heads
            q, k, v = torch.zeros(tokens, sum(heads), width, dtype=dtype).split(heads, 1)
            cache = torch.zeros(1, heads[1], PAGE_SIZE, 2 * width).to(cache_dtype)
            numbers = torch.zeros(tokens, dtype=torch.int64)
            scale = None if cache_dtype == dtype else torch.ones(())
            call = RotaryStoreCall(
                torch.empty(q.shape, dtype=dtype), q, k, v, numbers, table, cache, numbers, weight,
                weight, scale, scale, name != "neighbours", 1e-6 if name == "norms" else None,
            )  # fmt: skip
            module.rotary_store(call)
    built = rotary_store_kernels(
        attention, model.dtype, max_tokens=max(TOKENS), page_size=PAGE_SIZE
    )
    assert {spec.kernel() for spec in built} == launched


def test_sizes_that_the_kernels_do_not_take_have_none(tmp_path: Path) -> None:
    for changed in ({"partial_rotary_factor": 0.1875}, {"head_dim": 72}):
        model = read(tmp_path, changed)
        assert rotary_store_kernels(model.attention, model.dtype, max_tokens=8) == {}
    model = read(tmp_path, {"head_dim": 80})
    built = rotary_store_kernels(model.attention, model.dtype, max_tokens=8)
    assert [spec.fields[1].fp8 for spec in built] == [False]  # no E4M3 cache of head size 80
