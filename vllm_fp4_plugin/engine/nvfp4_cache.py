"""NVFP4 KV caches, which our method does not serve.

If the user requests an NVFP4 cache, the engine is refused. If a checkpoint declares one, for which
vLLM would choose NVFP4 by default, the checkpoint is served with a 16-bit cache, or with an FP8
cache on request: the declaration does not affect the weights.
"""

import functools
from typing import Any

from vllm.engine import arg_utils
from vllm.logger import init_logger

from nvfp4_kernels.devices import dtype_name
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.options import METHOD, InvalidOption

logger = init_logger("vllm.nvfp4_tc")

_NAMES = ("nvfp4", "nvfp4_4over6")  # nvfp4_ds_mla, a cache of latents, is vLLM's own


def register() -> None:
    """Have vLLM ignore a declared NVFP4 cache in models served by our method."""
    resolve = arg_utils.resolve_kv_cache_dtype_string
    if not hasattr(resolve, "without_nvfp4"):
        ours = _without_nvfp4(resolve)
        ours.without_nvfp4 = True
        arg_utils.resolve_kv_cache_dtype_string = ours


def _without_nvfp4(resolve: Any) -> Any:
    @functools.wraps(resolve)
    def resolve_kv_cache_dtype_string(kv_cache_dtype: str, model_config: Any) -> str:
        found: str = resolve(kv_cache_dtype, model_config)
        declared = kv_cache_dtype == "auto" and found in _NAMES
        return "auto" if declared and model_config.quantization == METHOD else found

    return resolve_kv_cache_dtype_string


def check(vllm_config: Any) -> None:
    """Refuse a requested NVFP4 cache; log the cache that replaces one declared by the checkpoint.

    Raises:
        InvalidOption: the user requests an NVFP4 cache.
    """
    dtype = vllm_config.cache_config.cache_dtype
    if dtype in _NAMES:
        raise InvalidOption(
            f"--kv-cache-dtype: is {dtype!r}, which {METHOD} does not serve, must be auto, "
            "bfloat16, float16 or fp8; leave the option out"
        )
    config: Nvfp4TcConfig = vllm_config.quant_config
    if config.checkpoint is not None and config.checkpoint.nvfp4_cache:
        served = dtype_name(vllm_config.model_config.dtype) if dtype == "auto" else dtype
        logger.warning(
            "%s: the checkpoint declares an NVFP4 KV cache, which is not served: it is %s instead, "
            "and the scales stored for NVFP4 are ignored; --kv-cache-dtype names another",
            METHOD, served,
        )  # fmt: skip
