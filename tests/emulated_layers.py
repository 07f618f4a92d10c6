"""Calls of a decoder layer with emulated kernels: the launches of each call, in order."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
from torch import Tensor
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

from nvfp4_kernels.runtime import compile as compiler
from nvfp4_kernels.runtime import launch_cache
from nvfp4_kernels.runtime.replay import Launch
from tests.emulator import Gpu
from tests.modelled.host import CONTENTS_CHECKED
from vllm_fp4_plugin.attention import cache

# vLLM's functions that count as one launch each on a GPU.
VLLMS = {
    "vLLM's norm": (RMSNorm, "forward_native"),
    "vLLM's linear layer": (UnquantizedLinearMethod, "apply"),
    "vLLM's choice of experts": (CPURouter, "_compute_routing"),
    "vLLM's rotation": (RotaryEmbedding, "forward"),
    "vLLM's store": (cache, "write"),
}


@dataclass
class LayerCall:
    """One call of a layer.

    Attributes:
        tokens: number of tokens in the batch.
        launches: emulated kernels and functions of vLLM, in order.
        repeated: launches that the launch cache repeated.
    """

    tokens: int
    launches: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)


@contextmanager
def watched(layer: Any) -> Iterator[list[LayerCall]]:
    """Context that lists the calls of a decoder-layer class; all kernels must run inside a call.

    The launch cache is enabled: ops do not read tensor contents, as on a GPU.
    """
    calls: list[LayerCall] = []
    within: list[LayerCall] = []  # the one that goes on
    host: list[Any] = []  # the kernel whose host function runs

    def forward(self: Any, positions: Tensor, *given: Any, **named: Any) -> Any:
        within.append(LayerCall(len(positions)))
        result = run_layer(self, positions, *given, **named)
        calls.append(within.pop())
        return result

    def compiled(kernel: Any, target: str) -> Callable[..., None]:
        start = find(kernel, target)

        def noted(*words: Any) -> None:
            host.append(kernel)
            start(*words)
            assert not host, f"{kernel} launched nothing"

        return noted

    def launch(self: Gpu, *given: Any, **named: Any) -> Any:
        within[-1].launches.append(_label(host.pop()))
        return run_kernel(self, *given, **named)

    def repeat(launch: Launch, *given: Any) -> None:
        within[-1].repeated.append(_label(launch.kernel))
        start_again(launch, *given)

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            if within:
                within[-1].launches.append(name)
            return function(*given, **named)

        return call

    run_layer, find, run_kernel = layer.forward, compiler.compiled, Gpu.launch
    start_again = Launch.start
    with pytest.MonkeyPatch.context() as patch, launch_cache.suspended(False):
        patch.setattr(Launch, "start", repeat)
        patch.setattr(layer, "forward", forward)
        patch.setattr(compiler, "compiled", compiled)
        patch.setattr(Gpu, "launch", launch)
        for name, (owner, function) in VLLMS.items():
            patch.setattr(owner, function, counted(name, getattr(owner, function)))
        for module in CONTENTS_CHECKED:
            patch.setattr(import_module(module), "reads_contents", lambda _: False)
        yield calls


def _label(kernel: Any) -> str:
    """Class name of a kernel, with the variants that the name does not express."""
    tile, variant, output = (getattr(kernel, n, None) for n in ("tile", "variant", "output"))
    parts = {type(getattr(kernel, n, None)).__name__ for n in ("source", "rows")}  # of a dispatch
    does = {
        "grouped": getattr(tile, "grouped", False),
        "gate and up": getattr(tile, "weights", 1) == 2,
        "rotates": getattr(variant, "rotation", None),
        "from logits": "TopkRoute" in parts,
        "quantises": getattr(variant, "quantized", False)
        or getattr(output, "dtype", None) == "nvfp4"
        or "MoeRows" in parts,
    }
    return ", ".join([type(kernel).__name__, *(what for what, whether in does.items() if whether)])
