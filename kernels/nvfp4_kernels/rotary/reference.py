"""``rotary_embedding`` in torch: the reference, which is also the CPU kernel."""

from torch import Tensor


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.rotary.op.rotary_embedding``."""
    cos, sin = cos_sin_cache[positions].float().unsqueeze(1).chunk(2, -1)
    return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate elements R/2 apart in each head, in float32, by R/2 cosines and sines per token."""
    half = cos.shape[-1]
    low, high = x[..., :half].float(), x[..., half : 2 * half].float()
    out = x.new_empty(x.shape)
    out[..., :half] = low * cos - high * sin
    out[..., half : 2 * half] = high * cos + low * sin
    out[..., 2 * half :] = x[..., 2 * half :]
    return out
