"""A vLLM plugin that serves NVFP4 models: quantization method ``nvfp4-tc``."""

__version__ = "0.1.0"


def register() -> None:
    """Register ``nvfp4-tc`` with vLLM; its ``vllm.general_plugins`` entry point.

    vLLM calls it in every process, possibly more than once.
    """
    from vllm.model_executor.layers.quantization import (
        QUANTIZATION_METHODS,
        register_quantization_config,
    )

    from vllm_fp4_plugin.config import METHOD, Nvfp4TcConfig

    if METHOD not in QUANTIZATION_METHODS:
        register_quantization_config(METHOD)(Nvfp4TcConfig)
