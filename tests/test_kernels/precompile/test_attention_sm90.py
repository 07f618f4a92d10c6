"""Attention kernels compiled ahead for sm_90: exactly the kernels that the op launches."""

import json
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from nvfp4_kernels.attention.decode.call import DecodeCall
from nvfp4_kernels.attention.decode.kernels import MAX_GROUP
from nvfp4_kernels.precompile.attention_sm90 import decode_kernels
from nvfp4_kernels.precompile.model import Attention, Model
from nvfp4_kernels.runtime.compile import DeviceKernel
from nvfp4_kernels.tool.model import read_model
from tests import devices
from tests.emulator import EAGER
from tests.test_kernels.few_sms import use_sms
from tests.test_kernels.precompile.model_configs import LLAMA_8B, LLAMA_70B

GEMMA = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
}
SLIDING = ["sliding_attention"]
# Changes to the config, and options of read_model.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "8B": ({}, {}),
    "8B, float16": ({"dtype": "float16"}, {}),
    "70B on four GPUs": (LLAMA_70B, {"tensor_parallel": 4}),
    "70B on eight GPUs": (LLAMA_70B, {"tensor_parallel": 8}),
    "window on some layers, cap": (GEMMA, {}),
    "window on all layers": ({"sliding_window": 4096, "layer_types": SLIDING}, {}),
    "window of less than all splits": ({"sliding_window": 130, "layer_types": SLIDING}, {}),
}
SEQUENCES = (*range(1, 18), 32, 33, 34, 66, 67, 128, 132, 133, 264, 265, 300)
KEYS = (16, 64, 65, 128, 129, 256, 257, 512, 4096, 1 << 17)
# Splits, and keys per step, for 132 multiprocessors.
SHAPES = {
    "8B": [(1, 16), (1, 32), (2, 32), (4, 32), (8, 32)],
    "window of less than all splits": [(1, 16), (1, 32), (2, 32)],
    "window on some layers, cap": [(1, 16), (2, 16), (4, 16), (8, 16)] * 2,
}


@pytest.fixture(autouse=True)
def emulator() -> Iterator[None]:
    """Emulate a GPU: kernels are named by classes, whose import binds CuTe DSL to a runtime."""
    devices.cutlass_or_skip()
    with devices.emulated(EAGER, "sm_90"):
        yield


def model_of(folder: Path, name: str) -> Model:
    changed, options = MODELS[name]
    (folder / "config.json").write_text(json.dumps(LLAMA_8B | changed))
    return read_model(folder, **options)


def launched(
    monkeypatch: pytest.MonkeyPatch, model: Model, page_size: int, sms: int, fp8: bool
) -> set[DeviceKernel]:
    """Record the kernels that all batches launch, with block tables of all lengths."""
    attention = model.attention
    assert attention is not None
    sm90 = import_module("nvfp4_kernels.attention.decode.sm90.launch")
    kernels: set[DeviceKernel] = set()
    monkeypatch.setattr(sm90, "launch", lambda kernel, *_: kernels.add(kernel))
    use_sms(sm90, sms, monkeypatch)
    dtype = getattr(torch, model.dtype)
    heads, head_dim = attention.kv_heads, attention.head_dim
    queries = torch.zeros(max(SEQUENCES), attention.query_heads, head_dim, dtype=dtype)
    rows = queries[:, :heads]
    stored = torch.float8_e4m3fn if fp8 else dtype
    cache = torch.zeros(1, heads, page_size, 2 * head_dim, dtype=stored)
    scales = (torch.tensor(1.0),) * 2 if fp8 else (None, None)
    lengths = torch.ones(max(SEQUENCES), dtype=torch.int32)
    cap = 50.0 if attention.soft_cap else None
    for window, batch, most in product(attention.windows, SEQUENCES, KEYS):
        q, key, seq_lens = queries[:batch], rows[:batch], lengths[:batch]
        table = torch.zeros(1, -(-most // page_size), dtype=torch.int32).expand(batch, -1)
        tensors = q, q, key, key, cache, table, seq_lens, seq_lens.long()
        sm90.decode_attention(DecodeCall(*tensors, None, *scales, 1.0, window or None, cap))
    return kernels


@pytest.mark.parametrize("sms", [1, 78, 132])
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fp8", [False, True], ids=["", "E4M3"])
def test_what_is_built_is_what_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, page_size: int, sms: int, fp8: bool
) -> None:
    model = model_of(tmp_path, name)
    assert model.attention is not None
    built = decode_kernels(model.attention, model.dtype, page_size=page_size, fp8=fp8, sms=sms)
    assert {s.kernel() for s in built} == launched(monkeypatch, model, page_size, sms, fp8)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(tmp_path: Path, name: str) -> None:
    model = model_of(tmp_path, name)
    assert model.attention is not None
    built = decode_kernels(model.attention, model.dtype)
    tiles = [spec.fields[0] for spec in built]
    assert sorted((tile.splits, tile.keys) for tile in tiles) == sorted(SHAPES[name])


def test_pages_are_compiled_in() -> None:
    few, many = (
        decode_kernels(Attention(32, 8, 128), "bfloat16", page_size=size) for size in (16, 64)
    )
    assert {spec.fields[1].page_size for spec in few} == {16}
    assert {spec.fields[1].page_size for spec in many} == {64}
    assert {spec.fields[0] for spec in few} == {spec.fields[0] for spec in many}


@pytest.mark.parametrize(
    "attention",
    [Attention(8, 2, 80), Attention(8, 2, 512), Attention(2 * MAX_GROUP + 2, 2, 128)],
    ids=["D = 80", "D = 512", "group of 17"],
)
def test_attention_that_the_kernel_does_not_take_has_none(attention: Attention) -> None:
    assert decode_kernels(attention, "bfloat16") == {}


def test_the_largest_group_has_kernels() -> None:
    assert decode_kernels(Attention(2 * MAX_GROUP, 2, 128), "bfloat16")
