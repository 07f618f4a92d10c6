"""Formats of the indexer's vectors of D elements: queries of one head, and keys of all heads.

======  ==============  ==================================  ======================
format  data            scales                              bytes of a key, D = 128
======  ==============  ==================================  ======================
nvfp4   uint8 (D/2)     float8_e4m3fn (D/16)                64 + 8 = 72
mxfp4   uint8 (D/2)     float8_e8m0fnu (D/32)               64 + 4 = 68
fp8     float8_e4m3fn   float32 (), a power of two          128 + 4 = 132
bf16    bfloat16        none                                256
======  ==============  ==================================  ======================

E2M1 codes lie two per byte, the low nibble first, and scales in the order of their blocks.

A page of a cache holds the data of ``block_size`` keys, then the scales of these keys:
``[block_size · data bytes][block_size · scale bytes]``, as in vLLM's indexer caches. Pages of mxfp4
and fp8 equal vLLM's byte for byte; pages of nvfp4 have the same layout.

An NVFP4 vector is the stored vector times a global scale, which decoding and scoring leave out. One
global scale for all queries and one for all keys scale all scores alike and do not change the order
of scores; for scores in the units of the inputs, multiply the heads' weights by both global scales.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.formats.nvfp4 import (
    BLOCK_SIZE,
    E2M1_MAX,
    E4M3_MAX,
    decode_e2m1,
    encode_e2m1,
    quantize_activation,
)

Name = Literal["nvfp4", "mxfp4", "fp8", "bf16"]

MXFP4_BLOCK = 32
E8M0_BIAS = 127
# Floors of the amax, as in vLLM's kernels; they give a block of zeros its scale.
MXFP4_LEAST = E2M1_MAX * 2.0**-126
FP8_LEAST = 1e-4


@dataclass(frozen=True)
class Format:
    """Format of vectors.

    Attributes:
        name: name of the format, and mode in the kernel tables.
        data_dtype: dtype of the stored data.
        packed: number of a vector's elements per stored element.
        scale_dtype: dtype of the scales; None: no scales.
        block: number of elements per scale; 0: one scale for the whole vector, if any.
    """

    name: Name
    data_dtype: torch.dtype
    packed: int = 1
    scale_dtype: torch.dtype | None = None
    block: int = 0

    def data_shape(self, head_dim: int) -> tuple[int, ...]:
        """Shape of one vector's data."""
        return (head_dim // self.packed,)

    def scale_shape(self, head_dim: int) -> tuple[int, ...]:
        """Shape of one vector's scales; ``()`` for a single scale, and for bf16, without scales."""
        return (head_dim // self.block,) if self.block else ()

    def data_bytes(self, head_dim: int) -> int:
        """Bytes of one vector's data."""
        return head_dim // self.packed * self.data_dtype.itemsize

    def scale_bytes(self, head_dim: int) -> int:
        """Bytes of one vector's scales; 0 if the format has none."""
        if self.scale_dtype is None:
            return 0
        return (head_dim // self.block if self.block else 1) * self.scale_dtype.itemsize

    def page_bytes(self, head_dim: int, block_size: int) -> int:
        """Bytes of a page of ``block_size`` keys."""
        return block_size * (self.data_bytes(head_dim) + self.scale_bytes(head_dim))

    def empty(self, like: Tensor, shape: tuple[int, ...], head_dim: int) -> list[Tensor]:
        """Allocate data, and scales if any, of ``shape`` vectors on the device of ``like``."""
        data = like.new_empty((*shape, *self.data_shape(head_dim)), dtype=self.data_dtype)
        if self.scale_dtype is None:
            return [data]
        scales = like.new_empty((*shape, *self.scale_shape(head_dim)), dtype=self.scale_dtype)
        return [data, scales]


_FORMATS = {
    f.name: f
    for f in (
        Format("nvfp4", torch.uint8, 2, torch.float8_e4m3fn, BLOCK_SIZE),
        Format("mxfp4", torch.uint8, 2, torch.float8_e8m0fnu, MXFP4_BLOCK),
        Format("fp8", torch.float8_e4m3fn, 1, torch.float32),
        Format("bf16", torch.bfloat16),
    )
}


def format_of(name: str) -> Format:
    """Format named ``name``.

    Raises:
        InvalidArgument: no such format.
    """
    for known, found in _FORMATS.items():
        if known == name:
            return found
    raise InvalidArgument(f"fmt: is {name!r}, must be {', '.join(_FORMATS)}; choose one")


def quantize(fmt: Format, x: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Quantise vectors ``(..., D)`` to data and scales in ``fmt``; bf16 has no scales.

    NaN propagates to the scores: a NaN makes a scale NaN, or is kept in bf16. Infinity saturates in
    E2M1 and becomes NaN in FP8.
    """
    if fmt.name == "bf16":
        return x.clone(memory_format=torch.contiguous_format), None
    if fmt.name == "fp8":
        return _quantize_fp8(x.float())
    if fmt.name == "mxfp4":
        return _quantize_mxfp4(x.float())
    assert global_scale is not None
    return quantize_activation(x, global_scale)


def decode(fmt: Format, data: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Decode vectors to float32 ``(..., D)``; also return FP8's scales ``(...,)``, else None.

    An FP8 vector's single scale is left to the caller, who multiplies dot products by it; block
    scales are applied. Values are exact: E2M1 times a block scale has at most six significant bits.
    """
    if fmt.packed == 1:
        return _widen(data), scales
    assert scales is not None
    blocks = decode_e2m1(data).unflatten(-1, (-1, fmt.block))
    return (blocks * _widen(scales).unsqueeze(-1)).flatten(-2), None


def _widen(x: Tensor) -> Tensor:
    """Convert to float32."""
    if x.dtype != torch.float8_e4m3fn:
        return x.float()
    # torch converts E4M3 on CPU element by element, seven times slower than a table.
    codes = torch.arange(256, dtype=torch.uint8, device=x.device)
    values = codes.view(torch.float8_e4m3fn).float()
    return values.index_select(0, x.view(torch.uint8).flatten().int()).view(x.shape)


def _quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise as ``indexer_k_quant_and_cache`` of vLLM 0.32 does with "ue8m0".

    vLLM 0.32's indexer uses no other scale format. The scale is ``2^ceil(log2(max(max|x|, 1e-4) /
    448))`` in float32. vLLM's CUDA layer of DeepSeek V3.2 also quantises queries with 1e-4; vLLM's
    generic ``deepseek_v2.Indexer`` quantises queries with 1e-10, which gives a query with
    ``max|x|`` below 1e-4 a smaller scale and nearly the same dequantised values.
    """
    amax = x.abs().amax(-1)
    exponent = _exponent(amax.clamp(min=FP8_LEAST), E4M3_MAX)
    scales = torch.where(amax.isfinite(), _power_of_two(exponent), amax)
    return (x / scales.unsqueeze(-1)).to(torch.float8_e4m3fn), scales


def _quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise as ``_quantize_mxfp4_pair`` of vLLM 0.32 does with DeepSeek V4's indexer queries.

    The scale is ``2^ceil(log2(max|x| / 6))``, so that no finite value saturates. Rounding the
    exponent down, as OCP's MX specification 1.0 does in section 6.3, would clip values from 6 to 8
    times the scale.
    """
    blocks = x.unflatten(-1, (-1, MXFP4_BLOCK))
    amax = blocks.abs().amax(-1)
    exponent = _exponent(amax.clamp(min=MXFP4_LEAST), E2M1_MAX)
    exponent = exponent.where(~amax.isinf(), E8M0_BIAS)
    codes = (exponent + E8M0_BIAS).where(~amax.isnan(), 255).to(torch.uint8)
    step = _power_of_two(exponent).unsqueeze(-1)
    return encode_e2m1((blocks / step).flatten(-2)), codes.view(torch.float8_e8m0fnu)


def _exponent(amax: Tensor, largest: float) -> Tensor:
    """Least integer n with ``amax <= largest · 2^n``, int32; exact, unlike a logarithm."""
    bound = torch.frexp(amax.new_tensor(largest))
    mantissa, exponent = torch.frexp(amax)
    return exponent - bound.exponent + (mantissa > bound.mantissa)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Float32 ``2^exponent`` for exponents from −126 to 127, assembled from bits."""
    return ((exponent + 127) << 23).to(torch.int32).view(torch.float32)
