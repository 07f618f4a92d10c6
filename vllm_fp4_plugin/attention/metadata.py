"""Metadata of a step for the layers of a KV-cache group: each sequence's queries and pages."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from vllm_fp4_plugin import warmup
from vllm_fp4_plugin.attention.errors import UnsupportedAttention
from vllm_fp4_plugin.attention.warmup import compile_layers
from vllm_fp4_plugin.options import METHOD

logger = init_logger("vllm.nvfp4_tc")


@dataclass
class Part:
    """Consecutive sequences of a batch whose attention is computed in one launch.

    Attributes:
        tokens: rows of the step's query tensor.
        query_start: cu_seqlens_q, int32 ``(B + 1,)``, relative to this part's first row.
        seq_lens: number of each sequence's keys, int32 ``(B,)``, this step's tokens included.
        block_table: pages of each sequence, int32 ``(B, pages)``.
        max_query_len: upper bound of the query lengths.
        max_seq_len: upper bound of ``seq_lens``.
    """

    tokens: slice
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int


@dataclass
class PagedAttentionMetadata(AttentionMetadata):
    """Metadata of one step's batch; some sequences may be padding without queries.

    Attributes:
        parts: decodes, then prefills; one part if the batch has only one kind, or is not split.
        slot_mapping: int64 ``(T,)``: cache slot of each token; negative: not stored.
        counters: semaphores, int32 zeros per sequence and KV head; see ``paged_attention``.
        positions: position of each token, int64 ``(≥ T,)``, in vLLM's buffer if vLLM exposes it;
            of more dimensions for models with several positions per token (M-RoPE).
        stores_first: whether a sequence may read pages that another sequence fills in this step (a
            prefix-cache hit on a prompt of the same step). All of the step's keys must then be
            stored before attention starts.
    """

    parts: list[Part]
    slot_mapping: torch.Tensor
    counters: torch.Tensor
    positions: torch.Tensor
    stores_first: bool = False


class PagedAttentionMetadataBuilder(AttentionMetadataBuilder[PagedAttentionMetadata]):
    """Builder that splits a batch into decodes and prefills.

    The op accepts mixed batches, but picks tile size and split-KV for the longest query: in a
    batch with a prefill, a long decode would not be split, and one SM would read all of its keys.
    """

    # A graph of decodes only. A graph that also holds prefills would launch, for each of its
    # sequences, the tiles of a prefill as long as the whole batch.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table: bool = True
    separates = True  # False: do not split a batch of both kinds

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        value_dim = getattr(kv_cache_spec, "head_size_v", kv_cache_spec.head_size)
        if value_dim != kv_cache_spec.head_size:
            raise UnsupportedAttention(
                f"{layer_names[0]}: values have head size {value_dim}, keys "
                f"{kv_cache_spec.head_size}; the two must agree; serve with another "
                "--attention-backend"
            )
        if warmup.is_wanted(device):
            self._compile_kernels()

    def _compile_kernels(self) -> None:
        """Compile the layers' kernels for any batch.

        When vLLM makes the builder, the page size is known, and no CUDA graph is captured yet.
        """
        config = self.vllm_config
        layers = config.compilation_config.static_forward_context
        impls = [layers[name].impl for name in self.layer_names]
        page_size = self.kv_cache_spec.block_size
        done = compile_layers(impls, config.model_config.dtype, page_size, self.device)
        if done and get_tensor_model_parallel_rank() == 0:
            logger.info("%s: %s", METHOD, done)

    @cached_property
    def _counters(self) -> torch.Tensor:
        """Semaphores of this builder alone; each micro-batch in flight has a builder of its own."""
        config: Any = self.vllm_config
        captured = config.compilation_config.max_cudagraph_capture_size or 0
        sequences = max(config.scheduler_config.max_num_seqs, captured)
        places = sequences * self.kv_cache_spec.num_kv_heads
        return torch.zeros(places, dtype=torch.int32, device=self.device)

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
        assert self.reorder_batch_threshold is not None
        whole = Part(
            tokens=slice(0, common.num_actual_tokens),
            query_start=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
        )
        given = common.slot_mapping, self._positions_of(common), self._stores_first(common)
        if not self.separates:
            return self._metadata([whole], *given)
        decodes, others, rows, _ = split_decodes_and_prefills(common, self.reorder_batch_threshold)
        if not decodes or not others:
            return self._metadata([whole], *given)
        first = replace(
            whole,
            tokens=slice(0, rows),
            query_start=whole.query_start[: decodes + 1],
            seq_lens=whole.seq_lens[:decodes],
            block_table=whole.block_table[:decodes],
            max_query_len=self.reorder_batch_threshold,
        )
        second = replace(
            whole,
            tokens=slice(rows, whole.tokens.stop),
            query_start=whole.query_start[decodes:] - rows,
            seq_lens=whole.seq_lens[decodes:],
            block_table=whole.block_table[decodes:],
        )
        return self._metadata([first, second], *given)

    def _stores_first(self, common: CommonAttentionMetadata) -> bool:
        """Whether the step has prompts that may share pages with another request of the step.

        vLLM offers a block for reuse once the tokens that fill the block are scheduled. A CUDA
        graph of decodes ignores the answer, so one case is not covered: in a batch of decodes, a
        prompt with one token left that repeats the tokens of another sequence, up to and including
        a block that the other sequence fills in this step.
        """
        if not self.vllm_config.cache_config.enable_prefix_caching:
            return False
        if common.is_prefilling is None:  # a draft's steps, the first after a target's
            return common.max_query_len > 1
        return bool(common.is_prefilling.any())

    @cached_property
    def _positions(self) -> torch.Tensor:
        """Static buffer, as CUDA graphs need, for positions where vLLM does not expose its own."""
        tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
        return torch.zeros(tokens, dtype=torch.int64, device=self.device)

    def _positions_of(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Positions of a step's tokens: vLLM's or, if not exposed, computed from the lengths."""
        if common.positions is not None:
            return common.positions
        ends, tokens = common.query_start_loc[1:], common.num_actual_tokens
        found = self._positions[:tokens]
        token = torch.arange(tokens, device=ends.device)
        sequence = torch.searchsorted(ends, token, right=True).clamp_(max=len(ends) - 1)
        found.copy_((common.seq_lens[sequence] - ends[sequence] + token).clamp_(min=0))
        return found

    def _metadata(
        self,
        parts: list[Part],
        slot_mapping: torch.Tensor,
        positions: torch.Tensor,
        stores_first: bool,
    ) -> PagedAttentionMetadata:
        return PagedAttentionMetadata(parts, slot_mapping, self._counters, positions, stores_first)

    def update_block_table(
        self, metadata: PagedAttentionMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> PagedAttentionMetadata:
        parts, row = [], 0
        for part in metadata.parts:
            sequences = len(part.seq_lens)
            parts.append(replace(part, block_table=blk_table[row : row + sequences]))
            row += sequences
        return self._metadata(parts, slot_mapping, metadata.positions, metadata.stores_first)
