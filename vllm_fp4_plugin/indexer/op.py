"""vLLM's ``SparseAttnIndexer`` on our kernels."""

from typing import Any

import torch
from torch import Tensor
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

from nvfp4_kernels.indexer.formats import Format
from vllm_fp4_plugin.device import current_device
from vllm_fp4_plugin.indexer import cache, choice, fused_layer
from vllm_fp4_plugin.indexer.selection import KeySelector

logger = init_logger("vllm.nvfp4_tc")
OP = "nvfp4_tc::select_keys"


@torch.library.custom_op(OP, mutates_args=("out",))
@eager_break_during_capture
def select_keys(
    q: Tensor,
    scales: Tensor | None,
    k: Tensor | None,
    weights: Tensor,
    out: Tensor,
    cache_name: str,
) -> None:
    """Store a step's keys, unless ``k`` is None, and select keys for the step's tokens.

    In vLLM's profile run, which has no metadata, memory is reserved instead.

    Args:
        q: as for ``KeySelector.select``.
        scales: as for ``KeySelector.select``.
        k: as for ``KeySelector.store``; None: the model has stored the keys.
        weights: as for ``KeySelector.select``.
        out: as for ``KeySelector.select``.
        cache_name: name of the layer that represents the cache and holds the selector.
    """
    context = get_forward_context()
    layer = context.no_compile_layers[cache_name]
    selector: KeySelector = layer.key_selector
    if not isinstance(context.attn_metadata, dict):  # vLLM's profile run, which measures memory
        selector.check_queries(q, scales)
        selector.reserve(out.device)
        return
    metadata: Any = context.attn_metadata[cache_name]
    if k is not None:
        selector.store(k, layer.kv_cache, metadata.slot_mapping)
    selector.select(q, scales, weights, layer.kv_cache, metadata, out)


@select_keys.register_fake
def _(
    q: Tensor,
    scales: Tensor | None,
    k: Tensor | None,
    weights: Tensor,
    out: Tensor,
    cache_name: str,
) -> None:
    pass


class KeySelectingIndexer(SparseAttnIndexer):
    """``SparseAttnIndexer`` that calls ``select_keys``, or vLLM's kernels if ours cannot serve.

    Attributes:
        selector: selector of our kernels; None: vLLM's kernels serve.
    """

    def __init__(
        self,
        k_cache: Any,
        quant_block_size: int,
        scale_fmt: str,
        topk_tokens: int,
        head_dim: int,
        max_model_len: int,
        max_total_seq_len: int,
        topk_indices_buffer: Tensor,
        skip_k_cache_insert: bool = False,
        use_fp4_cache: bool = False,
        compress_ratio: int = 1,
        candidate_blocks: Tensor | None = None,
        candidate_block_size: int = 0,
        candidate_write: bool = False,
    ) -> None:
        vllm_config = get_current_vllm_config()
        traits = choice.IndexerTraits(
            native="mxfp4" if use_fp4_cache else "fp8",
            head_dim=head_dim,
            top_k=topk_tokens,
            quant_block_size=quant_block_size,
            stored_by_model=skip_k_cache_insert,
            two_level=candidate_blocks is not None,
        )
        fmt, reason = choice.choose(traits, vllm_config)
        if fmt is None:
            logger.info_once("indexer: vLLM's own kernels: %s", reason)
            super().__init__(
                k_cache, quant_block_size, scale_fmt, topk_tokens, head_dim, max_model_len,
                max_total_seq_len, topk_indices_buffer, skip_k_cache_insert, use_fp4_cache,
                compress_ratio, candidate_blocks, candidate_block_size, candidate_write,
            )  # fmt: skip
            self.selector = None
            fused_layer.install(None)
            return
        # Not SparseAttnIndexer's own, which requires DeepGEMM and compiles Triton kernels.
        CustomOp.__init__(self)
        cache.set_format(k_cache, fmt, head_dim)
        self.k_cache = k_cache
        self.head_dim = head_dim
        self.topk_tokens = topk_tokens
        self.topk_indices_buffer = topk_indices_buffer
        self.skip_k_cache_insert = skip_k_cache_insert
        # DeepSeek V3.2's CUDA layer reads this attribute and passes it on.
        self.topk_backend = vllm_config.kernel_config.sparse_indexer_topk_backend
        # A buffer, as vLLM keeps the buffers of a sleeping model.
        self.register_buffer("global_scale", _global_scale(fmt), persistent=False)
        self.selector = KeySelector(
            fmt, head_dim, topk_tokens, max_model_len, max_total_seq_len, self.global_scale
        )
        k_cache.key_selector = self.selector
        fused_layer.install(self.selector)
        _split_graphs_at_op(vllm_config.compilation_config)
        logger.info_once(
            "indexer: %s, %d bytes per key, %s",
            choice.scoring_kernel(fmt).label, k_cache.head_dim, reason,
        )  # fmt: skip

    def forward(
        self,
        hidden_states: Tensor,
        q_quant: Tensor | tuple[Tensor, Tensor],
        k: Tensor | None,
        weights: Tensor,
    ) -> Tensor:
        """Store and select keys; see ``select_keys``.

        ``q_quant``: queries, or a pair of queries and scales. Returns ``topk_indices_buffer``.
        """
        if self.selector is None:
            return super().forward(hidden_states, q_quant, k, weights)
        q, scales = q_quant if isinstance(q_quant, tuple) else (q_quant, None)
        torch.ops.nvfp4_tc.select_keys(
            q, scales, None if self.skip_k_cache_insert else k, weights,
            self.topk_indices_buffer, self.k_cache.prefix,
        )  # fmt: skip
        return self.topk_indices_buffer


def _global_scale(fmt: Format) -> Tensor | None:
    """Global scale of NVFP4, always 1 (see the package): float32 ``()``; None for other formats."""
    if fmt.name != "nvfp4":
        return None
    return torch.ones((), dtype=torch.float32, device=current_device())


def _split_graphs_at_op(compilation_config: Any) -> None:
    """Keep ``select_keys`` out of piecewise CUDA graphs, like vLLM's op: prefill shapes vary."""
    splitting_ops = compilation_config.splitting_ops
    if splitting_ops and OP not in splitting_ops:
        splitting_ops.append(OP)
