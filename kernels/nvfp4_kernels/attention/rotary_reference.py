"""``rotary_attention`` in torch, two ops in sequence: the kernel on CPU."""

from torch import Tensor

from nvfp4_kernels.attention.reference import paged_attention
from nvfp4_kernels.attention.scoring import Scoring
from nvfp4_kernels.formats.nvfp4_rows import Nvfp4Rows
from nvfp4_kernels.rotary.store.reference import rotary_store


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
    """See ``nvfp4_kernels.attention.rotary_op.rotary_attention``; returns the LSE."""
    rotated = q.clone()
    end = int(query_start[-1])  # rows after the last sequence's have no positions
    rotary_store(
        rotated, q[:end], k[:end], v[:end], positions[:end], cos_sin_cache, kv_cache,
        slot_mapping[:end], q_norm, k_norm, k_scale, v_scale, neox, eps,
    )  # fmt: skip
    return paged_attention(
        rotated, kv_cache, block_table, seq_lens, query_start, sinks, k_scale, v_scale,
        max_query_len, max_seq_len, scoring, counters, out,
    )[1]  # fmt: skip
