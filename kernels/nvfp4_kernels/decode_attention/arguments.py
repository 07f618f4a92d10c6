"""What ``decode_attention`` accepts."""

from torch import Tensor

from nvfp4_kernels.attention.arguments import (
    check_cache,
    check_indices,
    check_out,
    check_queries,
    check_scoring,
    check_sinks,
)
from nvfp4_kernels.attention.config import Scoring
from nvfp4_kernels.checks import InvalidArgument, check_dtype, check_same_device, check_shape

MAX_GROUP = 16


def check_decode(
    out: Tensor,
    q: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    scoring: Scoring,
) -> None:
    """Check the arguments of ``decode_attention``."""
    check_queries(q, "(B, Hq, D)")
    check_dtype("kv_cache", kv_cache, (q.dtype,))
    check_cache(q, kv_cache, None, None)
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
    check_scoring(scoring)
    check_indices("seq_lens", seq_lens, 1)
    check_shape("seq_lens", seq_lens, (sequences,), "one length per row of q")
    check_indices("block_table", block_table, 2)
    expected = (sequences, block_table.shape[1])
    check_shape("block_table", block_table, expected, "one row per row of q")
    check_same_device(
        q=q, key=key, value=value, kv_cache=kv_cache, block_table=block_table, seq_lens=seq_lens,
        sinks=sinks,
    )  # fmt: skip
    check_out(out, q)
    if q.device.type == "cpu":
        _check_contents(kv_cache, block_table, seq_lens, scoring.window)


def _check_contents(
    kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, window: int | None
) -> None:
    """Lengths that the table has room for, and pages that there are."""
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
