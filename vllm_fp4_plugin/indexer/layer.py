"""Indexer of vLLM's ``deepseek_v2`` with 16-bit queries, and the MLA layer that installs it.

Key formats other than FP8 need 16-bit queries, but ``deepseek_v2.Indexer`` quantises its queries to
FP8 before it calls ``SparseAttnIndexer``. Plugins can replace the surrounding MLA layer, which
receives the indexer as an argument: our MLA layer changes the indexer's class to
``UnquantizedIndexer``.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.models.deepseek_v2 import Indexer


class UnquantizedIndexer(Indexer):
    """``Indexer`` that leaves its queries in 16 bits; ``KeySelectingIndexer`` quantises them."""

    def forward(
        self, hidden_states: Tensor, qr: Tensor, positions: Tensor, rotary_emb: Any
    ) -> Tensor:
        """Select keys for each token.

        Args:
            hidden_states: bfloat16 ``(T, hidden size)``.
            qr: bfloat16 ``(T, q_lora_rank)``.
            positions: int64 ``(T,)``.
            rotary_emb: vLLM's rotary embedding for the first ``rope_dim`` elements.

        Returns:
            int32 ``(≥ T, ≥ top_k)``, see ``KeySelector.select``.
        """
        parts = self.rope_dim, self.head_dim - self.rope_dim
        q = self.wq_b(qr)[0].view(-1, self.n_head, self.head_dim)
        keys_and_weights = self.wk_weights_proj(hidden_states)[0]
        k, weights = keys_and_weights.split([self.head_dim, self.n_head], dim=-1)
        k = self.k_norm(k).unsqueeze(1)
        (q_rope, q_rest), (k_rope, k_rest) = q.split(parts, dim=-1), k.split(parts, dim=-1)
        q_rope, k_rope = rotary_emb(positions, q_rope, k_rope)
        # Compiled rotations may add leading dimensions.
        q = torch.cat([q_rope.reshape(-1, self.n_head, self.rope_dim), q_rest], dim=-1)
        k = torch.cat([k_rope.reshape(-1, 1, self.rope_dim), k_rest], dim=-1)
        weights = weights.float() * (self.softmax_scale * self.n_head_scale)
        return self.indexer_op(hidden_states, q, k.squeeze(1), weights)


class LatentAttention(MultiHeadLatentAttentionWrapper):
    """vLLM's MLA layer, with ``keep_queries`` applied to its indexer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        keep_queries(self.indexer)


def keep_queries(indexer: Any) -> None:
    """Change the class of an ``Indexer`` to ``UnquantizedIndexer``.

    Exempt are subclasses of ``Indexer``, indexers with FP8 keys, and indexers that vLLM's kernels
    serve.
    """
    if type(indexer) is not Indexer:  # a subclass of a model may compute something else
        return
    selector = getattr(indexer.indexer_op, "selector", None)
    if selector is not None and selector.fmt.name != "fp8":
        indexer.__class__ = UnquantizedIndexer
