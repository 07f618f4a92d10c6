"""Warmup: compile kernels at startup, rather than during a request.

The choice of a kernel depends on the batch: for GEMMs on the number of tokens, for attention also
on the number of keys. vLLM's own warmup runs cover some batches; the first request in a batch of
another size would wait a second or more for the compiler.
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

from nvfp4_kernels.devices import device_facts
from nvfp4_kernels.precompile.experts import experts_kernels
from nvfp4_kernels.precompile.experts_layer import Experts
from nvfp4_kernels.precompile.fp8_rows_sm90 import norm_kernels as fp8_norm_kernels
from nvfp4_kernels.precompile.linear_sm90 import fp8_kernels, weight_only_kernels
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
    """Key of a linear layer's kernels: everything they depend on, except the number of tokens.

    Attributes:
        family: architecture family of the selected GEMM kernel, ``Kernel.arch``.
        layer: sizes of the layer.
        dtype: dtype of input and result.
        activation: quantization of the input.
        terms: number of NVFP4 values whose sum represents each input element.
        batch_invariant: see ``Kernel.batch_invariant``.
        fp8: whether the input, if quantised, is E4M3 instead of NVFP4.
    """

    family: str
    layer: Layer
    dtype: Dtype
    activation: Activation
    terms: int = 1
    batch_invariant: bool = False
    fp8: bool = False

    @property
    def model(self) -> Model:
        """Model of this layer alone, as ``nvfp4_kernels.precompile`` takes."""
        return Model("", self.dtype, (self.layer,))


@dataclass(frozen=True)
class ExpertsLayer:
    """Key of the kernels of a layer of experts that our kernels serve.

    Attributes:
        family: see ``Product``.
        experts: everything that the kernels depend on, except the number of tokens.
    """

    family: str
    experts: Experts


@dataclass(frozen=True)
class Norm:
    """Key of the kernels of a norm that quantises for a linear layer.

    Attributes:
        dtype: dtype of the input.
        weight_dtype: dtype of the weight.
        k: elements per token.
        per_token: whether each token gets its own scale.
        terms: number of NVFP4 values whose sum represents each element of the result.
        batch_invariant: see ``Product``.
        fp8: see ``Product``.
    """

    dtype: Dtype
    weight_dtype: str
    k: int
    per_token: bool
    terms: int
    batch_invariant: bool = False
    fp8: bool = False


def _sm90(product: Product, max_tokens: int, sms: int) -> Specs:
    if product.fp8:
        return fp8_kernels(
            product.model,
            max_tokens=max_tokens,
            per_token=product.activation == "per-token",
            batch_invariant=product.batch_invariant,
            sms=sms,
        )
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
    "sm_90": _sm90,
    "sm_100": _block_scaled,
}


def product_kernels(products: Iterable[Served], max_tokens: int, sms: int) -> list[KernelSpec]:
    """Kernels that serve batches of 1 to ``max_tokens`` tokens, quantization kernels included.

    Args:
        products: keys of the layers' kernels.
        max_tokens: largest number of tokens of a batch.
        sms: number of SMs of the GPU.
    """
    found: Specs = {}
    for each in products:
        if isinstance(each, ExpertsLayer):
            found |= experts_kernels(each.experts, each.family, max_tokens=max_tokens, sms=sms)
        elif isinstance(each, Norm) and each.fp8:  # on sm_90 only
            sizes = each.dtype, each.weight_dtype, each.k, each.per_token
            found |= {spec: ["norms"] for spec in fp8_norm_kernels(*sizes)}
        elif isinstance(each, Norm):  # on sm_100 only
            found |= norm_kernels(
                each.dtype, each.weight_dtype, each.k, max_tokens=max_tokens,
                per_token=each.per_token, terms=each.terms,
                batch_invariant=each.batch_invariant, sms=sms,
            )  # fmt: skip
        else:
            found |= _BY_FAMILY[each.family](each, max_tokens, sms)
    return list(found)


def compile_products(products: Iterable[Served], max_tokens: int, device: torch.device) -> str:
    """Compile and load the kernels that ``products`` may need on a GPU.

    Args:
        products: keys of the kernels of this process's layers.
        max_tokens: largest number of tokens of a batch.
        device: the GPU.

    Returns:
        One-line summary of the work; empty if there was nothing to compile.
    """
    specs = product_kernels(products, max_tokens, device_facts(device).sms)
    return compile_kernels(specs, "linear layers'")


def compile_kernels(specs: Iterable[KernelSpec], whose: str) -> str:
    """Compile and load kernels; tensor-parallel ranks start at different places of the list.

    Args:
        specs: kernels for the current device.
        whose: owner of the kernels, for the summary, e.g. ``"attention's"``.

    Returns:
        One-line summary of the work; empty if there was nothing to compile.
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
        compiled(kernel, arch())  # compiled here if still missing
    if not missing:
        return ""
    kept = f"kept in {places[0].parent}" if places[0] else f"not kept, as {CACHE_VARIABLE} is empty"
    seconds, count = time.perf_counter() - started, f"{len(missing)} of {len(kernels)}"
    line = f"compiled {count} {whose} kernels in {seconds:.1f} s; {kept}"
    return "; compiling in other processes failed: ".join([line, *failures[:1]])


def _jobs(missing: int, ranks: int) -> int:
    """Number of compiler processes, at least 1: this rank's share of the CPUs.

    At most ``MAX_JOBS``, and half the number of ``missing`` kernels.
    """
    return max(1, min(len(os.sched_getaffinity(0)) // ranks, missing // 2, MAX_JOBS))


def is_wanted(device: torch.device) -> bool:
    """Whether to compile kernels for ``device``: False for a CPU, which uses references."""
    return device.type == "cuda"
