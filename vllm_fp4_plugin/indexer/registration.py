"""Registration of our layers as replacements of vLLM's."""

from typing import Any

from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.platforms import current_platform

from vllm_fp4_plugin.indexer.layer import LatentAttention
from vllm_fp4_plugin.indexer.op import KeySelectingIndexer

REPLACED: tuple[tuple[Any, Any], ...] = (
    (SparseAttnIndexer, KeySelectingIndexer),
    (MultiHeadLatentAttentionWrapper, LatentAttention),
)


def register() -> None:
    """Replace vLLM's layers with ours, on CPU and CUDA, in models built from now on.

    A layer that another plugin has replaced is left as it is.
    """
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        return
    for theirs, ours in REPLACED:
        if theirs.__name__ not in op_registry_oot:
            theirs.register_oot(ours)
            # Registration renames the class; custom_ops directives use the original name.
            ours.name = theirs.name
