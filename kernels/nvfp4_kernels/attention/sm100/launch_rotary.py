"""Launch of the attention kernel on sm_100 for ``rotary_attention``."""

from torch import Tensor

from nvfp4_kernels.attention.scoring import Scoring
from nvfp4_kernels.attention.sm100.launch import Rotating, paged_attention
from nvfp4_kernels.attention.sm100.rotating import RotationArguments
from nvfp4_kernels.attention.sm100.tile import Rotation
from nvfp4_kernels.checks import strides_of
from nvfp4_kernels.formats.nvfp4_rows import Nvfp4Rows
from nvfp4_kernels.rotary.store.launch import check_layouts, store_variant, token_heads
from nvfp4_kernels.rotary.store.pages import PagedCache
from nvfp4_kernels.rotary.store.tile import HeadTile


def rotary_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    neox: bool,
    eps: float | None,
    max_query_len: int,
    max_seq_len: int,
    settled: bool,
    scoring: Scoring,
    counters: Tensor | None,
    out: Tensor | Nvfp4Rows,
) -> Tensor:
    """See ``nvfp4_kernels.attention.rotary_op.rotary_attention``; returns the LSE.

    Raises:
        InvalidArgument: as ``paged_attention`` and ``rotary_store``.
    """
    check_layouts(q, k, v, kv_cache, cos_sin_cache, q_norm, k_norm)
    variant = store_variant(q, positions.dtype, cos_sin_cache, kv_cache, q_norm, k_norm, neox)
    arguments = RotationArguments(
        new_k=token_heads(k),
        new_v=token_heads(v),
        cache=PagedCache(kv_cache, *strides_of(kv_cache)[:3]),
        slots=slot_mapping,
        table=cos_sin_cache,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=0.0 if eps is None else eps,
        settled=int(settled),
    )
    rotation = Rotation(HeadTile(q.shape[2], cos_sin_cache.shape[1]), variant)
    return paged_attention(
        q, kv_cache, block_table, seq_lens, query_start, sinks, k_scale, v_scale, max_query_len,
        max_seq_len, scoring, counters, out, Rotating(rotation, arguments),
    )[1]  # fmt: skip
