"""Measured host time of a decoder layer: the cost of eager launches in Python and torch.

    python -m tests.modelled.host

A vLLM engine on CPU prefills a text, and decodes one token at a time, with the kernels of sm_100 on
a device that does nothing: ops check their arguments, allocate results and assemble launch
arguments, without a launch. A repeated call uses the launch cache
(``nvfp4_kernels.runtime.launch_cache``), or, for comparison, is checked anew each time. vLLM's
norms, rotation and store, where a layer has them, run as one C++ op each. A dense layer is Llama's;
a layer of experts is Qwen3's, with vLLM's own Python. The engines are timed in turns in one
process; times are medians, and only their ratios are meaningful.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels.runtime import launch_cache
from tests import moe_checkpoints, tiny_llama
from tests.engine import started

PROMPTS, TOKENS, TURNS = 20, 4, 3
ALONE = {"fuse_mlp": False, "fuse_norm": False, "fuse_attention": False}
# Options of the plugin, and whether every call is checked anew.
Engines = dict[str, tuple[dict[str, bool], bool]]
HANDED_OVER: Engines = {
    "handed over, checked anew": ({}, True),
    "handed over, prepared": ({}, False),
}
DENSE: Engines = {
    "each op alone, checked anew": (ALONE, True),
    "each op alone, prepared": (ALONE, False),
    **HANDED_OVER,
}
CONTENTS_CHECKED = (  # on a CPU, not on a GPU
    "nvfp4_kernels.attention.arguments",
    "nvfp4_kernels.attention.rotary_op",
    "nvfp4_kernels.rotary.store.arguments",
)


@contextmanager
def null_device() -> Iterator[None]:
    """Context in which ops on CPU tensors use the kernels of sm_100, whose launches do nothing."""
    from nvfp4_kernels.devices import standing_in
    from nvfp4_kernels.runtime import compile as compiler

    with standing_in("cpu", "sm_100"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "arch", lambda: "sm_100a")
        patch.setattr(compiler, "compiled", lambda *_: lambda *_: None)
        for module in CONTENTS_CHECKED:
            patch.setattr(import_module(module), "reads_contents", lambda _: False)
        _as_on_a_gpu(patch)
        yield


def _as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Replace operations that vLLM on CPU runs as several ops by a single C++ op each."""
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding

    from vllm_fp4_plugin.attention import cache

    ops = torch.ops._C

    def norm(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is not None:
            ops.fused_add_rms_norm(x, residual, self.weight.data, self.variance_epsilon)
            return x, residual
        out = torch.empty_like(x)
        ops.rms_norm(out, x, self.weight.data, self.variance_epsilon)
        return out

    def rotate(self: Any, positions: Tensor, query: Tensor, key: Tensor) -> Any:
        # In place, on rows side by side, as on a GPU.
        query, key = query.contiguous(), key.contiguous()
        table = self.cos_sin_cache
        ops.rotary_embedding(positions, query, key, self.head_size, table, self.is_neox_style)
        return query, key

    patch.setattr(RMSNorm, "forward_native", norm)
    patch.setattr(RMSNorm, "forward_cuda", norm)
    patch.setattr(RotaryEmbedding, "forward", rotate)
    patch.setattr(cache, "write", lambda key, value, pages, slots, *_: slots.add_(0))


def layer_times(
    model: Path, layer: Any, options: dict[str, bool], anew: bool
) -> dict[str, list[float]]:
    """Seconds of each call of a decoder-layer class, in prefill and in decode.

    ``options``: options of the plugin; ``anew``: whether every call is checked, without a cache.
    """
    from vllm import SamplingParams

    found: dict[str, list[float]] = {"decode": [], "prefill": []}
    forward = layer.forward

    def timed(self: Any, positions: Tensor, *rest: Any) -> Any:
        start = time.perf_counter()
        result = forward(self, positions, *rest)
        found["decode" if len(positions) == 1 else "prefill"].append(time.perf_counter() - start)
        return result

    arguments = {"additional_config": {"nvfp4_tc": options}, "kv_cache_dtype": "bfloat16"}
    with (
        null_device(),
        launch_cache.suspended(anew),
        started(str(model), max_num_seqs=1, **arguments) as engine,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(layer, "forward", timed)
        sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        engine.generate([tiny_llama.TEXT] * PROMPTS, sampling, use_tqdm=False)
    return found


def measured(source: Path, layer: Any, engines: Engines) -> dict[str, dict[str, float]]:
    """Median microseconds per layer of a 16-bit checkpoint, for each engine and step."""
    from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

    text, model = source.parent / "text", source.parent / "nvfp4"
    text.write_text(tiny_llama.TEXT * 20)
    quantize_checkpoint(source, model, calibrate=text, seq_len=64)
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(TURNS):
        for name, engine in engines.items():
            for step, times in layer_times(model, layer, *engine).items():
                found.setdefault(step, {}).setdefault(name, []).extend(times)
    return {
        step: {name: statistics.median(times) * 1e6 for name, times in of_step.items()}
        for step, of_step in found.items()
    }


def main() -> None:
    """Print a line for each step of each engine, with its share of the first engine's time."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # this process is patched
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm.model_executor.models.llama import LlamaDecoderLayer
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeDecoderLayer

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        dense = tiny_llama.save(directory / "dense" / "bf16", head_dim=64)
        experts = moe_checkpoints.save_random(
            directory / "experts" / "bf16", moe_checkpoints.qwen3(head_dim=64)
        )
        found = {
            "dense": measured(dense, LlamaDecoderLayer, DENSE),
            "experts": measured(experts, Qwen3MoeDecoderLayer, HANDED_OVER),
        }
    for kind, steps in found.items():
        for step, times in steps.items():
            [first, *_] = times.values()
            for name, us in times.items():
                part = f"{us / first:.2f} of the first"
                print(f"{kind}, {step}, {name}: {us:.0f} µs of host time a layer, {part}")


if __name__ == "__main__":
    main()
