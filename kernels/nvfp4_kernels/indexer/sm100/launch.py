"""Launch arguments of the scoring kernels of sm_100, with or without fused top-k."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_layout, strides_of
from nvfp4_kernels.devices import DeviceFacts, device_arch, device_facts
from nvfp4_kernels.indexer.call import IndexerKeys, IndexerPagedKeys, ScoreCall
from nvfp4_kernels.indexer.sm100.choose import ScoreProblem
from nvfp4_kernels.indexer.sm100.kernel import ScoreArguments
from nvfp4_kernels.indexer.sm100.operands import PageTable
from nvfp4_kernels.indexer.sm100.scheduler import KeyRanges, Sizes
from nvfp4_kernels.indexer.sm100.tile import HEAD_DIMS, MAX_HEADS
from nvfp4_kernels.indexer.sm100.variant import Variant
from nvfp4_kernels.indexer.sm100.weights import HeadWeights

ALIGNMENT = 16  # bytes: alignment of a tensor map's addresses and strides
MIN_PAGE = 16  # keys: the scales behind them then begin on a multiple of 16 bytes


@dataclass(frozen=True)
class Scoring:
    """Scoring call whose arguments have been checked.

    Attributes:
        facts: facts of the device.
        problem: problem sizes.
        variant: compile-time variant of the kernel.
        q: queries.
        q_scales: block scales of the queries; None in fp8 and bf16.
        k: keys, or a paged cache.
        page_table: addresses of keys' pages and scales.
        weights: weights of the heads.
        ranges: keys that each query sees.
    """

    facts: DeviceFacts
    problem: ScoreProblem
    variant: Variant
    q: Tensor
    q_scales: Tensor | None
    k: Tensor
    page_table: PageTable
    weights: HeadWeights
    ranges: KeyRanges

    @property
    def rows(self) -> int:
        """Number of queries of all sequences together."""
        return self.problem.sequences * self.problem.queries

    @property
    def keyless(self) -> bool:
        """Whether there are no contiguous keys, or the paged cache has no pages."""
        return self.k.numel() == 0

    def arguments(self, splits: int) -> ScoreArguments:
        """Arguments of a launch that splits the keys among ``splits`` CTAs."""
        problem = self.problem
        return ScoreArguments(
            q=self.q,
            k=self.k,
            q_scales=self.q_scales,
            page_table=self.page_table,
            weights=self.weights,
            ranges=self.ranges,
            sizes=Sizes(
                sequences=problem.sequences,
                queries=problem.queries,
                keys=problem.keys,
                splits=splits,
            ),
            defective_below=self.facts.defective_map_bytes,
        )


def scoring_of(call: ScoreCall) -> Scoring:
    """Check a call's arguments against the limits of this kernel; return the bundled arguments.

    Raises:
        InvalidArgument: an unsupported head size, number of heads or page size, or data or pages
            that are not 16-byte aligned.
    """
    if isinstance(call.keys, IndexerPagedKeys):
        return _paged(call, call.keys)
    return _contiguous(call, call.keys)


def _contiguous(call: ScoreCall, keys: IndexerKeys) -> Scoring:
    k, k_scales, ks, ke = keys
    problem = _problem(call, 1, call.q.shape[0], k.shape[0])
    _check_aligned(q=call.q, q_scales=call.q_scales, k=k, k_scales=k_scales, weights=call.weights)
    page_table = PageTable(table=None, table_stride=0, pages=1, stride=k.nbytes, k_scales=k_scales)
    return _scoring(call, problem, k, 0, page_table, KeyRanges(begins=ks, ends=ke))


def _paged(call: ScoreCall, keys: IndexerPagedKeys) -> Scoring:
    q, (cache, context_lens, block_table, max_context_len, block_size) = call.q, keys
    problem = _problem(call, q.shape[0], q.shape[1], max_context_len)
    _check_page_size(block_size, q.device)
    _check_cache(cache)
    _check_aligned(q=q, q_scales=call.q_scales, weights=call.weights)
    page_table = PageTable(
        table=block_table,
        table_stride=strides_of(block_table)[0],
        pages=len(cache),
        stride=strides_of(cache)[0],
        k_scales=cache[:, block_size * call.fmt.data_bytes(problem.head_dim) :],
    )
    ranges = KeyRanges(begins=None, ends=context_lens)
    return _scoring(call, problem, cache, block_size, page_table, ranges)


def _scoring(
    call: ScoreCall,
    problem: ScoreProblem,
    k: Tensor,
    page_size: int,
    page_table: PageTable,
    ranges: KeyRanges,
) -> Scoring:
    """Bundle the launch's operands; FP8 queries' scales multiply the weights."""
    fp8, q_scales = problem.fmt == "fp8", call.q_scales
    return Scoring(
        facts=device_facts(call.q.device),
        problem=problem,
        variant=Variant(page_size, query_factors=fp8 and q_scales is not None),
        q=call.q,
        q_scales=None if fp8 else q_scales,
        k=k,
        page_table=page_table,
        weights=HeadWeights(weights=call.weights, query_factors=q_scales if fp8 else None),
        ranges=ranges,
    )


def _problem(call: ScoreCall, sequences: int, queries: int, keys: int) -> ScoreProblem:
    """Problem sizes of a launch; raise if the kernel does not support the sizes."""
    q, fmt = call.q, call.fmt
    num_heads, head_dim = q.shape[-2], q.shape[-1] * fmt.packed
    if head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise InvalidArgument(
            f"q: D is {head_dim}, must be one of {known} on {device_arch(q.device)}; pad "
            "queries and keys with zeros"
        )
    if not 1 <= num_heads <= MAX_HEADS:
        raise InvalidArgument(
            f"q: has {num_heads} heads, must have from 1 to {MAX_HEADS} on "
            f"{device_arch(q.device)}; score parts of the heads and add the scores"
        )
    return ScoreProblem(fmt.name, head_dim, num_heads, sequences, queries, keys)


def _check_page_size(block_size: int, device: torch.device) -> None:
    """Raise unless ``block_size`` is a power of two of at least 16: pages are whole TMA boxes."""
    if block_size < MIN_PAGE or block_size & (block_size - 1):
        raise InvalidArgument(
            f"block_size: is {block_size}, must be a power of two of at least {MIN_PAGE} on "
            f"{device_arch(device)}; 64 is usual"
        )


def _check_cache(cache: Tensor) -> None:
    """Raise unless the pages are 16-byte aligned, so that a tensor map can address them."""
    if cache.numel() == 0:
        return
    if cache.data_ptr() % ALIGNMENT:
        raise InvalidArgument(
            f"cache: is misaligned by {cache.data_ptr() % ALIGNMENT} bytes, must be "
            f"{ALIGNMENT}-byte aligned on {device_arch(cache.device)}; allocate it so"
        )
    if len(cache) > 1 and cache.stride(0) % ALIGNMENT:
        raise InvalidArgument(
            f"cache: pages are {cache.stride(0)} bytes apart, must be a multiple of {ALIGNMENT} on "
            f"{device_arch(cache.device)}; pad them"
        )


def _check_aligned(**tensors: Tensor | None) -> None:
    """Raise unless each tensor is contiguous and 16-byte aligned."""
    for name, x in tensors.items():
        check_layout(name, x)
