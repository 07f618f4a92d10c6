"""``indexer_logits`` and ``indexer_logits_paged`` on sm_100."""

import functools

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_layout
from nvfp4_kernels.compile import launch
from nvfp4_kernels.indexer.formats import Format
from nvfp4_kernels.sm100.indexer.choose import SMS, ScoreProblem, choose_config
from nvfp4_kernels.sm100.indexer.logits import NEGATIVE_INFINITY
from nvfp4_kernels.sm100.indexer.scorer import ScorerSm100
from nvfp4_kernels.sm100.indexer.tile import HEAD_DIMS, MAX_HEADS
from nvfp4_kernels.sm100.indexer.variant import Variant

ALIGNMENT = 16  # bytes: of what a tensor map addresses
LEAST_PAGE = 16  # keys: the scales behind them then begin on a multiple of 16 bytes


def logits(
    q: Tensor,
    q_scales: Tensor | None,
    k: Tensor,
    k_scales: Tensor | None,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    fmt: Format,
) -> Tensor:
    """See ``nvfp4_kernels.indexer.score_op.indexer_logits``.

    Raises:
        InvalidArgument: a head size or a number of heads that the kernel lacks, or data that does
            not start at a multiple of 16 bytes.
    """
    problem = _problem(q, fmt, 1, q.shape[0], k.shape[0])
    _check_aligned(q=q, q_scales=q_scales, k=k, k_scales=k_scales, weights=weights)
    out = weights.new_empty((problem.queries, problem.columns))
    if out.numel() == 0:
        return out
    tile, splits = choose_config(problem, _sms(q.device))
    fp8 = fmt.name == "fp8"
    variant = Variant(query_factors=fp8 and q_scales is not None)
    launch(
        ScorerSm100(tile, variant), q, None if fp8 else q_scales, k, k_scales, weights,
        q_scales if fp8 else None, ks, ke, None, out, k.nbytes, 1, 0,
        problem.sequences, problem.queries, problem.columns, splits,
    )  # fmt: skip
    return out


def logits_paged(
    q: Tensor,
    q_scales: Tensor | None,
    cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    max_context_len: int,
    fmt: Format,
    block_size: int,
) -> Tensor:
    """See ``nvfp4_kernels.indexer.score_op.indexer_logits_paged``.

    Raises:
        InvalidArgument: as ``logits``; a page size that the kernel lacks, or pages that do not
            start at multiples of 16 bytes.
    """
    problem = _problem(q, fmt, q.shape[0], q.shape[1], max_context_len)
    _check_page_size(block_size)
    _check_cache(cache)
    _check_aligned(q=q, q_scales=q_scales, weights=weights)
    out = weights.new_empty((problem.sequences * problem.queries, problem.columns))
    if out.numel() == 0:
        return out
    if cache.numel() == 0:
        return out.fill_(NEGATIVE_INFINITY)
    tile, splits = choose_config(problem, _sms(q.device))
    fp8 = fmt.name == "fp8"
    variant = Variant(block_size, query_factors=fp8 and q_scales is not None)
    k_scales = cache[:, block_size * fmt.data_bytes(problem.head_dim) :]
    launch(
        ScorerSm100(tile, variant), q, None if fp8 else q_scales, cache, k_scales, weights,
        q_scales if fp8 else None, None, context_lens, block_table, out, cache.stride(0),
        len(cache), block_table.stride(0), problem.sequences, problem.queries, problem.columns,
        splits,
    )  # fmt: skip
    return out


def _problem(q: Tensor, fmt: Format, sequences: int, queries: int, columns: int) -> ScoreProblem:
    heads, head_dim = q.shape[-2], q.shape[-1] * fmt.packed
    if head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise InvalidArgument(
            f"q: D is {head_dim}, must be one of {known} on sm_100; pad queries and keys with zeros"
        )
    if not 1 <= heads <= MAX_HEADS:
        raise InvalidArgument(
            f"q: has {heads} heads, must have from 1 to {MAX_HEADS} on sm_100; score parts of the "
            "heads and add the scores"
        )
    return ScoreProblem(fmt.name, head_dim, heads, sequences, queries, columns)


def _check_page_size(block_size: int) -> None:
    if block_size < LEAST_PAGE or block_size & (block_size - 1):
        raise InvalidArgument(
            f"block_size: is {block_size}, must be a power of two of at least {LEAST_PAGE} on "
            "sm_100; 64 is usual"
        )


def _check_cache(cache: Tensor) -> None:
    """Pages as a tensor map addresses them."""
    if cache.numel() == 0:
        return
    if cache.data_ptr() % ALIGNMENT:
        raise InvalidArgument(
            f"cache: starts {cache.data_ptr() % ALIGNMENT} bytes after a multiple of {ALIGNMENT}, "
            "must start at one on sm_100; allocate it so"
        )
    if len(cache) > 1 and cache.stride(0) % ALIGNMENT:
        raise InvalidArgument(
            f"cache: pages are {cache.stride(0)} bytes apart, must be a multiple of {ALIGNMENT} on "
            "sm_100; pad them"
        )


def _check_aligned(**tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        check_layout(name, x)


@functools.cache
def _sms(device: torch.device) -> int:
    if device.type != "cuda":
        return SMS  # an emulated B200
    return torch.cuda.get_device_properties(device).multi_processor_count
