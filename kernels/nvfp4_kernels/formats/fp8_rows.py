"""Activations in E4M3 for products with folded weights, and the order of their elements.

A row of K elements is stored in ceil(K/64) groups of 64 bytes; elements past K are zeros. Within a
group, byte ``16 · (i % 8 // 2) + 4 · c + 2 · (i % 2) + i // 8`` holds element ``16 · c + i``, where
``i`` is 0 to 15. In this order a thread's operands of two FP8 ``wgmma`` instructions along K are
one block of 16 weights per row of the weight, which share a block scale (see ``formats.folded``).

An element is its value divided by a scale, rounded to nearest even, saturating at ±448. The scale
is one number for all tokens, or one per token: the token's largest magnitude divided by 448.
"""

import functools

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument

GROUP = 64  # elements that are permuted among themselves
FP8_MAX = 448.0
SMALLEST_TOKEN_SCALE = 2.0**-126  # the reciprocal is finite and normal


def padded(k: int) -> int:
    """Number of bytes of a row of ``k`` elements: a multiple of 64."""
    return -(-k // GROUP) * GROUP


@functools.cache
def group_order() -> tuple[int, ...]:
    """Element of a group that each of its 64 bytes holds."""
    element = {_byte(16 * c + i): 16 * c + i for c in range(4) for i in range(16)}
    return tuple(element[byte] for byte in range(GROUP))


def _byte(element: int) -> int:
    c, i = divmod(element, 16)
    return 16 * (i % 8 // 2) + 4 * c + 2 * (i % 2) + i // 8


def new_rows(x: Tensor, k: int) -> Tensor:
    """Allocate E4M3 rows of ``k`` elements, as many as ``x`` ``(..., M, …)`` has."""
    return x.new_empty((*x.shape[:-1], padded(k)), dtype=torch.float8_e4m3fn)


def quantize_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Quantise activations to E4M3.

    Args:
        x: bfloat16, float16 or float32 ``(..., M, K)``.
        scale: float32 ``()``, or one per row ``(..., M)``: the value of E4M3's 1.0.

    Returns:
        float8_e4m3fn ``(..., M, ceil(K/64)·64)``, each element ``x · (1 / scale)``. NaN becomes
        0x7F, whatever its sign.
    """
    inverse = scale.reciprocal()
    values = x.float() * (inverse if inverse.ndim == 0 else inverse.unsqueeze(-1))
    values = torch.where(values.isnan(), torch.nan, values.clamp(-FP8_MAX, FP8_MAX))
    return to_rows(values.to(torch.float8_e4m3fn))


def token_scales(x: Tensor) -> Tensor:
    """Scale of each row, ``max|row| / 448``, float32 ``(..., M)``; 1 for zeros, or with a NaN."""
    amax = x.abs().amax(-1).float()
    scale = (amax / amax.new_tensor(FP8_MAX)).clamp(min=SMALLEST_TOKEN_SCALE)
    return torch.where(amax > 0, scale, 1.0)


def to_rows(values: Tensor) -> Tensor:
    """Bring float8_e4m3fn ``(..., K)`` into the stored order, padded with zeros."""
    k = values.shape[-1]
    raw = torch.nn.functional.pad(values.view(torch.uint8), (0, padded(k) - k))
    groups = raw.unflatten(-1, (-1, GROUP))
    return groups[..., list(group_order())].flatten(-2).view(torch.float8_e4m3fn)


def from_rows(rows: Tensor, k: int) -> Tensor:
    """Undo ``to_rows``: float8_e4m3fn ``(..., k)``.

    Raises:
        InvalidArgument: rows of ``k`` elements have another number of bytes.
    """
    if rows.shape[-1] != padded(k):
        raise InvalidArgument(
            f"rows: shape is {tuple(rows.shape)}, must be (..., {padded(k)}) for K = {k}; make "
            "them with quantize_fp8()"
        )
    inverse = sorted(range(GROUP), key=group_order().__getitem__)
    groups = rows.view(torch.uint8).unflatten(-1, (-1, GROUP))
    return groups[..., inverse].flatten(-2)[..., :k].contiguous().view(torch.float8_e4m3fn)
