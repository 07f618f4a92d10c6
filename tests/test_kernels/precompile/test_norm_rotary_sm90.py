"""Norm and rotary kernels compiled ahead for sm_90: exactly the kernels that the ops launch."""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_kernels.norm.call import AddRmsNormCall
from nvfp4_kernels.precompile.norm_rotary_sm90 import norm_rotary_kernels
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
    "half turned, newer file": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, {}),
    "wide heads": ({"head_dim": 256}, {}),
}
TOKENS = (1, 2, 7, 64, 511, 512, 513, 2048)


@pytest.fixture(autouse=True)
def emulator() -> Iterator[None]:
    """Emulate a GPU: kernels are named by classes, whose import binds CuTe DSL to a runtime."""
    devices.cutlass_or_skip()
    with devices.emulated(EAGER, "sm_90"):
        yield


@pytest.mark.parametrize("name", MODELS)
def test_what_is_built_is_what_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    changed, options = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | changed))
    model = read_model(tmp_path, **options)
    attention = model.attention
    assert attention is not None
    launched: set[DeviceKernel] = set()
    norm, rotary = (import_module(f"nvfp4_kernels.{room}.sm90") for room in ("norm", "rotary"))
    for module in (norm, rotary):
        monkeypatch.setattr(module, "launch", lambda kernel, *_: launched.add(kernel))
    factor = changed.get("partial_rotary_factor") or changed.get("rope_parameters", {}).get(
        "partial_rotary_factor", 1.0
    )
    dtype = getattr(torch, model.dtype)
    table = torch.zeros(1, int(attention.head_dim * factor), dtype=dtype)
    for tokens in TOKENS:
        x = torch.zeros(tokens, model.hidden, dtype=dtype)
        norm.add_rms_norm(AddRmsNormCall(x, x, x[0], 1e-5))
        q, k = (
            torch.zeros(tokens, heads, attention.head_dim, dtype=dtype)
            for heads in (attention.query_heads, attention.kv_heads)
        )
        rotary.rotary_embedding(torch.zeros(tokens, dtype=torch.int64), q, k, table)
    built = norm_rotary_kernels(model.hidden, attention, model.dtype)
    assert {spec.kernel() for spec in built} == launched


def test_sizes_that_the_kernels_do_not_take_have_none(tmp_path: Path) -> None:
    sizes = {"hidden_size": 24640, "num_attention_heads": 32, "head_dim": 24}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | sizes))
    model = read_model(tmp_path)
    assert model.attention is not None
    assert norm_rotary_kernels(model.hidden, model.attention, model.dtype) == {}
