"""A vLLM plugin that serves NVFP4 models: quantization method ``nvfp4-tc`` and attention."""

__version__ = "0.1.0"


def register() -> None:
    """Register ``nvfp4-tc`` and the attention backend ``CUSTOM`` with vLLM.

    The ``vllm.general_plugins`` entry point: vLLM calls it in every process, possibly more
    than once.
    """
    from vllm.model_executor.layers.quantization import (
        QUANTIZATION_METHODS,
        register_quantization_config,
    )
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from vllm_fp4_plugin.config import METHOD, Nvfp4TcConfig

    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(Nvfp4TcConfig)
    custom = AttentionBackendEnum.CUSTOM
    if not custom.is_overridden():  # another plugin may have taken the name
        register_backend(custom, "vllm_fp4_plugin.attention.backend.PagedAttentionBackend")
