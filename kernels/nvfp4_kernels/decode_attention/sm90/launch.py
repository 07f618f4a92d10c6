"""``decode_attention`` on sm_90."""

import torch
from torch import Tensor

from nvfp4_kernels.attention.scoring import Scoring
from nvfp4_kernels.checks import InvalidArgument, check_rows
from nvfp4_kernels.compile import launch
from nvfp4_kernels.decode_attention.sm90.choose import choose_config
from nvfp4_kernels.decode_attention.sm90.kernel import DecodeAttentionSm90
from nvfp4_kernels.decode_attention.sm90.tile import HEAD_DIMS, KEYS, Variant
from nvfp4_kernels.devices import multiprocessors
from nvfp4_kernels.sm90.limits import ActDtype

MAX_BATCH = 65535  # CTAs of a grid in that direction


def decode_attention(
    out: Tensor,
    q: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    sinks: Tensor | None,
    scoring: Scoring,
) -> None:
    """See ``nvfp4_kernels.decode_attention.op.decode_attention``.

    Raises:
        InvalidArgument: a D or a page size that the kernel lacks, too many sequences, or rows that
            start on no multiples of 16 bytes.
    """
    batch, heads, head_dim = q.shape
    pages, kv_heads, page_size, _ = kv_cache.shape
    if head_dim not in HEAD_DIMS:
        raise InvalidArgument(
            f"q: D is {head_dim}, must be one of {', '.join(map(str, HEAD_DIMS))} on sm_90; pad q, "
            "key, value and the cache with zeros and pass scale"
        )
    if page_size < KEYS or page_size & (page_size - 1):
        raise InvalidArgument(
            f"kv_cache: page_size is {page_size}, must be a power of two of at least {KEYS} on "
            "sm_90; set vLLM's block size to 16, 32, 64 or 128"
        )
    if batch > MAX_BATCH:
        raise InvalidArgument(
            f"q: has {batch} sequences, must have at most {MAX_BATCH} on sm_90; split the batch"
        )
    check_rows("sm_90", q=q, key=key, value=value, kv_cache=kv_cache, out=out)
    if batch == 0:
        return
    most = block_table.shape[1] * page_size
    if scoring.window is not None:
        most = min(most, scoring.window)
    tile = choose_config(
        batch, kv_heads, heads // kv_heads, head_dim, most, multiprocessors(q.device)
    )
    dtype: ActDtype = "bfloat16" if q.dtype == torch.bfloat16 else "float16"
    variant = Variant(
        dtype=dtype,
        page_size=page_size,
        window=scoring.window is not None,
        soft_cap=scoring.soft_cap is not None,
        sinks=sinks is not None,
    )
    launch(
        DecodeAttentionSm90(tile, variant), q, key, value, kv_cache, out, sinks, block_table,
        seq_lens, slot_mapping, *q.stride()[:2], *key.stride()[:2], *value.stride()[:2],
        kv_cache.stride(2), kv_cache.stride(1), kv_cache.stride(0), block_table.stride(0),
        scoring.scale, scoring.soft_cap or 0.0, batch, kv_heads, pages, scoring.window_keys,
    )  # fmt: skip
