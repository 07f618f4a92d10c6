"""Quantised activations and partial sums that an op passes to the next layer or norm.

vLLM's parallel linear layers pass the input straight to the quantization method, so an op before a
layer of ours may return NVFP4, quantised for that layer, in place of a 16-bit tensor. Likewise a
row-parallel layer may return its rank's partial sum for a norm to all-reduce. Producers and
consumers are matched once the model is built, by escape analysis of forward passes: see
``fusion.forward_analysis``.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor


@dataclass(frozen=True)
class QuantizedInput:
    """Input of a linear layer in NVFP4 or E4M3, in the layout of a GEMM kernel.

    Attributes:
        data: uint8 ``(M, K/2)``, or ``(terms, M, K/2)`` for several terms; or float8_e4m3fn
            ``(M, K)``, K padded, in the order of ``nvfp4_kernels.formats.fp8_rows``.
        scales: float8_e4m3fn, blocked layout, as returned by ``nvfp4_kernels.quantize``; None of
            E4M3.
        row_scale: float32 ``(M,)``; None if the layer's own scale was used.
        shape: shape of the represented 16-bit tensor, ``(..., K)``, with M rows in total.
        dtype: dtype of the represented tensor, and of the layer's result.
        terms: number of NVFP4 values whose sum represents each element; 1 of E4M3.
    """

    data: Tensor
    scales: Tensor | None
    row_scale: Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    terms: int

    @property
    def is_fp8(self) -> bool:
        """Whether the data are E4M3, instead of NVFP4."""
        return self.scales is None

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a layer's input was quantised by the op before it, but the model asked it for "
            f'{name!r}; serve with --additional-config \'{{"nvfp4_tc": {{"fuse_mlp": false, '
            '"fuse_norm": false, "fuse_attention": false}}\''
        )


@dataclass(frozen=True)
class Unreduced:
    """Partial sum of a row-parallel layer on this rank, to be all-reduced by the next norm.

    Attributes:
        partial: 16-bit ``(..., N)``; the norm's op overwrites this tensor with the new residual.
        producer: name of the row-parallel layer.
    """

    partial: Tensor
    producer: str

    @property
    def shape(self) -> torch.Size:
        """Shape of the layer's result, which is also the shape of ``partial``."""
        return self.partial.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the layer's result, which is also the dtype of ``partial``."""
        return self.partial.dtype

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(self._refusal(f"asked it for {name!r}"))

    def refuse(self, *operands: Any) -> NoReturn:
        """Refuse any arithmetic.

        Raises:
            TypeError: always.
        """
        raise TypeError(self._refusal("computed with it"))

    __add__ = __radd__ = __mul__ = __rmul__ = __getitem__ = refuse

    def _refusal(self, what: str) -> str:
        return (
            f"{self.producer}: its result was to be added up over all ranks by the norm after it, "
            f"but the model {what}; serve with --additional-config "
            '\'{"nvfp4_tc": {"fuse_norm": false}}\''
        )


Input = Tensor | QuantizedInput
"""Types of the argument of a linear layer of ours."""


def operand(x: Input) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Data, block scales and row scales of an input, as arguments of the custom ops."""
    if isinstance(x, QuantizedInput):
        return x.data, x.scales, x.row_scale
    return x, None, None


def shaped(out: Tensor, x: Input) -> Tensor:
    """View the result ``(M, N)`` of a quantised input with the input's leading dimensions.

    If ``x`` is a tensor, the result already has these dimensions.
    """
    if isinstance(x, QuantizedInput) and len(x.shape) != 2:
        return out.view(*x.shape[:-1], out.shape[-1])
    return out
