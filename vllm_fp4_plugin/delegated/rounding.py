"""Arithmetic of FP8, MXFP8 and MXFP4 layers: pure functions used by the references."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nvfp4_kernels.formats.nvfp4 import decode_e2m1, encode_e2m1
from vllm_fp4_plugin.formats.kind import FP8_BLOCK_SIZE, MX_BLOCK_SIZE, Kind

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
E2M1_MAX = 6.0
E8M0_BIAS = 127
E8M0_NAN = 255
_SMALLEST = torch.finfo(torch.float32).tiny


def dequantize_weight(
    kind: Kind, weight: Tensor, scale: Tensor, shard_sizes: Sequence[int]
) -> Tensor:
    """Decode a weight: float32 ``(N, K)``.

    Args:
        kind: quantization scheme.
        weight: float8_e4m3fn ``(N, K)``, or uint8 ``(N, K/2)`` of MXFP4.
        scale: scales as the checkpoint stores them; per-tensor scales as ``(S,)``, one per shard.
        shard_sizes: rows of the shards, S numbers adding up to N.
    """
    values = decode_e2m1(weight) if kind is Kind.MXFP4 else weight.float()
    if kind is Kind.FP8:
        scale = torch.cat([one.expand(n) for one, n in zip(scale, shard_sizes, strict=True)])
        return values * scale.unsqueeze(-1)
    if kind is Kind.FP8_CHANNEL:
        return values * scale.float().view(-1, 1)
    if kind is Kind.FP8_BLOCK:
        blocks = scale.float().view(-1, -(-values.shape[1] // FP8_BLOCK_SIZE))
        rows = blocks.repeat_interleave(FP8_BLOCK_SIZE, 0)[: values.shape[0]]
        return values * rows.repeat_interleave(FP8_BLOCK_SIZE, 1)[:, : values.shape[1]]
    steps = torch.exp2(scale.float() - E8M0_BIAS)
    return values * steps.repeat_interleave(MX_BLOCK_SIZE, 1)


def round_static(x: Tensor, scale: Tensor) -> Tensor:
    """Round ``(..., K)`` to E4M3 under one calibrated ``scale``, saturating; returns float32."""
    return _e4m3(x.float() / scale) * scale


def round_dynamic(kind: Kind, x: Tensor) -> Tensor:
    """Round ``(..., K)`` with the dynamic scales of a scheme; returns float32."""
    if kind in (Kind.FP8, Kind.FP8_CHANNEL):
        return _round_blocks(x, x.shape[-1])
    if kind is Kind.FP8_BLOCK:
        return _round_blocks(x, FP8_BLOCK_SIZE)
    return _round_mx(x, E2M1_MAX if kind is Kind.MXFP4 else E4M3_MAX)


def _e4m3(values: Tensor) -> Tensor:
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def _round_blocks(x: Tensor, size: int) -> Tensor:
    blocks = x.float().unflatten(-1, (-1, size))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=_SMALLEST) / E4M3_MAX
    return (_e4m3(blocks / scale) * scale).flatten(-2)


def _round_mx(x: Tensor, largest: float) -> Tensor:
    """Round to E4M3 or E2M1 with power-of-two block scales, the smallest that do not saturate.

    ``largest``: largest value of the format.
    """
    blocks = x.float().unflatten(-1, (-1, MX_BLOCK_SIZE))
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=_SMALLEST)
    step = torch.exp2(torch.ceil(torch.log2(amax / largest)))
    scaled = blocks / step
    rounded = _e4m3(scaled) if largest == E4M3_MAX else decode_e2m1(encode_e2m1(scaled))
    return (rounded * step).flatten(-2)
