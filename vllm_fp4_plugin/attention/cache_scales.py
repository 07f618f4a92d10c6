"""Scales of an FP8 KV cache, as a checkpoint gives them."""

from typing import Any

import torch
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.utils.torch_utils import set_default_torch_dtype


class KvCacheMethod(BaseKVCacheMethod):
    """Method of an attention layer, which reads its scales in float32.

    vLLM's takes torch's default dtype for them: the model's bfloat16 while that is built, and
    float32 in a reload, which would then change what the same checkpoint says.
    """

    def create_weights(self, layer: Any) -> None:
        """Register the scales."""
        with set_default_torch_dtype(torch.float32):
            super().create_weights(layer)
