"""Attention on sm_90: our kernel, or FlashAttention 3.

Our kernel runs steps of one token per sequence, unless a sequence may read pages that another fills
in the step, or the layer reads another layer's cache. With an FP8 cache FlashAttention takes E4M3
queries, our kernel 16-bit queries.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from nvfp4_kernels.attention import decode_attention
from nvfp4_kernels.attention.decode.kernels import MAX_GROUP
from nvfp4_kernels.devices import dtype_name
from nvfp4_kernels.precompile.attention_sm90 import decode_kernels
from nvfp4_kernels.precompile.spec import KernelSpec
from vllm_fp4_plugin.attention import cache
from vllm_fp4_plugin.attention.errors import UnsupportedAttention
from vllm_fp4_plugin.attention.impl import PagedAttentionImpl
from vllm_fp4_plugin.attention.metadata import (
    PagedAttentionMetadata,
    PagedAttentionMetadataBuilder,
    Part,
)
from vllm_fp4_plugin.device import is_planned

PREFILL = "FlashAttention 3 (vLLM)"
NULL_PAGE = 0  # vLLM assigns this page to no sequence


def unsupported_reason() -> str:
    """Reason why prefills cannot run (vLLM does not use FlashAttention 3); otherwise empty."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    if is_planned() or get_flash_attn_version() == 3:
        return ""
    return f"there is no {PREFILL} here, which prefills on sm_90"


class HopperMetadataBuilder(PagedAttentionMetadataBuilder):
    """Builder that does not split batches into decodes and prefills.

    FlashAttention itself distributes a mixed batch's decodes over the SMs, and outside of a CUDA
    graph a second launch per layer costs more than a split saves.
    """

    separates = False

    def build(self, *args: Any, **kwargs: Any) -> PagedAttentionMetadata:
        return self._without_pages_given_away(super().build(*args, **kwargs))

    def update_block_table(self, *args: Any, **kwargs: Any) -> PagedAttentionMetadata:
        return self._without_pages_given_away(super().update_block_table(*args, **kwargs))

    @cached_property
    def _shares_a_cache(self) -> bool:
        """Whether a layer of the group reads another layer's cache, always by FlashAttention."""
        layers = self.vllm_config.compilation_config.static_forward_context
        found = (layers.get(name) for name in self.layer_names)
        return any(getattr(each, "kv_sharing_target_layer_name", None) for each in found)

    def _without_pages_given_away(self, metadata: PagedAttentionMetadata) -> PagedAttentionMetadata:
        """Replace the pages before each sequence's sliding window by vLLM's null page.

        Only in steps that FlashAttention may attend; see ``HopperAttentionImpl``.
        vLLM frees these pages, so another sequence may have written NaN there; in the tile where
        the window begins, FlashAttention multiplies masked values by 0, and 0 · NaN is NaN. The
        block table is changed in place, as CUDA graphs hold its pointer. vLLM rewrites the table in
        every step; the V2 model runner of 0.33 makes the same replacement itself.
        """
        [part] = metadata.parts
        spec = self.kv_cache_spec
        reads = part.max_query_len > 1 or metadata.stores_first or self._shares_a_cache
        if isinstance(spec, SlidingWindowSpec) and reads:
            positions = part.seq_lens - part.query_start.diff()
            given_away = (positions - spec.sliding_window + 1) // spec.block_size
            page = torch.arange(part.block_table.shape[1], device=part.block_table.device)
            part.block_table.masked_fill_(page < given_away.unsqueeze(1), NULL_PAGE)
        return metadata


class HopperAttentionImpl(PagedAttentionImpl):
    """Attention of a layer; a decode step is one launch, which also stores keys and values."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        *more: Any,
        **named: Any,
    ) -> None:
        super().__init__(num_heads, head_size, scale, num_kv_heads, *more, **named)
        if num_heads > MAX_GROUP * self.num_kv_heads:
            raise UnsupportedAttention(
                f"num_heads: {num_heads} query heads for {num_kv_heads} of keys, must be at most "
                f"{MAX_GROUP} for each on sm_90; serve with --attention-backend FLASH_ATTN"
            )

    def kernels(self, dtype: torch.dtype, page_size: int, sms: int) -> Iterable[KernelSpec]:
        """Decode kernels, see ``warmup.AttentionLayer``; prefills need no kernel of ours."""
        name = dtype_name(dtype)
        how: dict[str, Any] = {"page_size": page_size, "fp8": self.is_fp8, "sms": sms}
        return decode_kernels(self.sizes, name, **how)  # type: ignore[arg-type]

    def attend(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagedAttentionMetadata,
        output: Tensor,
        nvfp4: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        assert nvfp4 is None, "Hopper's products take 16 bits"
        [part] = attn_metadata.parts
        rows, pages = part.tokens, cache.typed(kv_cache, fp8=self.is_fp8)
        if attn_metadata.stores_first or not self._decodes(part):
            self.store(layer, key, value, kv_cache, attn_metadata.slot_mapping)
            self._flash_attention(layer, query[rows], pages, part, output[rows])
            return
        k_scale, v_scale = self._scales(layer)
        decode_attention(
            query[rows],
            key[rows],
            value[rows],
            pages,
            part.block_table,
            part.seq_lens,
            attn_metadata.slot_mapping[rows],
            scale=self.scale,
            window=self.sliding_window,
            soft_cap=self.soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
            out=output[rows],
        )

    def _decodes(self, part: Part) -> bool:
        """Whether each sequence has one token in the step, and the layer has a cache of its own."""
        own = self.kv_sharing_target_layer_name is None
        return own and part.max_query_len == 1 and part.tokens.stop == len(part.seq_lens)

    def _flash_attention(
        self, layer: Any, query: Tensor, pages: Tensor, part: Part, out: Tensor
    ) -> None:
        """Attend ``part`` by FlashAttention, whose queries are E4M3 if the cache is."""
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

        descales = {}
        if self.is_fp8:
            query = cache.quantized_queries(query, layer._q_scale)
            each = len(part.seq_lens), self.num_kv_heads
            descales = {
                f"{x}_descale": getattr(layer, f"_{x}_scale").expand(each) for x in ("q", "k", "v")
            }
        key_cache, value_cache = pages.transpose(1, 2).chunk(2, dim=-1)
        window = (-1, -1) if self.sliding_window is None else (self.sliding_window - 1, 0)
        flash_attn_varlen_func(
            query,
            key_cache,
            value_cache,
            max_seqlen_q=part.max_query_len,
            cu_seqlens_q=part.query_start,
            max_seqlen_k=part.max_seq_len,
            seqused_k=part.seq_lens,
            softmax_scale=self.scale,
            causal=True,
            window_size=list(window),
            softcap=self.soft_cap or 0.0,
            block_table=part.block_table,
            out=out,
            fa_version=3,
            **descales,
        )
