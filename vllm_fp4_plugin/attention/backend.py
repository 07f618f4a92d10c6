"""Backend class, which vLLM asks whether a layer is supported before it builds the layer."""

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheLayout

from nvfp4_kernels.devices import dtype_name
from nvfp4_kernels.dispatch import NoKernelError
from vllm_fp4_plugin.attention.cache import FP8_DTYPES
from vllm_fp4_plugin.attention.capability import PAGE_SIZES, implementation
from vllm_fp4_plugin.attention.impl import PagedAttentionImpl


class PagedAttentionBackend(AttentionBackend):
    """Causal self-attention over vLLM's paged KV cache."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "float16", *FP8_DTYPES]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """Name of the backend in vLLM's enum."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[PagedAttentionImpl]:
        return implementation().impl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        return implementation().builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return list(PAGE_SIZES)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(implementation().head_sizes("auto"))

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # Any strides work; a page contiguous per head gives the fewest, largest copies.
        return (KVCacheLayout.LBHNC, *(x for x in KVCacheLayout if x != KVCacheLayout.LBHNC))

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return implementation().batch_invariant

    @classmethod
    def supports_sink(cls) -> bool:
        return implementation().sinks

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def validate_configuration(cls, **configuration: Any) -> list[str]:
        """Reasons why a layer cannot be served; empty if it can.

        vLLM's messages about head size, dtypes and block size name no values; the replacements name
        the rejected and the accepted values.
        """
        reasons = super().validate_configuration(**configuration)
        explained = _explanations(configuration)
        reasons = [explained.get(reason, reason) for reason in reasons]
        return reasons + _further_reasons(configuration)


def _explanations(configuration: dict[str, Any]) -> dict[str, str]:
    """Replacements for vLLM's messages that do not name the rejected value, by vLLM's message."""
    sizes, caches = (
        ", ".join(map(str, accepted))
        for accepted in (
            implementation().head_sizes("auto"),
            PagedAttentionBackend.supported_kv_cache_dtypes,
        )
    )
    given = configuration.get
    return {
        "head_size not supported": f"head size is {given('head_size')}, must be one of {sizes}",
        "dtype not supported": f"dtype is {given('dtype')}, must be bfloat16 or float16",
        "kv_cache_dtype not supported": (
            f"kv-cache-dtype is {given('kv_cache_dtype')}, must be one of {caches}"
        ),
        "block_size not supported": (
            f"block-size is {given('block_size')}, must be a multiple of {min(PAGE_SIZES)}"
        ),
    }


def _further_reasons(configuration: dict[str, Any]) -> list[str]:
    """Reasons that vLLM does not check.

    The device has no kernel, or the installation cannot run the implementation; the KV cache is
    16-bit in a dtype other than the model's, or its dtype does not allow the head size.
    """
    cache, dtype = configuration["kv_cache_dtype"] or "auto", configuration["dtype"]
    ours = implementation()
    try:
        ours.kernel(cache)
    except NoKernelError as error:
        return [str(error)]
    reasons = list(filter(None, [ours.unsupported_reason()]))
    if cache in ("bfloat16", "float16") and dtype in PagedAttentionBackend.supported_dtypes:
        model = dtype_name(dtype)
        if cache != model:
            reasons.append(f"kv-cache-dtype is {cache}, must be the model's {model}, or fp8")
    size, sizes = configuration["head_size"], ours.head_sizes(cache)
    if size not in sizes and size in ours.head_sizes("auto"):
        accepted = ", ".join(map(str, sizes))
        reasons.append(
            f"head size is {size}, with kv-cache-dtype {cache} must be one of {accepted}"
        )
    return reasons
