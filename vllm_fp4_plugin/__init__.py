"""A vLLM plugin that serves NVFP4 models: quantization method, attention backend and indexer."""

from vllm_fp4_plugin.versions import PLUGIN as __version__
from vllm_fp4_plugin.versions import vllm_names

__all__ = ["__version__", "register"]


@vllm_names()
def register() -> None:
    """Register ``nvfp4-tc``, model loaders, the backend ``CUSTOM``, our indexer, norms and checks.

    This is the ``vllm.general_plugins`` entry point, which vLLM calls in every process, possibly
    more than once.

    Raises:
        IncompatibleVllm: this vLLM lacks a name that the plugin uses.
    """
    from vllm.model_executor.layers.quantization import (
        QUANTIZATION_METHODS,
        register_quantization_config,
    )
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from vllm_fp4_plugin import batch_invariance
    from vllm_fp4_plugin.config import Nvfp4TcConfig
    from vllm_fp4_plugin.engine import complete_loaders, preflight, refusal
    from vllm_fp4_plugin.fusion import add_rms_norm
    from vllm_fp4_plugin.indexer import registration
    from vllm_fp4_plugin.options import METHOD

    refusal.register()
    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(Nvfp4TcConfig)
    custom = AttentionBackendEnum.CUSTOM
    if not custom.is_overridden():  # another plugin may have taken the name
        register_backend(custom, "vllm_fp4_plugin.attention.backend.PagedAttentionBackend")
    registration.register()
    add_rms_norm.register()
    complete_loaders.register()
    batch_invariance.register()
    preflight.register()
