"""``attention`` and ``paged_attention``: softmax(scale · Q · Kᵀ) · V and its LSE."""

from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.attention.arguments import check_counters, check_dense, check_paged, check_varlen
from nvfp4_kernels.attention.kernels import ATTENTION_KERNELS, KEY_MULTIPLE, PAGED_KERNELS
from nvfp4_kernels.attention.scoring import Scoring
from nvfp4_kernels.checks import check_dtype
from nvfp4_kernels.dispatch import called
from nvfp4_kernels.heads import DTYPES, check_out


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    query_start: Tensor | None = None,
    key_start: Tensor | None = None,
    max_query_len: int | None = None,
    max_key_len: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of queries to keys in dense or ragged tensors.

    On sm_100 all rows of ``q``, ``k`` and ``v`` must be 16-byte aligned.

    Query i of n stands at position ``keys - n + i``: the last query sees the last key. Logits and
    softmax are float32. A row that sees no key gives 0 and −inf, or the head's sink.

    Args:
        q: bfloat16 or float16 ``(B, Tq, Hq, D)``, or ``(total_q, Hq, D)`` with ``query_start``. D a
            multiple of 16 up to 256, its last stride 1; other strides are free.
        k: ``(B, Tk, Hkv, D)`` or ``(total_k, Hkv, D)`` of ``q``'s dtype; Hq a multiple of Hkv.
        v: of ``k``'s shape and dtype.
        scale: factor of ``q · k``; None: ``D ** -0.5``.
        causal: a query sees no key after its own position.
        window: with ``causal``, a query sees this many keys up to its own; None: all.
        soft_cap: logits become ``soft_cap · tanh(logit / soft_cap)``.
        sinks: float32 ``(Hq,)``, a logit per head that adds to the softmax's sum and has no value.
        query_start: int32 ``(B + 1,)``: sequence b has queries ``query_start[b]`` up to, not
            including, ``query_start[b + 1]``; results of rows after the last sequence's are
            undefined.
        key_start: int32 ``(B + 1,)``, the same for keys.
        max_query_len: upper bound on the queries of a sequence; with ``query_start`` only.
        max_key_len: upper bound on the keys of a sequence; with ``key_start`` only.

    Returns:
        ``out`` of ``q``'s dtype and shape, and ``lse`` float32 ``(B, Tq, Hq)`` or ``(total_q,
        Hq)``: the natural logarithm of the sum of the exponentials of a row's logits and sink.

    Raises:
        InvalidArgument: an argument that does not fit, named. The contents of tensors are
            checked on CPU only.
        NoKernelError: no kernel for this device.
    """
    lengths = query_start, key_start, max_query_len, max_key_len
    return torch.ops.nvfp4.attention(q, k, v, sinks, *lengths, scale, causal, window, soft_cap)


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    *,
    max_query_len: int,
    max_seq_len: int,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    counters: Tensor | None = None,
    out: Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of each sequence's last tokens to its keys in a paged cache.

    For prefill, decode and batches of both. The call does not synchronise with the device, and only
    the result depends on the contents of index tensors: a CUDA graph may capture it. Slots of a
    page beyond a sequence's length, and entries of its row in ``block_table`` for pages without a
    key that any of its queries sees, may hold anything. Values before a window, in the page where
    it begins, must be finite, as they are if the sequence has computed them: P = 0 may multiply
    them.

    With a float8_e4m3fn cache the kernel of sm_100 rounds each query of a head to E4M3 with its own
    scale, and P to E4M3; ``lse`` follows from the rounded queries. Where the queries of a sequence
    have more than 128 rows of a KV head, ``max_query_len · Hq / Hkv``, and D is at most 128, six of
    16 exponentials are polynomials of degree 3 (else of degree 4, error 2.9e-6), unless
    ``batch_invariant``: ``lse`` is then off by up to 1.02e-4 beyond the rounding of float32, by
    about 7e-5 with usual logits.

    Args:
        q: bfloat16 or float16 ``(T, Hq, D)``, D a multiple of 16 up to 256, its last stride 1;
            other strides are free.
        kv_cache: ``(pages, Hkv, page_size, 2·D)``, a key and then its value, of ``q``'s dtype or
            float8_e4m3fn; strides are free but for the last. Hq is a multiple of Hkv. On sm_100
            ``page_size`` is a power of two of at least 16, and with float8_e4m3fn D a multiple of
            32.
        block_table: int32 ``(B, P)``: page ``block_table[b, i]`` holds keys ``i · page_size`` on of
            sequence b.
        seq_lens: int32 ``(B,)``, the number of keys of each sequence, including the keys of the
            query tokens.
        query_start: int32 ``(B + 1,)``: rows ``query_start[b]`` up to, not including,
            ``query_start[b + 1]`` of ``q`` are the last tokens of sequence b; results of rows after
            the last sequence's are undefined.
        max_query_len: upper bound on the queries of a sequence.
        max_seq_len: upper bound on the keys of a sequence.
        scale: see ``attention``.
        causal: see ``attention``.
        window: see ``attention``.
        soft_cap: see ``attention``.
        sinks: see ``attention``.
        k_scale: float32 ``()``, with a float8_e4m3fn cache: factor that dequantises stored keys.
        v_scale: the same for values.
        counters: int32 ``(≥ B · Hkv,)``, zeros before and after the call: with these semaphores the
            last CTA of a decode merges split keys without a second launch. Not to be shared by
            concurrent calls.
        out: contiguous, of ``q``'s dtype and shape, written; None: a new tensor.
        batch_invariant: a row's result depends, to the bit, on its query and keys alone. Disables
            split-KV, so that a few long sequences take longer.

    Returns:
        ``out`` of ``q``'s dtype and shape, and ``lse`` float32 ``(T, Hq)``; see ``attention``, and
        above for a float8_e4m3fn cache.

    Raises:
        InvalidArgument: an argument that does not fit, named. The contents of tensors are
            checked on CPU only.
        NoKernelError: no kernel for this device.
    """
    arguments = (
        q, kv_cache, block_table, seq_lens, query_start, sinks, k_scale, v_scale,
        max_query_len, max_seq_len, scale, causal, window, soft_cap, counters, batch_invariant,
    )  # fmt: skip
    if out is None:
        return called(_paged_attention, q, max_seq_len=KEY_MULTIPLE)(*arguments)
    check_out(out, q)
    return out, called(_paged_attention_into, q, max_seq_len=KEY_MULTIPLE)(out, *arguments)


