"""Attention's kernels, compiled once vLLM has said how it keeps keys, and before it serves."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from nvfp4_kernels.devices import device_arch
from nvfp4_kernels.precompile.attention_sm90 import decode_kernels
from nvfp4_kernels.precompile.attention_sm100 import attention_kernels
from nvfp4_kernels.precompile.model import Attention
from nvfp4_kernels.precompile.spec import KernelSpec
from vllm_fp4_plugin import ahead

if TYPE_CHECKING:
    from vllm_fp4_plugin.attention.impl import PagedAttentionImpl


def layer_kernels(
    impls: Iterable["PagedAttentionImpl"],
    dtype: torch.dtype,
    page_size: int,
    device: torch.device,
) -> list[KernelSpec]:
    """What any batch is served by; on Hopper, any that only decodes.

    Args:
        impls: of layers.
        dtype: of queries, bfloat16 or float16.
        page_size: keys of a page of their cache.
        device: the GPU.
    """
    sms = ahead.multiprocessors(device)
    found: dict[KernelSpec, list[str]] = {}
    for impl in impls:
        sizes = Attention(
            impl.num_heads,
            impl.num_kv_heads,
            impl.head_size,
            (impl.sliding_window or 0,),
            soft_cap=impl.soft_cap is not None,
            sinks=impl.sinks is not None,
        )
        name = ahead.dtype_name(dtype)
        if device_arch(device) == "sm_90":
            found |= decode_kernels(sizes, name, page_size=page_size, sms=sms)
        else:
            found |= attention_kernels(
                sizes,
                name,
                caches=("fp8" if impl.is_fp8 else "auto",),
                page_size=page_size,
                sms=sms,
            )
    return list(found)


def compile_layers(
    impls: Iterable["PagedAttentionImpl"],
    dtype: torch.dtype,
    page_size: int,
    device: torch.device,
) -> str:
    """Compile, and load, ``layer_kernels``.

    Returns:
        What was done, in a line; empty if there was nothing to compile.
    """
    return ahead.compile_kernels(layer_kernels(impls, dtype, page_size, device), "attention's")
