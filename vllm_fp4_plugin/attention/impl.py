"""Attention of one layer."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from nvfp4_kernels import Static
from nvfp4_kernels.attention import paged_attention, rotary_attention
from nvfp4_kernels.attention.rotary_op import takes
from nvfp4_kernels.devices import dtype_name
from nvfp4_kernels.precompile.attention_sm100 import attention_kernels
from nvfp4_kernels.precompile.model import Attention
from nvfp4_kernels.precompile.rotary_store import rotary_store_kernels
from nvfp4_kernels.precompile.spec import KernelSpec
from vllm_fp4_plugin import batch_invariance
from vllm_fp4_plugin.attention import cache
from vllm_fp4_plugin.attention.cache import FP8_DTYPES
from vllm_fp4_plugin.attention.errors import UnsupportedAttention
from vllm_fp4_plugin.attention.metadata import PagedAttentionMetadata
from vllm_fp4_plugin.attention.rotation import Rotation

ANY_BATCH = 1 << 20  # tokens: the maximum of a step


class PagedAttentionImpl(AttentionImpl[PagedAttentionMetadata]):
    """Attention of a layer: stores keys and values in the cache and calls ``paged_attention``.

    With ``rotation``, ``rotary_attention`` or ``rotary_store`` stores the keys and values.

    Attributes:
        quantizes: whether the output is NVFP4, see ``fusion.attention_quantize``.
        rotation: rotary embedding fused into attention; None: ``forward`` gets rotated queries and
            keys.
        rotation_resolved: whether the fusion of the rotary embedding has been decided.
        note: note for reports about the ops fused before and after attention; may be empty.
    """

    quantizes = False
    rotation: Rotation | None = None
    rotation_resolved = False
    note = ""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        chunk_lookback: int = -1,
        **further: Any,
    ) -> None:
        _refuse("alibi_slopes", "linear biases (ALiBi) are", alibi_slopes is not None)
        _refuse("attn_type", f"{attn_type} attention is", attn_type != AttentionType.DECODER)
        _refuse("chunk_lookback", "chunks with lookback are", chunk_lookback >= 0)
        for name, given in further.items():
            _refuse(name, "this option is", given is not None)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.is_fp8 = kv_cache_dtype in FP8_DTYPES
        self.soft_cap = logits_soft_cap or None  # models without one pass None or 0
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.batch_invariant = batch_invariance.is_wanted()
        self._loaded_sinks = sinks
        self.sinks: Tensor | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Convert the sinks to float32 for the op; a reload keeps the address, for CUDA graphs."""
        if self._loaded_sinks is None:
            return
        sinks = self._loaded_sinks.detach().float().contiguous()
        if self.sinks is None:
            self.sinks = sinks
        else:
            self.sinks.copy_(sinks)

    def kernels(self, dtype: torch.dtype, page_size: int, sms: int) -> Iterable[KernelSpec]:
        """Kernels for prefills and decodes; see ``warmup.AttentionLayer``."""
        rotates = self.rotation is not None
        sizes = self.sizes if self.rotation is None else self.rotation.sizes(self.sizes)
        name: Any = dtype_name(dtype)
        given: Any = {
            "caches": ("fp8" if self.is_fp8 else "auto",),
            "page_size": page_size,
            "sms": sms,
        }
        kernels = attention_kernels(
            sizes, name, **given, quantized=self.quantizes, rotates=rotates,
            batch_invariant=self.batch_invariant,
        )  # fmt: skip
        if rotates:
            kernels |= rotary_store_kernels(sizes, name, **given, max_tokens=ANY_BATCH)
        return kernels

    @property
    def sizes(self) -> Attention:
        """Sizes of the layer on this rank, for ``nvfp4_kernels.precompile``."""
        return Attention(
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            (self.sliding_window or 0,),
            soft_cap=self.soft_cap is not None,
            sinks=self.sinks is not None,
        )

    def store(
        self,
        layer: Any,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Store this step's keys and values, unless the cache belongs to another layer."""
        if self.kv_sharing_target_layer_name is not None:
            return  # shared cache of that layer
        if key.is_cuda:
            cache.write_cuda(key, value, kv_cache, slot_mapping, self.kv_cache_dtype, layer)
        else:
            cache.write(key, value, kv_cache, slot_mapping, *self._scales(layer))

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagedAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Compute attention of ``query`` ``(≥ T, Hq, D)`` into ``output`` of the same shape.

        ``key`` and ``value`` may be None in a layer that reads another layer's cache.

        With ``output_scale``, the next layer's input scale, the result is NVFP4: ``output`` is
        uint8 ``(≥ T, Hq, D/2)``, ``output_block_scale`` float8_e4m3fn in blocked layout. Without
        ``attn_metadata``, in vLLM's profile run, outputs are zero.
        """
        scales = output_scale, output_block_scale
        if [each is not None for each in scales] != [self.quantizes] * 2:
            raise UnsupportedAttention(
                "output_scale: only attention that the plugin has bound to the layer after it "
                "quantises its output; switch the compile pass fuse_attn_quant off"
            )
        if key is None and self.kv_sharing_target_layer_name is None:
            raise UnsupportedAttention(
                "key: is None, must be given, as --attention-backend CUSTOM stores it; serve with "
                "another, CPU_ATTN on CPU or FLASH_ATTN on CUDA"
            )
        if attn_metadata is None:  # vLLM's profile run, which measures memory
            if output_block_scale is not None:
                output_block_scale.view(torch.uint8).fill_(0)
            return output.fill_(0)
        nvfp4: Any = scales if self.quantizes else None
        self.attend(layer, query, key, value, kv_cache, attn_metadata, output, nvfp4)
        return output

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
        """Store the step's keys and values, and compute attention over the cache into ``output``.

        ``nvfp4`` holds the global scale and the block scales of an NVFP4 result; None: 16 bits.
        """
        slots, positions = attn_metadata.slot_mapping, attn_metadata.positions
        if self.rotation is None:
            self.store(layer, key, value, kv_cache, slots)
        elif positions.ndim != 1:
            raise UnsupportedAttention(
                f"positions: have shape {tuple(positions.shape)}, must be (T,) for attention that "
                "rotates queries and keys; serve with --additional-config "
                '\'{"nvfp4_tc": {"fuse_attention": false}}\''
            )
        pages, (k_scale, v_scale) = cache.typed(kv_cache, fp8=self.is_fp8), self._scales(layer)
        rotation, tokens = self.rotation, attn_metadata.parts[-1].tokens.stop
        if rotation is not None and attn_metadata.stores_first:
            new = query[:tokens], key[:tokens], value[:tokens]
            where = slots[:tokens], positions[:tokens]
            query, rotation = rotation.store(*new, pages, *where, (k_scale, v_scale)), None
        for part in attn_metadata.parts:
            rows = part.tokens
            given: dict[str, Any] = {
                "max_query_len": part.max_query_len,
                "max_seq_len": part.max_seq_len,
                "scale": self.scale,
                "window": self.sliding_window,
                "soft_cap": self.soft_cap,
                "sinks": self.sinks,
                "k_scale": k_scale,
                "v_scale": v_scale,
                "counters": attn_metadata.counters,
                "batch_invariant": self.batch_invariant,
            }
            lengths = part.block_table, part.seq_lens, part.query_start
            queries, out = _rows(query, rows), _rows(output, rows)
            given["out"] = out
            if nvfp4 is not None:
                given["out"] = out, nvfp4[1]
                given["output"], given["first_row"] = Static(nvfp4[0]), rows.start
            if rotation is not None:
                pair = _rows(key, rows), _rows(value, rows)
                places = _rows(slots, rows), _rows(positions, rows)
                if takes(part.max_query_len, self.num_heads, self.num_kv_heads):
                    rotary_attention(
                        queries, *pair, pages, *lengths, *places,
                        rotation.of_heads(queries), settled=True, **given,
                    )  # fmt: skip
                    continue
                queries = rotation.store(queries, *pair, pages, *places, (k_scale, v_scale))
            paged_attention(queries, pages, *lengths, **given)

    def _scales(self, layer: Any) -> tuple[Tensor | None, Tensor | None]:
        return (layer._k_scale, layer._v_scale) if self.is_fp8 else (None, None)


def _rows(x: Tensor, rows: slice) -> Tensor:
    """Return ``x[rows]``; if ``rows`` covers all of x, return x, as making a view takes time."""
    return x if rows.start == 0 and rows.stop == len(x) else x[rows]


def _refuse(name: str, what: str, given: bool) -> None:
    if given:
        raise UnsupportedAttention(
            f"{name}: {what} not supported by --attention-backend CUSTOM; serve with another, "
            "CPU_ATTN on CPU or TRITON_ATTN on CUDA"
        )
