"""``rotary_store``: QK norm, rotary embedding and KV-cache store in one launch."""

from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.checks import check_dtype
from nvfp4_kernels.dispatch import called
from nvfp4_kernels.heads import DTYPES
from nvfp4_kernels.rotary.store.arguments import check_out_of, check_rotary_store
from nvfp4_kernels.rotary.store.call import RotaryStoreCall
from nvfp4_kernels.rotary.store.kernels import KERNELS

_SCHEMA = (
    "(Tensor(a!) out, Tensor q, Tensor k, Tensor v, Tensor positions, Tensor cos_sin_cache, "
    "Tensor(b!) kv_cache, Tensor slot_mapping, Tensor? q_norm, Tensor? k_norm, Tensor? k_scale, "
    "Tensor? v_scale, bool neox, float? eps) -> ()"
)


def rotary_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    neox: bool = True,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Normalise and rotate queries and keys; store keys and values in the paged cache.

    One launch replaces two norms, ``rotary_embedding`` and a store, with the same roundings. With a
    norm, each head of queries or keys is divided by ``sqrt(mean(x²) + eps)`` in float32, rounded to
    the weight's dtype, multiplied by the weight and rounded to ``q``'s dtype. The first R elements
    are then rotated in pairs, in float32 with one rounding; the other elements are copied::

        out[a] = x[a] · cos[i] - x[b] · sin[i]    with neox:    a = i,   b = i + R/2
        out[b] = x[b] · cos[i] + x[a] · sin[i]    without neox: a = 2·i, b = 2·i + 1

    The summation order of the mean depends on D and R alone: a head's result depends, to the bit,
    on the head alone. For an E4M3 cache the rotated key, rounded to 16 bits, and the value are
    divided by ``k_scale`` and ``v_scale`` in float32, and rounded to nearest even, saturating at
    ±448.

    The call does not synchronise with the device: a CUDA graph may capture it. On a GPU the norms'
    weights may be read while preceding kernels that allow programmatic dependent launch still run:
    these kernels must not write the weights. The kernel after this op may start while the kernel
    before this op still runs, and must wait before reading the cache: ``paged_attention`` waits,
    ``decode_attention`` on sm_90 does not.

    Args:
        q: bfloat16 or float16 ``(≥ T, Hq, D)``, D a multiple of 16 up to 256, the last stride 1;
            other strides are free, as in a slice of the QKV projection. Rows from T (the length of
            ``slot_mapping``) on are padding and never read, also in ``k``, ``v`` and ``positions``.
            On a GPU all rows are 16-byte aligned.
        k: ``(≥ T, Hkv, D)`` of ``q``'s dtype, strides as for ``q``; Hq is a multiple of Hkv.
        v: values ``(≥ T, Hkv, D)``; dtype and strides as for ``k``.
        positions: int64 or int32 ``(≥ T,)``, contiguous: the row of ``cos_sin_cache`` for each
            token, including tokens without a slot, from 0 to P - 1 (checked on CPU only).
        cos_sin_cache: ``(P, R)`` of ``q``'s dtype or float32, contiguous: R/2 cosines and then R/2
            sines. R is even, from 2 to D; on a GPU a multiple of 16, and the cache is 16-byte
            aligned.
        kv_cache: ``(pages, Hkv, page_size, 2·D)`` of ``q``'s dtype or float8_e4m3fn, a key and then
            its value; strides are free but for the last, on a GPU multiples of 16 bytes. Written:
            the slots of ``slot_mapping``.
        slot_mapping: int64 ``(T,)``, contiguous: ``page · page_size + offset`` of each token's key
            and value; negative: not stored. If several tokens share a slot, the stored token is
            undefined. The upper bound is checked on CPU only.
        neox: whether the elements of a pair are R/2 apart, as in GPT-NeoX and Llama, or neighbours,
            as in GPT-J.
        q_norm: RMSNorm's weight ``(D,)`` for heads of queries, of ``q``'s dtype or float32,
            contiguous; None: no norm. For a norm that multiplies by 1 + weight, pass that sum in
            float32.
        k_norm: as ``q_norm``, for keys; of the same dtype if both are given.
        eps: number added to the mean square, 0 or more; required with a norm, else None.
        k_scale: float32 ``()``, with a float8_e4m3fn cache: factor that dequantises stored keys. On
            a GPU in [2^-126, 2^127).
        v_scale: as ``k_scale``, for values.
        out: contiguous, of ``q``'s dtype and shape, written; may be ``q`` itself if contiguous, and
            must not overlap another argument. None: a new tensor.

    Returns:
        ``out``: the rotated queries. Rows from T on are not written, and so undefined in a new
        tensor.

    Raises:
        InvalidArgument: an unsupported or inconsistent argument; the message names it.
        NoKernelError: no kernel for this device.
    """
    check_dtype("q", q, DTYPES)
    tensors = (
        q, k, v, positions, cos_sin_cache, kv_cache, slot_mapping, q_norm, k_norm, k_scale, v_scale,
    )  # fmt: skip
    out = q.new_empty(q.shape) if out is None else out
    called(_rotary_store, q, compared=(("out", "q"),))(out, *tensors, neox, eps)
    return out


@torch.library.custom_op("nvfp4::rotary_store", mutates_args=("out", "kv_cache"), schema=_SCHEMA)
def _rotary_store(*arguments: Any) -> None:
    call = RotaryStoreCall(*arguments)
    mode = check_rotary_store(call)
    check_out_of(call.out, call.q)
    KERNELS.select(call.q.device, mode).load()(call)


@_rotary_store.register_fake
def _(out: Tensor, *rest: object) -> None:
    return None
