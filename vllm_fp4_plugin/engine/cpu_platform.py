"""vLLM's CPU platform, with ``--attention-backend CUSTOM`` and a worker that sizes the KV cache."""

import inspect
import sys
from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_fp4_plugin.attention.errors import UnsupportedAttention

FITTING_WORKER = "vllm_fp4_plugin.engine.cpu_worker.FittingCpuWorker"


class Nvfp4CpuPlatform(CpuPlatform):
    """CPU platform that honours ``--attention-backend CUSTOM`` and selects ``FittingCpuWorker``."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Select ``FittingCpuWorker``, unless the user set a worker class or a size of the cache.

        See ``is_size_given``.
        """
        parallel = vllm_config.parallel_config
        is_default = parallel.worker_cls == "auto"
        cache, planned = vllm_config.cache_config, not _is_for_this_device()
        prefix_caching = cache.enable_prefix_caching
        super().check_and_update_config(vllm_config)
        if planned:
            cache.enable_prefix_caching = prefix_caching
        if is_default and not is_size_given(vllm_config.cache_config):
            parallel.worker_cls = FITTING_WORKER

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum,
        attn_selector_config: Any,
        num_heads: int | None = None,
    ) -> str:
        """Path of the backend class for a layer.

        Raises:
            UnsupportedAttention: CUSTOM is requested, and is not registered or cannot serve the
                layer.
            ValueError: this CPU has no attention with the dtype of the KV cache, and the layer is
                built for this CPU.
        """
        if selected_backend != AttentionBackendEnum.CUSTOM:
            return super().get_attn_backend_cls(
                selected_backend, _for_any_cache(attn_selector_config), num_heads
            )
        if not selected_backend.is_overridden():
            raise UnsupportedAttention(
                "attention-backend: is CUSTOM, but no backend is registered under that name; "
                "leave the option out to use CPU_ATTN"
            )
        reasons = selected_backend.get_class().validate_configuration(
            device_capability=None, **attn_selector_config._asdict()
        )
        if reasons:
            raise UnsupportedAttention(
                f"attention-backend: is CUSTOM, which cannot serve a layer: {'; '.join(reasons)}; "
                "serve with --attention-backend CPU_ATTN"
            )
        return str(selected_backend.get_path())


def _for_any_cache(attn_selector_config: Any) -> Any:
    """Selector config without the KV cache's dtype, unless the layer is built for this CPU.

    Since vLLM 0.33 the dtype may be refused: FP8 for want of AVX-512, and for MLA on any CPU.
    """
    if _is_for_this_device():
        return attn_selector_config
    return attn_selector_config._replace(kv_cache_dtype="auto")


def _is_for_this_device() -> bool:
    from vllm_fp4_plugin.device import is_for_this_device  # a late import: it needs the platform

    return is_for_this_device()


def is_size_given(cache_config: Any) -> bool:
    """Whether the user set a size of the KV cache, or a share of the memory.

    vLLM has already converted ``VLLM_CPU_KVCACHE_SPACE`` to such a size.
    """
    if cache_config.kv_cache_memory_bytes is not None:
        return True
    # vLLM fills in a default without a record; a user's 0.92 is another float object.
    share = cache_config.gpu_memory_utilization
    return all(share is not default for default in _default_shares())


def _default_shares() -> list[float]:
    """Defaults of ``gpu_memory_utilization`` as objects, to be compared by identity."""
    from vllm.config import CacheConfig
    from vllm.engine.arg_utils import EngineArgs

    shares = [CacheConfig.gpu_memory_utilization, EngineArgs.gpu_memory_utilization]
    llm = getattr(sys.modules.get("vllm.entrypoints.llm"), "LLM", None)
    if llm is not None:
        shares.append(inspect.signature(llm).parameters["gpu_memory_utilization"].default)
    return shares
