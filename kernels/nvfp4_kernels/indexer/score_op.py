"""Ops that score keys for queries: ``indexer_logits`` and ``indexer_logits_paged``."""

import torch
from torch import Tensor

from nvfp4_kernels.indexer.formats import format_of
from nvfp4_kernels.indexer.kernels import LOGITS_KERNELS, LOGITS_PAGED_KERNELS
from nvfp4_kernels.indexer.score_arguments import check_scored, check_scored_paged


def indexer_logits(
    q: Tensor,
    q_scales: Tensor | None,
    k: Tensor,
    k_scales: Tensor | None,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    fmt: str,
) -> Tensor:
    """Scores of contiguous keys for queries.

    ``I[t, s] = Σ_h weights[t, h] · relu(q[t, h] · k[s])`` for ``ks[t] <= s < ke[t]``, else −inf.
    Sums are float32, in any order; ``q · k`` must be in float32's range. A key with NaN scores NaN;
    other keys' scores are not affected. On sm_100 D is 64, 128 or 256, H from 1 to 128, tensors are
    16-byte aligned, and the signs of nvfp4's scales, which ``indexer_quantize_q`` makes positive,
    are ignored.

    Args:
        q: ``(T, H, D)`` as ``indexer_quantize_q`` returns it (packed formats: D/2); D a multiple of
            32 up to 256. Every tensor must be contiguous.
        q_scales: scales of ``q``. None for bf16, and for fp8 if ``weights`` already include the
            scales, as in vLLM's fused kernel; scales are positive, so that relu commutes.
        k: ``(Tk, D)`` in the same format, as ``indexer_gather_k`` returns it.
        k_scales: scales of ``k``; None for bf16.
        weights: float32 ``(T, H)``. For scores in the units of the inputs, multiply nvfp4's global
            scales of queries and keys into them; the order of scores does not depend on them.
        ks: int32 ``(T,)``, the first key that a query sees, from 0 to Tk.
        ke: int32 ``(T,)``, the key after the last, from ``ks`` to Tk.
        fmt: ``"nvfp4"``, ``"mxfp4"``, ``"fp8"`` or ``"bf16"``.

    Returns:
        float32 ``(T, Tk)``.

    Raises:
        InvalidArgument: an argument that does not fit, named. The contents of tensors are
            checked on CPU only.
        NoKernelError: no kernel for this device.
    """
    return torch.ops.nvfp4.indexer_logits(q, q_scales, k, k_scales, weights, ks, ke, fmt)


def indexer_logits_paged(
    q: Tensor,
    q_scales: Tensor | None,
    cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    max_context_len: int,
    fmt: str,
    block_size: int,
) -> Tensor:
    """Scores of keys in a paged cache, for several queries of each sequence.

    The host neither waits for the device nor reads index tensors: a CUDA graph may capture the
    call.

    Args:
        q: ``(B, next_n, H, D)``, otherwise as for ``indexer_logits``.
        q_scales: as for ``indexer_logits``.
        cache: uint8 ``(pages, page_bytes)`` as ``indexer_store_k`` writes it; slots beyond a
            context may hold anything.
        weights: float32 ``(B · next_n, H)``, otherwise as for ``indexer_logits``.
        context_lens: int32 ``(B, next_n)``: number of the sequence's first keys that each query
            sees.
        block_table: int32 ``(B, P)``: page ``block_table[b, i]`` holds keys ``i · block_size`` on
            of sequence b. Entries after a sequence's last page may hold anything.
        max_context_len: columns of the result, at least the longest context.
        fmt: as for ``indexer_logits``.
        block_size: keys of a page; on sm_100 a power of two of at least 16, and pages are 16-byte
            aligned.

    Returns:
        float32 ``(B · next_n, max_context_len)``, −inf after a query's context.

    Raises:
        InvalidArgument, NoKernelError: as ``indexer_logits``.
    """
    return torch.ops.nvfp4.indexer_logits_paged(
        q, q_scales, cache, weights, context_lens, block_table, max_context_len, fmt, block_size
    )


@torch.library.custom_op("nvfp4::indexer_logits", mutates_args=())
def _logits(
    q: Tensor,
    q_scales: Tensor | None,
    k: Tensor,
    k_scales: Tensor | None,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    fmt: str,
) -> Tensor:
    """Check the arguments of ``indexer_logits``, and run its kernel."""
    arguments = q, q_scales, k, k_scales, weights, ks, ke, format_of(fmt)
    check_scored(*arguments)
    kernel = LOGITS_KERNELS.select(q.device, arguments[-1].name).load()
    return kernel(*arguments)


@_logits.register_fake
def _(q: Tensor, q_scales: Tensor | None, k: Tensor, *rest: object) -> Tensor:
    return q.new_empty((q.shape[0], k.shape[0]), dtype=torch.float32)


@torch.library.custom_op("nvfp4::indexer_logits_paged", mutates_args=())
def _logits_paged(
    q: Tensor,
    q_scales: Tensor | None,
    cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    max_context_len: int,
    fmt: str,
    block_size: int,
) -> Tensor:
    """Check the arguments of ``indexer_logits_paged``, and run its kernel."""
    known = format_of(fmt)
    tensors = q, q_scales, cache, weights, context_lens, block_table
    check_scored_paged(*tensors, max_context_len, known, block_size, min_keys=1)
    kernel = LOGITS_PAGED_KERNELS.select(q.device, known.name).load()
    return kernel(*tensors, max_context_len, known, block_size)


@_logits_paged.register_fake
def _(
    q: Tensor,
    q_scales: Tensor | None,
    cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    max_context_len: int,
    fmt: str,
    block_size: int,
) -> Tensor:
    return q.new_empty((q.shape[0] * q.shape[1], max_context_len), dtype=torch.float32)