@torch.library.custom_op("nvfp4::attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    query_start: Tensor | None,
    key_start: Tensor | None,
    max_query_len: int | None,
    max_key_len: int | None,
    scale: float | None,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor]:
    scoring = scoring_of(q, scale, causal, window, soft_cap)
    lengths = query_start, key_start, max_query_len, max_key_len
    if any(given is not None for given in lengths):
        check_varlen(q, k, v, sinks, *lengths, scoring)
    else:
        check_dense(q, k, v, sinks, scoring)
    kernel = ATTENTION_KERNELS.select(q.device, "float").load()
    return kernel(q, k, v, sinks, *lengths, scoring)


@_attention.register_fake
def _(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return new_result(q)


@torch.library.custom_op("nvfp4::paged_attention", mutates_args=("counters",))
def _paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    max_query_len: int,
    max_seq_len: int,
    scale: float | None,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    counters: Tensor | None,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor]:
    tensors = q, kv_cache, block_table, seq_lens, query_start, sinks, k_scale, v_scale
    scoring = scoring_of(q, scale, causal, window, soft_cap, batch_invariant)
    return _paged(None, *tensors, max_query_len, max_seq_len, scoring, counters)


@_paged_attention.register_fake
def _(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return new_result(q)


@torch.library.custom_op("nvfp4::paged_attention_into", mutates_args=("out", "counters"))
def _paged_attention_into(
    out: Tensor,
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    max_query_len: int,
    max_seq_len: int,
    scale: float | None,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    counters: Tensor | None,
    batch_invariant: bool,
) -> Tensor:
    tensors = q, kv_cache, block_table, seq_lens, query_start, sinks, k_scale, v_scale
    scoring = scoring_of(q, scale, causal, window, soft_cap, batch_invariant)
    _, lse = _paged(out, *tensors, max_query_len, max_seq_len, scoring, counters)
    return lse


@_paged_attention_into.register_fake
def _(out: Tensor, q: Tensor, *rest: object) -> Tensor:
    return new_result(q)[1]


def _paged(out: Tensor | None, q: Tensor, kv_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *given, counters = rest
    mode = check_paged(q, kv_cache, *given)
    check_counters(counters, q, kv_cache, given[1])
    kernel = PAGED_KERNELS.select(q.device, mode, given[-1].batch_invariant).load()
    return kernel(q, kv_cache, *rest, out)


def scoring_of(
    q: Tensor,
    scale: float | None,
    causal: bool,
    window: int | None,
    soft_cap: float | None,
    batch_invariant: bool = False,
) -> Scoring:
    """Scoring defined by an op's arguments."""
    check_dtype("q", q, DTYPES)
    if scale is None:
        scale = max(1, q.shape[-1:].numel()) ** -0.5  # D is yet to be checked
    return Scoring(scale, causal, window, soft_cap, batch_invariant)


def new_result(q: Tensor) -> tuple[Tensor, Tensor]:
    """New tensors for ``out`` and ``lse``."""
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)
