"""Op ``indexer_logits``: scores of contiguous or paged keys for queries."""

from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.indexer.arguments import refuse_keys
from nvfp4_kernels.indexer.call import IndexerKeys, IndexerPagedKeys, ScoreCall
from nvfp4_kernels.indexer.formats import format_of
from nvfp4_kernels.indexer.kernels import LOGITS_KERNELS
from nvfp4_kernels.indexer.score_arguments import check_scored


def indexer_logits(
    q: Tensor,
    q_scales: Tensor | None,
    keys: IndexerKeys | IndexerPagedKeys,
    weights: Tensor,
    fmt: str,
) -> Tensor:
    """Scores of keys for queries.

    ``I[t, s] = Σ_h weights[t, h] · relu(q[t, h] · k[s])`` for keys that query t sees, else −inf.
    Sums are float32, in any order; ``q · k`` must be in float32's range. A key with NaN scores NaN;
    other keys' scores are not affected. On sm_100 D is 64, 128 or 256, and H from 1 to 128; ``q``,
    keys, scales and weights are 16-byte aligned; the signs of nvfp4's scales, which
    ``indexer_quantize_q`` makes positive, are ignored.

    With paged keys the host neither waits for the device nor reads index tensors: a CUDA graph may
    capture the call.

    Args:
        q: ``(T, H, D)`` as ``indexer_quantize_q`` returns it (packed formats: D/2), with paged keys
            ``(B, next_n, H, D)``: ``next_n`` queries of each sequence. D is a multiple of 32 up to
            256. All tensors must be contiguous, except ``cache`` and ``block_table``, whose last
            stride must be 1.
        q_scales: scales of ``q``. None for bf16, and for fp8 if ``weights`` already include the
            scales, as in vLLM's fused kernel; relu allows this, as scales are positive.
        keys: ``IndexerKeys(k, k_scales, ks, ke)`` or ``IndexerPagedKeys(cache, context_lens,
            block_table, max_context_len, block_size)``.
        weights: float32 ``(T, H)``, with paged keys ``(B · next_n, H)``. For nvfp4 scores in the
            units of the inputs, multiply ``weights`` by the global scales of queries and keys; the
            order of scores does not depend on global scales.
        fmt: ``"nvfp4"``, ``"mxfp4"``, ``"fp8"`` or ``"bf16"``.

    Returns:
        float32 ``(T, Tk)``, with paged keys ``(B · next_n, max_context_len)``.

    Raises:
        InvalidArgument: an unsupported or inconsistent argument; the message names it. The
            contents of tensors are checked on CPU only.
        NoKernelError: no kernel for this device.
    """
    ops = torch.ops.nvfp4
    if isinstance(keys, IndexerPagedKeys):
        cache, context_lens, *pages, block_size = keys
        return ops.indexer_logits_paged(
            q, q_scales, cache, weights, context_lens, *pages, fmt, block_size
        )
    if isinstance(keys, IndexerKeys):
        k, k_scales, ks, ke = keys
        return ops.indexer_logits(q, q_scales, k, k_scales, weights, ks, ke, fmt)
    raise refuse_keys(keys)


@torch.library.custom_op(
    "nvfp4::indexer_logits",
    mutates_args=(),
    schema="(Tensor q, Tensor? q_scales, Tensor k, Tensor? k_scales, Tensor weights, Tensor ks, "
    "Tensor ke, str fmt) -> Tensor",
)
def _logits(*arguments: Any) -> Tensor:
    q, q_scales, k, k_scales, weights, ks, ke, fmt = arguments
    return _run(ScoreCall(q, q_scales, IndexerKeys(k, k_scales, ks, ke), weights, format_of(fmt)))


@_logits.register_fake
def _(q: Tensor, q_scales: Tensor | None, k: Tensor, *rest: object) -> Tensor:
    return q.new_empty((q.shape[0], k.shape[0]), dtype=torch.float32)


@torch.library.custom_op(
    "nvfp4::indexer_logits_paged",
    mutates_args=(),
    schema="(Tensor q, Tensor? q_scales, Tensor cache, Tensor weights, Tensor context_lens, "
    "Tensor block_table, SymInt max_context_len, str fmt, SymInt block_size) -> Tensor",
)
def _logits_paged(*arguments: Any) -> Tensor:
    q, q_scales, cache, weights, *pages, fmt, block_size = arguments
    keys = IndexerPagedKeys._make((cache, *pages, block_size))
    return _run(ScoreCall(q, q_scales, keys, weights, format_of(fmt)))


@_logits_paged.register_fake
def _(q: Tensor, *rest: Any) -> Tensor:
    *_, max_context_len, _, _ = rest
    return q.new_empty((q.shape[0] * q.shape[1], max_context_len), dtype=torch.float32)


def _run(call: ScoreCall) -> Tensor:
    check_scored(call)
    return LOGITS_KERNELS.select(call.q.device, call.fmt.name).load()(call)
