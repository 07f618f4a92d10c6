"""``rotary_store`` in torch: the reference, which is also the CPU kernel."""

import torch
from torch import Tensor

from nvfp4_kernels.rotary.reference import rotate
from nvfp4_kernels.rotary.store.call import RotaryStoreCall

E4M3 = torch.float8_e4m3fn
E4M3_MAX = torch.finfo(E4M3).max
PIECE = 8  # elements that are added up one after the other


def rotary_store(call: RotaryStoreCall) -> None:
    """See ``nvfp4_kernels.rotary.store.op.rotary_store``."""
    tokens, rotary_dim = len(call.slot_mapping), call.cos_sin_cache.shape[1]
    q, k, v, positions = (x[:tokens] for x in (call.q, call.k, call.v, call.positions))
    cos, sin = call.cos_sin_cache[positions].float().unsqueeze(1).chunk(2, -1)
    if call.q_norm is not None and call.eps is not None:
        q = normalise(q, call.q_norm, call.eps, rotary_dim)
    if call.k_norm is not None and call.eps is not None:
        k = normalise(k, call.k_norm, call.eps, rotary_dim)
    turn = rotate if call.neox else rotate_neighbours
    call.out[:tokens] = turn(q, cos, sin)
    store(turn(k, cos, sin), v, call.kv_cache, call.slot_mapping, call.k_scale, call.v_scale)


def normalise(x: Tensor, weight: Tensor, eps: float, rotary_dim: int) -> Tensor:
    """RMSNorm of every head, with the roundings of ``nvfp4_kernels.norm.reference.rms_norm``.

    ``rotary_dim``: see ``sum_of_squares``.
    """
    mean = sum_of_squares(x.float(), rotary_dim).unsqueeze(-1) / x.shape[-1]
    inverse = torch.rsqrt(mean + eps)
    return ((x.float() * inverse).to(weight.dtype) * weight).to(x.dtype)


def sum_of_squares(x: Tensor, rotary_dim: int) -> Tensor:
    """Sum of squares over the last dimension in float32, in the order of the kernel's threads.

    The rotated part of a head and the rest are each cut into groups of 16, the elements of one
    thread: 8 elements, and the 8 elements half a part further on. Squares are added one by one
    within a group; then the sums of neighbouring groups are added pairwise.
    """
    squares, head_dim = x.square(), x.shape[-1]
    if head_dim % (2 * PIECE) or rotary_dim % (2 * PIECE):
        return squares.sum(-1)  # no kernel takes such heads
    parts = squares.split((rotary_dim, head_dim - rotary_dim), -1)
    groups = torch.cat(
        [part.unflatten(-1, (2, -1, PIECE)).movedim(-3, -2).flatten(-2) for part in parts], -2
    )
    total = groups[..., 0]
    for n in range(1, 2 * PIECE):
        total = total + groups[..., n]
    while (count := total.shape[-1]) > 1:
        even = torch.nn.functional.pad(total, (0, count % 2))
        total = even[..., ::2] + even[..., 1::2]
    return total.squeeze(-1)


def rotate_neighbours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of neighbouring elements; arguments are as for ``rotate``."""
    half = cos.shape[-1]
    apart = torch.cat((x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2], x[..., 2 * half :]), -1)
    turned = rotate(apart, cos, sin)
    pairs = turned[..., : 2 * half].unflatten(-1, (2, half)).mT.flatten(-2)
    return torch.cat((pairs, turned[..., 2 * half :]), -1)


def store(
    k: Tensor,
    v: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Store keys and values in the slots of ``slot_mapping``; skip tokens with negative slots."""
    pairs = torch.cat((stored(k, k_scale), stored(v, v_scale)), -1)
    live = slot_mapping >= 0
    slots, page_size = slot_mapping[live], kv_cache.shape[2]
    by_slot = kv_cache.transpose(1, 2)  # (pages, page_size, Hkv, 2·D)
    if kv_cache.dtype == E4M3:
        by_slot = by_slot.view(torch.uint8)
    by_slot[slots // page_size, slots % page_size] = pairs[live]


def stored(x: Tensor, scale: Tensor | None) -> Tensor:
    """``x`` as the cache stores it: unchanged without a scale, else quantised to E4M3, as uint8."""
    if scale is None:
        return x
    # Not every version of torch saturates by itself.
    return (x.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3).view(torch.uint8)
