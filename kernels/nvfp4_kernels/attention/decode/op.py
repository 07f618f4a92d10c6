"""``decode_attention``: store a token's key and value, then softmax(scale · Q · Kᵀ) · V."""

from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.attention.decode.arguments import check_decode
from nvfp4_kernels.attention.decode.call import DecodeCall
from nvfp4_kernels.attention.decode.kernels import DECODE_KERNELS
from nvfp4_kernels.checks import check_dtype
from nvfp4_kernels.dispatch import called
from nvfp4_kernels.heads import DTYPES

_SCHEMA = (
    "(Tensor(a!) out, Tensor q, Tensor key, Tensor value, Tensor(b!) kv_cache, "
    "Tensor block_table, Tensor seq_lens, Tensor slot_mapping, Tensor? sinks, Tensor? k_scale, "
    "Tensor? v_scale, float? scale, SymInt? window, float? soft_cap) -> ()"
)


def decode_attention(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of each sequence's last token, whose key and value are also stored in the cache.

    One launch instead of a store into the cache, ``paged_attention`` with split-KV, and a merge.
    The call does not synchronise with the device, and only the result depends on the contents of
    index tensors: a CUDA graph may capture it. Slots of a page beyond a sequence's length, and
    entries of the sequence's row in ``block_table`` for pages without a key that the token sees,
    may hold anything. Values before a window, in the page where the window begins, must be finite,
    as P = 0 may multiply them. The result is deterministic: equal arguments give the same bits.

    For an E4M3 cache the new key and value are divided by ``k_scale`` and ``v_scale`` in float32,
    and rounded to nearest even, saturating at ±448; this attention uses them as stored. On sm_90
    E4M3 keys and values, bfloat16 queries and P are multiplied as float16: each head's queries with
    a power of two, by which elements less than 2^-31 of the head's largest may lose bits.

    On sm_90 ``kv_cache``, its scales and the index tensors may be read while preceding kernels that
    allow programmatic dependent launch still run: these kernels must not write the cache, scales or
    index tensors.

    Args:
        q: bfloat16 or float16 ``(B, Hq, D)``: one token of each sequence. D is a multiple of 16 up
            to 256, the last stride 1; other strides are free, as in a slice of the QKV projection.
            On sm_90 D is 64, 96, 128, 192 or 256, and all rows start on multiples of 16 bytes.
        key: ``(B, Hkv, D)`` of ``q``'s dtype, strides as for ``q``. Hq is a multiple of Hkv, at
            most 16 · Hkv.
        value: of ``key``'s dtype and shape.
        kv_cache: ``(pages, Hkv, page_size, 2·D)`` of ``q``'s dtype or float8_e4m3fn, a key and then
            its value; strides are free but for the last. On sm_90 ``page_size`` is a power of two
            of at least 16. Written: the slots of ``slot_mapping``.
        block_table: int32 ``(B, P)``: page ``block_table[b, i]`` holds keys ``i · page_size`` on of
            sequence b.
        seq_lens: int32 ``(B,)``, the number of keys of each sequence, including the new token's.
            0 for a padding row, as in a CUDA graph: the row's result is 0.
        slot_mapping: int64 ``(B,)``: slot of the token's key and value, ``page · page_size +
            offset``, which must be the slot of key ``seq_lens[b] - 1`` according to
            ``block_table``; negative: key and value are used in this attention but not stored.
        scale: factor of ``q · k``; None: ``D ** -0.5``.
        window: number of keys that the token sees, its own included; None: all.
        soft_cap: logits become ``soft_cap · tanh(logit / soft_cap)``.
        sinks: float32 ``(Hq,)``, a logit per head that adds to the softmax's sum and has no value.
        k_scale: float32 ``()``, with a float8_e4m3fn cache: factor that dequantises stored keys. On
            sm_90 from 2^-126 up to, not including, 2^127.
        v_scale: as ``k_scale``, for values.
        out: contiguous, of ``q``'s dtype and shape, written; None: a new tensor.

    Returns:
        ``out``.

    Raises:
        InvalidArgument: an unsupported or inconsistent argument; the message names it. The
            contents of tensors are checked on CPU only. On sm_90, a batch has at
            most 65,535 sequences.
        NoKernelError: no kernel for this device.
    """
    check_dtype("q", q, DTYPES)
    if out is None:
        out = q.new_empty(q.shape)
    called(_decode_attention, q)(
        out, q, key, value, kv_cache, block_table, seq_lens, slot_mapping, sinks, k_scale, v_scale,
        scale, window, soft_cap,
    )  # fmt: skip
    return out


@torch.library.custom_op(
    "nvfp4::decode_attention", mutates_args=("out", "kv_cache"), schema=_SCHEMA
)
def _decode_attention(*arguments: Any) -> None:
    call = DecodeCall(*arguments)
    DECODE_KERNELS.select(call.q.device, check_decode(call)).load()(call)


@_decode_attention.register_fake
def _(out: Tensor, *rest: object) -> None:
    return None
