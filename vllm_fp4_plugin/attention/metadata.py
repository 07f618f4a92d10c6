"""What all layers of a step share: which queries and keys belong to which sequence."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)


class UnsupportedAttention(ValueError):
    """Attention that ``PagedAttentionBackend`` does not compute; another backend must."""


@dataclass
class PagedAttentionMetadata(AttentionMetadata):
    """One step's batch; B sequences, some of them padding without queries.

    Attributes:
        num_tokens: rows of the query, padding included.
        query_start: int32 ``(B + 1,)``.
        seq_lens: int32 ``(B,)``, this step's tokens included.
        block_table: int32 ``(B, pages)``.
        max_query_len: an upper bound.
        max_seq_len: an upper bound.
    """

    num_tokens: int
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int


class PagedAttentionMetadataBuilder(AttentionMetadataBuilder[PagedAttentionMetadata]):
    """Passes vLLM's tensors on: the op takes prefill, decode and both mixed as they are."""

    # A graph of decodes. One that also holds prefills would launch, for each of its sequences, the
    # tiles of a prefill as long as the whole batch.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table: bool = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        value_dim = getattr(kv_cache_spec, "head_size_v", kv_cache_spec.head_size)
        if value_dim != kv_cache_spec.head_size:
            raise UnsupportedAttention(
                f"{layer_names[0]}: values have head size {value_dim}, keys "
                f"{kv_cache_spec.head_size}; the two must agree; serve with another "
                "--attention-backend"
            )

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PagedAttentionMetadata:
        common = common_attn_metadata
        if common_prefix_len:
            raise UnsupportedAttention(
                f"common_prefix_len: is {common_prefix_len}, must be 0; cascade attention is not "
                "supported; leave --disable-cascade-attn on"
            )
        if common.causal is not True:
            raise UnsupportedAttention(
                "causal: attention to later tokens is not supported; serve with another "
                "--attention-backend"
            )
        return PagedAttentionMetadata(
            num_tokens=common.num_actual_tokens,
            query_start=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
        )

    def update_block_table(
        self, metadata: PagedAttentionMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> PagedAttentionMetadata:
        return replace(metadata, block_table=blk_table)
