"""What vLLM asks of an attention backend before it builds a layer: who serves what, and why not."""

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheLayout

from nvfp4_kernels.attention.kernels import HEAD_DIMS, PAGED_KERNELS
from nvfp4_kernels.decode_attention.kernels import DECODE_KERNELS
from nvfp4_kernels.decode_attention.kernels import HEAD_DIMS as DECODE_HEAD_DIMS
from nvfp4_kernels.devices import device_arch
from nvfp4_kernels.dispatch import Kernel, Mode, NoKernelError

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionMetadataBuilder

    from vllm_fp4_plugin.attention.impl import PagedAttentionImpl

FP8_DTYPES = ("fp8", "fp8_e4m3")
PAGE_SIZES = (16, 32, 64, 128)


def kernel(kv_cache_dtype: str) -> Kernel:
    """The kernel for this device and cache dtype; on Hopper that of decoding.

    Raises:
        NoKernelError: there is none.
    """
    table = DECODE_KERNELS if on_hopper() else PAGED_KERNELS
    return table.select(_device(), _mode(kv_cache_dtype))


def head_sizes(kv_cache_dtype: str) -> tuple[int, ...]:
    """The head sizes it takes; empty if there is no kernel."""
    served = DECODE_HEAD_DIMS if on_hopper() else HEAD_DIMS
    return served.get((device_arch(_device()), _mode(kv_cache_dtype)), ())


def on_hopper() -> bool:
    """Whether steps that only decode have a kernel of their own."""
    return device_arch(_device()) == "sm_90"


def _device() -> torch.device:
    return torch.device(current_platform.device_type)


def _mode(kv_cache_dtype: str) -> Mode:
    return "fp8_kv" if kv_cache_dtype in FP8_DTYPES else "float"


class PagedAttentionBackend(AttentionBackend):
    """Causal self-attention over vLLM's paged KV cache."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "float16", *FP8_DTYPES]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        """The name vLLM's enum has for it."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> "type[PagedAttentionImpl]":
        if on_hopper():
            from vllm_fp4_plugin.attention.hopper import HopperAttentionImpl

            return HopperAttentionImpl
        from vllm_fp4_plugin.attention.impl import PagedAttentionImpl

        return PagedAttentionImpl

    @staticmethod
    def get_builder_cls() -> "type[AttentionMetadataBuilder[Any]]":
        if on_hopper():
            from vllm_fp4_plugin.attention.hopper import HopperMetadataBuilder

            return HopperMetadataBuilder
        from vllm_fp4_plugin.attention.metadata import PagedAttentionMetadataBuilder

        return PagedAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return list(PAGE_SIZES)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(head_sizes("auto"))

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # Any strides do; a page of one head in one piece makes the fewest, largest copies.
        return (KVCacheLayout.LBHNC, *(x for x in KVCacheLayout if x != KVCacheLayout.LBHNC))

    @classmethod
    def supports_sink(cls) -> bool:
        return not on_hopper()  # FlashAttention's prefill with ours has not been tried

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def validate_configuration(cls, **configuration: Any) -> list[str]:
        """Why a layer cannot be served, in words that name what came and what is accepted."""
        reasons = super().validate_configuration(**configuration)
        explained = _explanations(configuration)
        reasons = [explained.get(reason, reason) for reason in reasons]
        return reasons + _further_reasons(configuration)


def _explanations(configuration: dict[str, Any]) -> dict[str, str]:
    """Reasons of vLLM's that do not say what came, said in full."""
    sizes, caches = (
        ", ".join(map(str, accepted))
        for accepted in (head_sizes("auto"), PagedAttentionBackend.supported_kv_cache_dtypes)
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
    """What vLLM does not check: the device, and the cache against the model."""
    cache, dtype = configuration["kv_cache_dtype"] or "auto", configuration["dtype"]
    try:
        kernel(cache)
    except NoKernelError as error:
        return [str(error)]
    reasons = []
    if on_hopper():
        from vllm_fp4_plugin.attention.hopper import PREFILL, has_flash_attention

        if not has_flash_attention():
            reasons.append(f"there is no {PREFILL} here, which prefills on sm_90")
    if cache in ("bfloat16", "float16") and dtype in PagedAttentionBackend.supported_dtypes:
        model = str(dtype).removeprefix("torch.")
        if cache != model:
            reasons.append(f"kv-cache-dtype is {cache}, must be the model's {model}, or fp8")
    size, sizes = configuration["head_size"], head_sizes(cache)
    if size not in sizes and size in head_sizes("auto"):
        accepted = ", ".join(map(str, sizes))
        reasons.append(
            f"head size is {size}, with kv-cache-dtype {cache} must be one of {accepted}"
        )
    return reasons
