"""Warmup: kernels compiled while a server starts, rather than while it serves.

Which kernel runs depends on the batch: for products on its tokens, for attention on its keys too.
What vLLM runs before it serves meets some batches; the first request that makes another kind would
wait for the compiler, a second or more.
"""

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)

from nvfp4_kernels.devices import multiprocessors
from nvfp4_kernels.precompile.experts import experts_kernels
from nvfp4_kernels.precompile.experts_layer import Experts
from nvfp4_kernels.precompile.linear_sm90 import weight_only_kernels
from nvfp4_kernels.precompile.linear_sm100 import block_scaled_kernels
from nvfp4_kernels.precompile.model import Dtype, Layer, Model
from nvfp4_kernels.precompile.norm_sm100 import norm_kernels
from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.runtime.compile import arch, compiled, object_path
from nvfp4_kernels.runtime.compile_workers import build_apart
from nvfp4_kernels.settings import CACHE_VARIABLE
from vllm_fp4_plugin.options import Activation

MAX_JOBS = 8  # processes of some 0.7 GB each, which take seconds to start

Specs = dict[KernelSpec, list[str]]


@dataclass(frozen=True)
class Product:
    """All that a linear layer's kernels depend on, but for the tokens.

    Attributes:
        family: architecture family of the kernel that was chosen, ``Kernel.arch``.
        layer: sizes of the layer.
        dtype: dtype of its input and result.
        activation: how the input is quantised.
        terms: how many NVFP4 values add up to each of the input's.
        batch_invariant: whether a token's result depends on no other, ``Kernel.batch_invariant``.
    """

    family: str
    layer: Layer
    dtype: Dtype
    activation: Activation
    terms: int = 1
    batch_invariant: bool = False

    @property
    def model(self) -> Model:
        """The layer alone, as ``nvfp4_kernels.precompile`` takes layers."""
        return Model("", self.dtype, (self.layer,))


@dataclass(frozen=True)
class ExpertsLayer:
    """A layer of experts that kernels of ours serve.

    Attributes:
        family: as of a ``Product``.
        experts: all that its kernels depend on, but for the tokens.
    """

    family: str
    experts: Experts


@dataclass(frozen=True)
class Norm:
    """A norm that quantises for a linear layer.

    Attributes:
        dtype: of its input.
        weight_dtype: of its weight.
        k: elements of a token.
        per_token: whether each token gets a scale of its own.
        terms: how many NVFP4 values add up to each of its result's.
        batch_invariant: as of a ``Product``.
    """

    dtype: Dtype
    weight_dtype: str
    k: int
    per_token: bool
    terms: int
    batch_invariant: bool = False


def _weight_only(product: Product, max_tokens: int, sms: int) -> Specs:
    return weight_only_kernels(
        product.model,
        max_tokens=max_tokens,
        batch_invariant=product.batch_invariant,
        sms=sms,
    )


def _block_scaled(product: Product, max_tokens: int, sms: int) -> Specs:
    assert product.activation != "16-bit"  # there is no such kernel
    return block_scaled_kernels(
        product.model,
        max_tokens=max_tokens,
        activations=(product.activation,),
        terms=product.terms,
        batch_invariant=product.batch_invariant,
        sms=sms,
    )


Served = Product | ExpertsLayer | Norm
_BY_FAMILY: dict[str, Callable[[Product, int, int], Specs]] = {
    "sm_90": _weight_only,
    "sm_100": _block_scaled,
}


def product_kernels(products: Iterable[Served], max_tokens: int, sms: int) -> list[KernelSpec]:
    """Kernels that 1 to ``max_tokens`` tokens are served by, those of quantising included.

    Args:
        products: products of layers that a GPU's kernels serve.
        max_tokens: tokens of a batch at most.
        sms: SMs of the GPU.
    """
    found: Specs = {}
    for each in products:
        if isinstance(each, ExpertsLayer):
            found |= experts_kernels(each.experts, each.family, max_tokens=max_tokens, sms=sms)
        elif isinstance(each, Norm):  # sm_100 alone has them
            found |= norm_kernels(
                each.dtype, each.weight_dtype, each.k, max_tokens=max_tokens,
                per_token=each.per_token, terms=each.terms,
                batch_invariant=each.batch_invariant, sms=sms,
            )  # fmt: skip
        else:
            found |= _BY_FAMILY[each.family](each, max_tokens, sms)
    return list(found)


def compile_products(products: Iterable[Served], max_tokens: int, device: torch.device) -> str:
    """Compile, and load, what ``products`` may need on a GPU.

    Args:
        products: products of this process's layers.
        max_tokens: tokens of a batch at most.
        device: the GPU.

    Returns:
        What was done, in a line; empty if there was nothing to compile.
    """
    specs = product_kernels(products, max_tokens, multiprocessors(device))
    return compile_kernels(specs, "linear layers'")


def compile_kernels(specs: Iterable[KernelSpec], whose: str) -> str:
    """Compile, and load, kernels; tensor-parallel ranks do the same, and each begins elsewhere.

    Args:
        specs: kernels for the current device.
        whose: whose they are, for the line, e.g. ``"attention's"``.

    Returns:
        What was done, in a line; empty if there was nothing to compile.
    """
    kernels = [spec.kernel() for spec in specs]
    if not kernels:
        return ""
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
    """Number of processes that compile: this one's share of the processors, or fewer if enough."""
    return max(1, min(len(os.sched_getaffinity(0)) // ranks, missing // 2, MAX_JOBS))


def is_wanted(device: torch.device) -> bool:
    """Whether kernels for ``device`` are compiled at all: not for a CPU, which has references."""
    return device.type == "cuda"
