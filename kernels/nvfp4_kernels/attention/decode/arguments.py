"""Argument checks of ``decode_attention``."""

import torch
from torch import Tensor

from nvfp4_kernels.attention.arguments import check_indices, check_scoring, check_sinks
from nvfp4_kernels.attention.decode.call import DecodeCall
from nvfp4_kernels.attention.decode.kernels import MAX_GROUP
from nvfp4_kernels.checks import (
    InvalidArgument,
    check_dtype,
    check_same_device,
    check_shape,
    reads_contents,
)
from nvfp4_kernels.dispatch import Mode
from nvfp4_kernels.heads import check_cache, check_out, check_queries


def check_decode(call: DecodeCall) -> Mode:
    """Check the arguments of ``decode_attention``; return the mode."""
    out, q, key, value, kv_cache, block_table, seq_lens, slot_mapping, sinks, *_ = call
    check_queries(q, "(B, Hq, D)")
    mode = check_cache(q, kv_cache, call.k_scale, call.v_scale)
    sequences, heads, head_dim = q.shape
    kv_heads = kv_cache.shape[1]
    if heads > MAX_GROUP * kv_heads:
        raise InvalidArgument(
            f"q: has {heads} heads for {kv_heads} of kv_cache, must have at most {MAX_GROUP} for "
            "each; use paged_attention"
        )
    for name, given in (("key", key), ("value", value)):
        check_dtype(name, given, (q.dtype,))
        rows = (sequences, kv_heads, head_dim)
        check_shape(name, given, rows, "a row per row of q, a head per head of kv_cache")
        if given.numel() and given.stride(-1) != 1:
            raise InvalidArgument(
                f"{name}: strides are {given.stride()}, the last must be 1; call contiguous() on it"
            )
    check_sinks(sinks, q)
    check_scoring(call.scoring)
    check_indices("seq_lens", seq_lens, 1)
    check_shape("seq_lens", seq_lens, (sequences,), "one length per row of q")
    check_indices("block_table", block_table, 2)
    expected = (sequences, block_table.shape[1])
    check_shape("block_table", block_table, expected, "one row per row of q")
    check_dtype("slot_mapping", slot_mapping, (torch.int64,))
    check_shape("slot_mapping", slot_mapping, (sequences,), "one slot per row of q")
    if not slot_mapping.is_contiguous():
        raise InvalidArgument(
            f"slot_mapping: strides are {slot_mapping.stride()}, must be (1,); call contiguous() "
            "on it"
        )
    check_same_device(
        q=q, key=key, value=value, kv_cache=kv_cache, block_table=block_table, seq_lens=seq_lens,
        slot_mapping=slot_mapping, sinks=sinks, k_scale=call.k_scale, v_scale=call.v_scale,
    )  # fmt: skip
    check_out(out, q)
    if reads_contents(q):
        _check_contents(kv_cache, block_table, seq_lens, call.window)
        _check_slots(kv_cache.shape[2], block_table, seq_lens, slot_mapping)
    return mode


def _check_contents(
    kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, window: int | None
) -> None:
    """Raise unless lengths fit the block table, and pages with visible keys are in the cache."""
    pages, _, size, _ = kv_cache.shape
    room = block_table.shape[1] * size
    for sequence, length in enumerate(seq_lens.tolist()):
        if not 0 <= length <= room:
            raise InvalidArgument(
                f"seq_lens: is {length} for row {sequence}, must be from 0 to {room}, what a row "
                "of block_table holds; widen block_table"
            )
        first = 0 if window is None else max(0, length - window)
        used = block_table[sequence, first // size : -(-length // size)]
        wrong = used[(used < 0) | (used >= pages)]
        if wrong.numel():
            raise InvalidArgument(
                f"block_table: holds page {wrong[0]}, must be from 0 to {pages - 1}, the pages "
                "of kv_cache; check the sequence's pages"
            )


def _check_slots(size: int, block_table: Tensor, seq_lens: Tensor, slot_mapping: Tensor) -> None:
    """Raise unless slots are negative, or the slots of last keys according to ``block_table``."""
    lengths = seq_lens.tolist()
    for sequence, slot in enumerate(slot_mapping.tolist()):
        page, row = divmod(lengths[sequence] - 1, size)
        expected = -1 if page < 0 else int(block_table[sequence, page]) * size + row
        if slot >= 0 and slot != expected:
            raise InvalidArgument(
                f"slot_mapping: is {slot} for row {sequence}, must be {expected}, where "
                "block_table has the last of seq_lens, or negative for a token that is not stored"
            )
