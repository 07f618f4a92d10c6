"""Kernels compiled while a server starts, rather than while it serves.

Which kernel runs depends on the batch: for products on its tokens, for attention on its keys too.
What vLLM runs before it serves meets some batches; the first request that makes another kind would
wait for the compiler, a second or more.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.layers.linear import RowParallelLinear

from nvfp4_kernels.compile import CACHE_VARIABLE, arch, compiled, object_path
from nvfp4_kernels.compile_workers import build_apart
from nvfp4_kernels.precompile.linear_sm90 import weight_only_kernels
from nvfp4_kernels.precompile.linear_sm100 import block_scaled_kernels
from nvfp4_kernels.precompile.model import Dtype, Layer, Model
from nvfp4_kernels.precompile.spec import KernelSpec
from vllm_fp4_plugin.linear_op import Activation

if TYPE_CHECKING:
    from vllm_fp4_plugin.linear import LinearPlan

MAX_JOBS = 8  # processes of some 0.7 GB each, which take seconds to start


@dataclass(frozen=True)
class Product:
    """What a linear layer's kernels depend on, but for the tokens.

    Attributes:
        layer: its sizes.
        dtype: of its input and result.
        activation: how the input is quantised.
    """

    layer: Layer
    dtype: Dtype
    activation: Activation


def product_of(layer: Any, plan: "LinearPlan", dtype: torch.dtype) -> Product | None:
    """Of a layer that a GPU's kernel serves; None of any other."""
    if plan.kernel.arch == "cpu":
        return None
    added = layer.has_bias and not getattr(layer, "skip_bias_add", False)
    if isinstance(layer, RowParallelLinear):
        added = added and layer.tp_rank == 0  # which adds it for all ranks
    sizes = Layer(
        "",  # layers of a size share kernels
        plan.weight_rows[0],
        plan.k,
        pair=plan.gate_up,
        shards=1 if plan.gate_up else len(plan.shard_sizes),
        bias=added,
    )
    return Product(sizes, dtype_name(dtype), plan.activation)


def product_kernels(products: Iterable[Product], max_tokens: int, sms: int) -> list[KernelSpec]:
    """What 1 to ``max_tokens`` tokens are served by, those that quantise them included."""
    found: dict[KernelSpec, list[str]] = {}
    for each in products:
        model = Model("", each.dtype, (each.layer,))
        if each.activation == "16-bit":
            found |= weight_only_kernels(model, max_tokens=max_tokens, sms=sms)
        else:
            found |= block_scaled_kernels(
                model, max_tokens=max_tokens, activations=(each.activation,), sms=sms
            )
    return list(found)


def compile_products(products: Iterable[Product], max_tokens: int, device: torch.device) -> str:
    """Compile, and load, what ``products`` may need on a GPU.

    Args:
        products: of this process's layers.
        max_tokens: of a batch.
        device: the GPU.

    Returns:
        What was done, in a line; empty if there was nothing to compile.
    """
    specs = product_kernels(products, max_tokens, multiprocessors(device))
    return compile_kernels(specs, "linear layers'")


def compile_kernels(specs: Iterable[KernelSpec], whose: str) -> str:
    """Compile, and load, kernels; tensor-parallel ranks do the same, and each begins elsewhere.

    Args:
        specs: of the current device.
        whose: for the line, e.g. ``"attention's"``.

    Returns:
        What was done, in a line; empty if there was nothing to compile.
    """
    kernels = [spec.kernel() for spec in specs]
    places = [object_path(kernel) for kernel in kernels]
    missing = [k for k, at in zip(kernels, places, strict=True) if at is None or not at.exists()]
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    started, failures, jobs = time.perf_counter(), [], _jobs(len(missing), ranks)
    if jobs > 1 and None not in places:
        first = len(missing) * rank // ranks
        failures = build_apart(missing[first:] + missing[:first], jobs)
    for kernel in kernels:
        compiled(kernel, arch())  # here, if it is not there yet
    if not missing:
        return ""
    kept = f"kept in {places[0].parent}" if places[0] else f"not kept, as {CACHE_VARIABLE} is empty"
    seconds, count = time.perf_counter() - started, f"{len(missing)} of {len(kernels)}"
    line = f"compiled {count} {whose} kernels in {seconds:.1f} s; {kept}"
    return "; compiling in other processes failed: ".join([line, *failures[:1]])


def _jobs(missing: int, ranks: int) -> int:
    """Processes that compile: as many as this one's share of the processors, or enough."""
    return max(1, min(len(os.sched_getaffinity(0)) // ranks, missing // 2, MAX_JOBS))


def is_wanted(device: torch.device) -> bool:
    """Whether there is anything to compile for it."""
    return device.type == "cuda"


def multiprocessors(device: torch.device) -> int:
    """Of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def dtype_name(dtype: torch.dtype) -> Dtype:
    """Of bfloat16 or float16, as kernels have it."""
    return "bfloat16" if dtype == torch.bfloat16 else "float16"
