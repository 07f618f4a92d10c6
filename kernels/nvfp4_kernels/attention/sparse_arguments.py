"""Argument checks of ``sparse_attention``."""

import torch
from torch import Tensor

from nvfp4_kernels.attention.arguments import (
    check_indices,
    check_scoring,
    check_sinks,
    check_start_shape,
    check_starts,
)
from nvfp4_kernels.attention.call import SparseCall
from nvfp4_kernels.checks import InvalidArgument, check_same_device, check_shape, reads_contents
from nvfp4_kernels.dispatch import Mode
from nvfp4_kernels.heads import check_cache, check_queries


def check_sparse(call: SparseCall) -> Mode:
    """Check the arguments of ``sparse_attention``; return the dispatch mode."""
    q, kv_cache, indices, lens, block_table, query_start, sinks, k_scale, v_scale, *_ = call
    check_queries(q, "(T, Hq, D)")
    mode = check_cache(q, kv_cache, k_scale, v_scale)
    check_sinks(sinks, q)
    check_scoring(call.scoring)
    check_indices("indices", indices, 2)
    check_shape("indices", indices, (len(q), indices.shape[1]), "one list per row of q")
    check_indices("lens", lens, 1)
    check_shape("lens", lens, (len(q),), "one length per row of q")
    check_indices("query_start", query_start, 1)
    check_start_shape(query_start)
    check_indices("block_table", block_table, 2)
    expected = (len(query_start) - 1, block_table.shape[1])
    check_shape("block_table", block_table, expected, "one row per sequence of query_start")
    check_same_device(
        q=q, kv_cache=kv_cache, indices=indices, lens=lens, block_table=block_table,
        query_start=query_start, sinks=sinks, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    if reads_contents(q):
        check_starts("query_start", query_start, len(q))
        _check_lists(kv_cache, indices, lens, block_table, query_start)
    return mode


def _check_lists(
    kv_cache: Tensor, indices: Tensor, lens: Tensor, block_table: Tensor, query_start: Tensor
) -> None:
    """Raise unless lengths of lists, listed positions and the pages of listed keys are valid."""
    rows, width = int(query_start[-1]), indices.shape[1]
    wrong = (lens < 0) | (lens > width)
    row = _first(wrong[:rows])
    if row is not None:
        raise InvalidArgument(
            f"lens: is {int(lens[row])} for row {row}, must be from 0 to {width}, the columns of "
            "indices; pass how many of them are valid"
        )
    size = kv_cache.shape[2]
    room = block_table.shape[1] * size
    listed = torch.arange(width) < lens[:rows].unsqueeze(1)
    row = _first((listed & ((indices[:rows] < 0) | (indices[:rows] >= room))).flatten())
    if row is not None:
        row, column = divmod(row, width)
        raise InvalidArgument(
            f"indices: is {int(indices[row, column])} at ({row}, {column}), must be from 0 to "
            f"{room - 1}, the keys that a row of block_table holds, in the first lens[{row}] = "
            f"{int(lens[row])} columns; count from the sequence's first key, or widen block_table"
        )
    sequences = torch.arange(len(block_table)).repeat_interleave(query_start.diff().long())
    positions = indices[:rows].where(listed, 0)
    if not listed.any():
        return
    pages = block_table[sequences.unsqueeze(1), positions // size]
    wrong = pages[listed & ((pages < 0) | (pages >= len(kv_cache)))]
    if wrong.numel():
        raise InvalidArgument(
            f"block_table: holds page {int(wrong[0])} for a listed key, must be from 0 to "
            f"{len(kv_cache) - 1}, the pages of kv_cache; check the sequence's pages"
        )


def _first(wrong: Tensor) -> int | None:
    """Index of the first true element of ``wrong``; None if all are false."""
    return int(wrong.int().argmax()) if wrong.any() else None
