"""Scales of an FP8 KV cache from a checkpoint; scales of an NVFP4 cache are skipped.

No KV-cache format that is served uses NVFP4 scales. Their divisor is 2688 or 448, depending on
exporter and version, and the file does not record which; read as FP8 scales, they could saturate
keys and values at a sixth of the calibrated maximum.
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
    """Method of an attention layer that loads the KV-cache scales in float32.

    vLLM's method takes torch's default dtype: the model's bfloat16 at the first load, and float32
    in a reload, so that a reload of the same checkpoint would change the scales.
    """

    def create_weights(self, layer: Any) -> None:
        """Register the scales as parameters."""
        with set_default_torch_dtype(torch.float32):
            super().create_weights(layer)
        if are_ignored(getattr(self.quant_config, "checkpoint", None)):
            for scale in (layer.k_scale, layer.v_scale):
                scale.weight_loader = _ignore  # for models that do not map names


def are_ignored(checkpoint: CheckpointConfig | None) -> bool:
    """Whether a checkpoint's KV-cache scales are for NVFP4, which is not served."""
    return checkpoint is not None and checkpoint.nvfp4_cache


def mapper(theirs: Any, checkpoint: CheckpointConfig | None) -> Any:
    """Mapper of checkpoint names: vLLM's ``theirs``, extended to drop scales of an NVFP4 cache."""
    from vllm.model_executor.models.utils import (
        WeightsMapper,  # late, as vLLM's own: the module imports methods
    )

    if not are_ignored(checkpoint):
        return theirs
    return WeightsMapper(orig_to_new_regex={_NVFP4_SCALES: None}) | theirs


def _ignore(param: Tensor, loaded_weight: Tensor) -> None:
    """Loader that ignores a scale; vLLM's default value stays."""
