"""Attention kernels compiled while a server starts include every kernel that layers launch."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import devices
from tests.emulator import EAGER
from tests.test_plugin.attention.attention_layer import CONFIG, CPU, Layer, Model, Sequence
from vllm_fp4_plugin import warmup
from vllm_fp4_plugin.attention import metadata
from vllm_fp4_plugin.attention.warmup import layer_kernels

SMALL = Model(head_dim=64)
CASES = {
    "plain": SMALL,
    "many heads, of 128": Model(heads=32, kv_heads=8, head_dim=128),
    "window": Model(head_dim=64, window=9),
    "soft cap, pages of 32": Model(head_dim=64, soft_cap=0.7, page_size=32),
}
ON_BLACKWELL = CASES | {
    "sinks": Model(head_dim=64, sinks=True),
    "sinks, FP8, window": Model(head_dim=64, sinks=True, cache_dtype="fp8", window=40),
    "FP8": Model(head_dim=128, cache_dtype="fp8"),
}
LAUNCHERS = {
    "sm_90": ["nvfp4_kernels.attention.decode.sm90.launch"],
    "sm_100": ["nvfp4_kernels.attention.sm100.launch", "nvfp4_kernels.attention.merge.sm100"],
}


def served(arch: str, model: Model, monkeypatch: pytest.MonkeyPatch) -> tuple[set[Any], set[Any]]:
    """Kernels compiled for a layer, and kernels that a prefill and decodes launch."""
    launched: set[Any] = set()
    with devices.emulated_ops(EAGER, arch):
        for module in map(import_module, LAUNCHERS[arch]):
            monkeypatch.setattr(module, "launch", lambda kernel, *_: launched.add(kernel))
        if arch == "sm_90":
            hopper = import_module("vllm_fp4_plugin.attention.hopper")
            monkeypatch.setattr(hopper.HopperAttentionImpl, "_flash_attention", lambda *_: None)
        layer = Layer(model)
        a, b = Sequence(), Sequence()
        for batch in ([(a, 90)], [(a, 1)], [(b, 3)], [(a, 1), (b, 1)]):
            layer.step(batch)
        made = layer_kernels([layer.impl], torch.bfloat16, model.page_size, CPU)
        return {spec.kernel() for spec in made}, launched


@pytest.mark.parametrize(
    "model", [*CASES.values(), *ON_BLACKWELL.values()], ids=[*CASES, *ON_BLACKWELL]
)
def test_on_blackwell(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()
    made, launched = served("sm_100", model, monkeypatch)
    assert len(launched) > 1
    assert launched <= made


@pytest.mark.parametrize("model", CASES.values(), ids=CASES)
def test_on_hopper(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()
    made, launched = served("sm_90", model, monkeypatch)
    assert launched
    assert launched <= made


@pytest.mark.parametrize("rank", [0, 1])
def test_the_builder_compiles_for_its_layers(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    said: list[str] = []
    monkeypatch.setattr(warmup, "is_wanted", lambda device: device == torch.device("cuda", 1))
    monkeypatch.setattr(metadata, "compile_layers", lambda *given: told.append(given) or "done")
    monkeypatch.setattr(metadata, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(metadata.logger, "info", lambda _, *words: said.append(words[-1]))
    layers = {name: SimpleNamespace(impl=f"impl of {name}") for name in "abc"}
    config = SimpleNamespace(**vars(CONFIG))
    config.compilation_config = SimpleNamespace(static_forward_context=layers)
    spec = SimpleNamespace(head_size=64, head_size_v=64, block_size=32)
    for device in (CPU, torch.device("cuda", 1)):
        metadata.PagedAttentionMetadataBuilder(spec, ["a", "c"], config, device)
    impls = ["impl of a", "impl of c"]
    assert told == [(impls, torch.bfloat16, 32, torch.device("cuda", 1))]
    assert said == (["done"] if rank == 0 else [])
