"""Compilation of attention kernels, once vLLM has fixed the KV cache's page size."""

from collections.abc import Iterable
from typing import Protocol

import torch

from nvfp4_kernels.devices import device_facts
from nvfp4_kernels.precompile.spec import KernelSpec
from vllm_fp4_plugin import warmup


class AttentionLayer(Protocol):
    """Protocol of a layer's attention that can list the kernels it needs."""

    def kernels(self, dtype: torch.dtype, page_size: int, sms: int) -> Iterable[KernelSpec]:
        """Kernels that together serve any batch.

        Args:
            dtype: dtype of queries, bfloat16 or float16.
            page_size: keys per page of the cache.
            sms: number of SMs of the GPU.
        """


def layer_kernels(
    layers: Iterable[AttentionLayer],
    dtype: torch.dtype,
    page_size: int,
    device: torch.device,
) -> list[KernelSpec]:
    """Distinct kernels that ``layers`` need on ``device``; see ``AttentionLayer.kernels``."""
    sms = device_facts(device).sms
    specs = (spec for layer in layers for spec in layer.kernels(dtype, page_size, sms))
    return list(dict.fromkeys(specs))


def compile_layers(
    layers: Iterable[AttentionLayer],
    dtype: torch.dtype,
    page_size: int,
    device: torch.device,
) -> str:
    """Compile and load the kernels that ``layer_kernels`` lists.

    Returns:
        One-line summary of the work; empty if there was nothing to compile.
    """
    return warmup.compile_kernels(layer_kernels(layers, dtype, page_size, device), "attention's")
