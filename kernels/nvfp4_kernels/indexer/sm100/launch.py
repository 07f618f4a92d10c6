"""What the scoring kernels of sm_100 are launched with, whatever becomes of the scores."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_layout
from nvfp4_kernels.compile import launch
from nvfp4_kernels.devices import multiprocessors
from nvfp4_kernels.indexer.formats import Format
from nvfp4_kernels.indexer.sm100.choose import ScoreProblem
from nvfp4_kernels.indexer.sm100.tile import HEAD_DIMS, MAX_HEADS
from nvfp4_kernels.indexer.sm100.variant import Variant

ALIGNMENT = 16  # bytes: of what a tensor map addresses
LEAST_PAGE = 16  # keys: the scales behind them then begin on a multiple of 16 bytes


@dataclass(frozen=True)
class Scoring:
    """Queries and keys, checked.

    Attributes:
        problem: their sizes.
        variant: where keys lie.
        operands: arguments of ``ScorerSm100`` before its result.
        pages: those that follow it: bytes apart, how many, entries of a row of the table.
        sms: of the GPU.
    """

    problem: ScoreProblem
    variant: Variant
    operands: tuple[Tensor | None, ...]
    pages: tuple[int, int, int]
    sms: int

    @property
    def rows(self) -> int:
        """Queries of all sequences."""
        return self.problem.sequences * self.problem.queries

    @property
    def keyless(self) -> bool:
        """Whether there is not one key."""
        keys = self.operands[2]
        return keys is None or keys.numel() == 0

    def launch(self, kernel: Any, *out: Tensor | int | None, splits: int) -> None:
        """Starts ``kernel``, a ``ScorerSm100`` whose result is ``out``."""
        problem = self.problem
        sizes = problem.sequences, problem.queries, problem.columns, splits
        launch(kernel, *self.operands, *out, *self.pages, *sizes)


def contiguous(
    q: Tensor,
    q_scales: Tensor | None,
    k: Tensor,
    k_scales: Tensor | None,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    fmt: Format,
) -> Scoring:
    """Arguments as of ``nvfp4_kernels.indexer.score_op.indexer_logits``.

    Raises:
        InvalidArgument: a head size or a number of heads that the kernel lacks, or data that does
            not start at a multiple of 16 bytes.
    """
    problem = _problem(q, fmt, 1, q.shape[0], k.shape[0])
    _check_aligned(q=q, q_scales=q_scales, k=k, k_scales=k_scales, weights=weights)
    fp8 = fmt.name == "fp8"
    return Scoring(
        problem,
        Variant(query_factors=fp8 and q_scales is not None),
        (q, None if fp8 else q_scales, k, k_scales, weights, q_scales if fp8 else None, ks, ke,
         None),
        (k.nbytes, 1, 0),
        multiprocessors(q.device),
    )  # fmt: skip


def paged(
    q: Tensor,
    q_scales: Tensor | None,
    cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    max_context_len: int,
    fmt: Format,
    block_size: int,
) -> Scoring:
    """Arguments as of ``nvfp4_kernels.indexer.score_op.indexer_logits_paged``.

    Raises:
        InvalidArgument: as ``contiguous``; a page size that the kernel lacks, or pages that do not
            start at multiples of 16 bytes.
    """
    problem = _problem(q, fmt, q.shape[0], q.shape[1], max_context_len)
    _check_page_size(block_size)
    _check_cache(cache)
    _check_aligned(q=q, q_scales=q_scales, weights=weights)
    fp8 = fmt.name == "fp8"
    k_scales = cache[:, block_size * fmt.data_bytes(problem.head_dim) :]
    return Scoring(
        problem,
        Variant(block_size, query_factors=fp8 and q_scales is not None),
        (q, None if fp8 else q_scales, cache, k_scales, weights, q_scales if fp8 else None, None,
         context_lens, block_table),
        (cache.stride(0), len(cache), block_table.stride(0)),
        multiprocessors(q.device),
    )  # fmt: skip


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
