"""Scales of an FP8 KV cache, as a checkpoint gives them; those of an NVFP4 cache are left out.

No cache that is served has use for the latter. Their divisor is 2688 or 448, by exporter and
version, and the file does not say which: taken for FP8 scales, they could saturate keys and values
at a sixth of what was seen.
"""

import re
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.utils.torch_utils import set_default_torch_dtype

from vllm_fp4_plugin.formats import CheckpointConfig

IGNORED = "the checkpoint declares NVFP4, whose scales are ignored"
_NVFP4_SCALES = re.compile(r"\.[kv]_(?:global_)?scale$")


class KvCacheMethod(BaseKVCacheMethod):
    """Method of an attention layer, which reads its scales in float32.

    vLLM's takes torch's default dtype for them: the model's bfloat16 while that is built, and
    float32 in a reload, which would then change what the same checkpoint says.
    """

    def create_weights(self, layer: Any) -> None:
        """Register the scales."""
        with set_default_torch_dtype(torch.float32):
            super().create_weights(layer)
        if are_ignored(getattr(self.quant_config, "checkpoint", None)):
            for scale in (layer.k_scale, layer.v_scale):
                scale.weight_loader = _ignore  # of models that do not map names


def are_ignored(checkpoint: CheckpointConfig | None) -> bool:
    """Whether a checkpoint's scales are of a cache that is not served."""
    return checkpoint is not None and checkpoint.nvfp4_cache


def mapper(theirs: Any, checkpoint: CheckpointConfig | None) -> Any:
    """Mapper of a checkpoint's names that drops scales of an NVFP4 cache, or else vLLM's."""
    from vllm.model_executor.models.utils import (
        WeightsMapper,  # imports methods, as vLLM's own does
    )

    if not are_ignored(checkpoint):
        return theirs
    return WeightsMapper(orig_to_new_regex={_NVFP4_SCALES: None}) | theirs


def _ignore(param: Tensor, loaded_weight: Tensor) -> None:
    """Loader of a scale that is not used; vLLM's value for none stays."""
