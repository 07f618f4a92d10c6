"""``attention``: softmax(scale · Q · Kᵀ) · V and its LSE, of dense or ragged tensors."""

from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.attention.arguments import check_attention
from nvfp4_kernels.attention.call import AttentionCall
from nvfp4_kernels.attention.kernels import ATTENTION_KERNELS

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? query_start, Tensor? key_start, "
    "SymInt? max_query_len, SymInt? max_key_len, float? scale, bool causal, SymInt? window, "
    "float? soft_cap) -> (Tensor, Tensor)"
)


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

    Query i of n stands at position ``keys - n + i``: the last query is at the last key. Logits and
    softmax are float32. For a row that sees no key, ``out`` is 0, and ``lse`` is −inf or the head's
    sink.

    Args:
        q: bfloat16 or float16 ``(B, Tq, Hq, D)``, or ``(total_q, Hq, D)`` with ``query_start``. D
            is a multiple of 16 up to 256, the last stride 1; other strides are free.
        k: ``(B, Tk, Hkv, D)`` or ``(total_k, Hkv, D)`` of ``q``'s dtype; Hq a multiple of Hkv.
        v: of ``k``'s shape and dtype.
        scale: factor of ``q · k``; None: ``D ** -0.5``.
        causal: a query sees no key after its own position.
        window: with ``causal``, number of keys that a query sees, up to its own; None: all.
        soft_cap: logits become ``soft_cap · tanh(logit / soft_cap)``.
        sinks: float32 ``(Hq,)``, a logit per head that adds to the softmax's sum and has no value.
        query_start: int32 ``(B + 1,)``: sequence b has queries ``query_start[b]`` up to, not
            including, ``query_start[b + 1]``; results of rows after the last sequence's are
            undefined.
        key_start: int32 ``(B + 1,)``: sequence b has keys ``key_start[b]`` up to, not including,
            ``key_start[b + 1]``.
        max_query_len: upper bound on the queries of a sequence; with ``query_start`` only.
        max_key_len: upper bound on the keys of a sequence; with ``key_start`` only.

    Returns:
        ``out`` of ``q``'s dtype and shape, and ``lse`` float32 ``(B, Tq, Hq)`` or ``(total_q,
        Hq)``: the natural logarithm of the sum of the exponentials of a row's logits and sink.

    Raises:
        InvalidArgument: an unsupported or inconsistent argument; the message names it. The
            contents of tensors are checked on CPU only. On sm_100, a batch has at
            most 65,535 sequences, and a sequence at most 65,535 tiles of query rows.
        NoKernelError: no kernel for this device.
    """
    lengths = query_start, key_start, max_query_len, max_key_len
    return torch.ops.nvfp4.attention(q, k, v, sinks, *lengths, scale, causal, window, soft_cap)


@torch.library.custom_op("nvfp4::attention", mutates_args=(), schema=_SCHEMA)
def _attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    call = AttentionCall(*arguments)
    check_attention(call)
    return ATTENTION_KERNELS.select(call.q.device, "float").load()(call)


@_attention.register_fake
def _(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return new_result(q)


def new_result(q: Tensor) -> tuple[Tensor, Tensor]:
    """New tensors for ``out`` and ``lse``."""
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)
