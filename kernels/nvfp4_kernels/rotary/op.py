"""``rotary_embedding``: rotate queries and keys by their tokens' positions."""

import torch
from torch import Tensor

from nvfp4_kernels.checks import (
    InvalidArgument,
    check_dtype,
    check_same_device,
    check_shape,
    reads_contents,
)
from nvfp4_kernels.dispatch import called
from nvfp4_kernels.rotary.kernels import DTYPES, KERNELS


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the tokens' positions; inputs are not modified.

    Element i < R/2 of a head is paired with element i + R/2, as in GPT-NeoX, and in vLLM's
    ``RotaryEmbedding`` with ``is_neox_style``::

        out[i]       = x[i]       · cos[i] - x[i + R/2] · sin[i]
        out[i + R/2] = x[i + R/2] · cos[i] + x[i]       · sin[i]

    Elements from R on are copied. The arithmetic is float32, with one rounding of the result.

    On sm_90 ``positions`` and ``cos_sin_cache`` may be read while preceding kernels that allow
    programmatic dependent launch still run: these kernels must not write either tensor. The kernel
    after this op may start while the kernel before this op still runs.

    Args:
        positions: int64 ``(M,)``, contiguous: the row of ``cos_sin_cache`` for each token, from 0
            to P - 1 (checked on CPU only).
        q: bfloat16 or float16 ``(M, Hq, D)``, the last stride 1; other strides are free, as in a
            slice of the QKV projection. On sm_90 D is a multiple of 8 up to 1024, and all rows
            start on multiples of 16 bytes.
        k: ``(M, Hkv, D)`` of ``q``'s dtype, strides as for ``q``.
        cos_sin_cache: ``(P, R)`` of ``q``'s dtype, contiguous: R/2 cosines and then R/2 sines. R is
            even, from 2 to D. On sm_90 R is a multiple of 16, and the cache is 16-byte aligned.

    Returns:
        ``q_out`` and ``k_out``: new contiguous tensors of ``q``'s and ``k``'s shapes and dtype.

    Raises:
        InvalidArgument: an unsupported or inconsistent argument; the message names it.
        NoKernelError: no kernel for this device.
    """
    return called(_rotary_embedding, q)(positions, q, k, cos_sin_cache)


def _check(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor) -> None:
    check_dtype("q", q, DTYPES)
    _check_heads("q", q, "(M, Hq, D)")
    tokens, _, head_dim = q.shape
    check_dtype("k", k, (q.dtype,))
    _check_heads("k", k, "(M, Hkv, D)")
    expected = (tokens, k.shape[1], head_dim)
    check_shape("k", k, expected, "a row per row of q, heads as wide as q's")
    check_dtype("positions", positions, (torch.int64,))
    check_shape("positions", positions, (tokens,), "one position per row of q")
    _check_contiguous("positions", positions)
    check_dtype("cos_sin_cache", cos_sin_cache, (q.dtype,))
    if cos_sin_cache.ndim != 2:
        raise InvalidArgument(
            f"cos_sin_cache: shape is {tuple(cos_sin_cache.shape)}, must be (P, R): a row of R/2 "
            "cosines and R/2 sines per position; reshape it"
        )
    rotary_dim = cos_sin_cache.shape[1]
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise InvalidArgument(
            f"cos_sin_cache: R is {rotary_dim}, must be even and from 2 to {head_dim}, q's D; give "
            "a row R/2 cosines and R/2 sines"
        )
    _check_contiguous("cos_sin_cache", cos_sin_cache)
    check_same_device(q=q, positions=positions, k=k, cos_sin_cache=cos_sin_cache)
    if reads_contents(q):
        _check_positions(positions, len(cos_sin_cache))


def _check_heads(name: str, x: Tensor, shape: str) -> None:
    if x.ndim != 3:
        raise InvalidArgument(
            f"{name}: shape is {tuple(x.shape)}, must be {shape}; view it as heads of D elements"
        )
    if x.numel() and x.stride(-1) != 1:
        raise InvalidArgument(
            f"{name}: strides are {x.stride()}, the last must be 1; call contiguous() on it"
        )


def _check_contiguous(name: str, x: Tensor) -> None:
    if not x.is_contiguous():
        raise InvalidArgument(
            f"{name}: strides are {x.stride()} for shape {tuple(x.shape)}, must be contiguous; "
            "call contiguous() on it"
        )


def _check_positions(positions: Tensor, count: int) -> None:
    wrong = positions[(positions < 0) | (positions >= count)]
    if wrong.numel():
        raise InvalidArgument(
            f"positions: holds {wrong[0]}, must be from 0 to {count - 1}, the rows of "
            "cos_sin_cache; make the cache for as many positions as the model has"
        )


@torch.library.custom_op("nvfp4::rotary_embedding", mutates_args=())
def _rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor
) -> tuple[Tensor, Tensor]:
    _check(positions, q, k, cos_sin_cache)
    return KERNELS.select(q.device, "float").load()(positions, q, k, cos_sin_cache)


@_rotary_embedding.register_fake
def _(positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)
