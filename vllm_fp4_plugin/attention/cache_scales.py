"""Scales of an FP8 KV cache from a checkpoint; scales of an NVFP4 cache are skipped.

No KV-cache format that is served uses NVFP4 scales. The divisor of an NVFP4 scale is 2688 or 448,
depending on exporter and version, and the file does not record which; read as an FP8 scale, the
scale could saturate keys and values at a sixth of the calibrated maximum.
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

    vLLM's method creates the scales in torch's default dtype: the model's, e.g. bfloat16, at the
    first load, and float32 in a reload; a reload of the same checkpoint would change the scales.
    """

    def create_weights(self, layer: Any) -> None:
        """Register the scales as float32 parameters; their loader ignores scales for NVFP4."""
        with set_default_torch_dtype(torch.float32):
            super().create_weights(layer)
        if are_ignored(getattr(self.quant_config, "checkpoint", None)):
            for scale in (layer.k_scale, layer.v_scale):
                scale.weight_loader = _ignore  # for models that do not map names


def are_ignored(checkpoint: CheckpointConfig | None) -> bool:
    """Whether a checkpoint declares an NVFP4 KV cache, whose scales are ignored."""
    return checkpoint is not None and checkpoint.nvfp4_cache


def mapper(theirs: Any, checkpoint: CheckpointConfig | None) -> Any:
    """Mapper of checkpoint names: vLLM's ``theirs``, preceded by a filter of ignored scales."""
    from vllm.model_executor.models.utils import (
        WeightsMapper,  # late, as vLLM's own: the module imports methods
    )

    if not are_ignored(checkpoint):
        return theirs
    return WeightsMapper(orig_to_new_regex={_NVFP4_SCALES: None}) | theirs


def _ignore(param: Tensor, loaded_weight: Tensor) -> None:
    """Ignore a loaded scale: the parameter keeps -1, which vLLM takes for a missing scale."""
