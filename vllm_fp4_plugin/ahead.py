"""Products' kernels compiled while a model is loaded, rather than while it serves.

A product's kernel depends on the number of tokens. What vLLM runs before it serves meets some of
these numbers; the first request that meets another would wait for the compiler, most of a second.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.linear import RowParallelLinear

from nvfp4_kernels.compile import CACHE_VARIABLE, arch, compiled, object_path
from nvfp4_kernels.compile_apart import build_apart
from nvfp4_kernels.sm90.choose import every_config
from nvfp4_kernels.sm90.tile import Output

if TYPE_CHECKING:
    from vllm_fp4_plugin.linear import LinearPlan

MAX_JOBS = 8  # processes of some 0.7 GB each, which take seconds to start


@dataclass(frozen=True)
class Product:
    """What a layer's kernels on sm_90 depend on, but for the tokens.

    Attributes:
        n, k: rows of each weight, and elements of one.
        weights: 1, or 2 of gate and up projection.
        output: what becomes of the accumulators.
    """

    n: int
    k: int
    weights: int
    output: Output


def product_of(layer: Any, plan: "LinearPlan", dtype: torch.dtype) -> Product | None:
    """Of a layer with a weight in fragments; None of any other."""
    if plan.kernel.weight_layout != "fragments":
        return None
    added = layer.has_bias and not getattr(layer, "skip_bias_add", False)
    if isinstance(layer, RowParallelLinear):
        added = added and layer.tp_rank == 0  # which adds it for all ranks
    name: Any = str(dtype).removeprefix("torch.")
    shards = 1 if plan.gate_up else len(plan.shard_sizes)
    output = Output(act=name, dtype=name, shards=shards, bias=name if added else "")
    rows = plan.weight_rows
    return Product(rows[0], plan.k, len(rows), output)


def kernels_of(products: Iterable[Product], max_tokens: int, sms: int) -> list[Any]:
    """``WeightOnlyGemm`` in every configuration that 1 to ``max_tokens`` tokens are given."""
    from nvfp4_kernels.sm90.weight_only import WeightOnlyGemm

    chosen = [
        tile_and_output
        for each in products
        for tile_and_output in every_config(
            each.n, each.k, each.weights, each.output, max_tokens, sms
        )
    ]
    return [WeightOnlyGemm(*tile_and_output) for tile_and_output in dict.fromkeys(chosen)]


def compile_products(
    products: Iterable[Product],
    max_tokens: int,
    device: torch.device,
    rank: int = 0,
    ranks: int = 1,
) -> str:
    """Compile, and load, what ``products`` may need on a GPU.

    Args:
        products: of this process's layers.
        max_tokens: of a batch.
        device: the GPU.
        rank: of this process, among those that do the same; each begins elsewhere.
        ranks: how many these are.

    Returns:
        What was done, in a line; empty if there was nothing to compile.
    """
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    kernels = kernels_of(products, max_tokens, sms)
    places = [object_path(kernel) for kernel in kernels]
    missing = [k for k, at in zip(kernels, places, strict=True) if at is None or not at.exists()]
    started, failures, jobs = time.perf_counter(), [], _jobs(len(missing), ranks)
    if jobs > 1 and None not in places:
        first = len(missing) * rank // ranks
        failures = build_apart(missing[first:] + missing[:first], jobs)
    for kernel in kernels:
        compiled(kernel, arch())  # here, if it is not there yet
    if not missing:
        return ""
    kept = f"kept in {places[0].parent}" if places[0] else f"not kept, as {CACHE_VARIABLE} is empty"
    seconds = time.perf_counter() - started
    line = f"compiled {len(missing)} of {len(kernels)} kernels in {seconds:.1f} s; {kept}"
    return "; compiling in other processes failed: ".join([line, *failures[:1]])


def _jobs(missing: int, ranks: int) -> int:
    """Processes that compile: as many as this one's share of the processors, or enough."""
    return max(1, min(len(os.sched_getaffinity(0)) // ranks, missing // 2, MAX_JOBS))
