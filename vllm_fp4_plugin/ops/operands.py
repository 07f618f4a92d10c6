"""Hand-over of a quantised input, from the op that quantised it to the layer that multiplies it.

vLLM's parallel linear layers pass what they are called with straight to their quantization method,
so that an op before one of ours may return its result as NVFP4, with the layer's own scale, in
place of a tensor. A row-parallel layer may likewise return its rank's part of a sum for a norm to
add up. What is handed over and to whom is settled once the model is built, by modules whose forward
passes were read: see ``fusion.forward_analysis``.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor


@dataclass(frozen=True)
class QuantizedInput:
    """Input of a linear layer in NVFP4, as a product's kernel reads it.

    Attributes:
        data: uint8 ``(M, K/2)``, or ``(terms, M, K/2)`` of more than one term.
        scales: float8_e4m3fn, blocked layout, as ``nvfp4_kernels.quantize`` returns it.
        row_scale: float32 ``(M,)``; None where the layer's own scale was used.
        shape: of the 16-bit tensor that this stands for, ``(..., K)``, M tokens.
        dtype: its dtype, which is that of the layer's result.
        terms: how many NVFP4 values add up to each of its elements.
    """

    data: Tensor
    scales: Tensor
    row_scale: Tensor | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    terms: int

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a layer's input was quantised by the op before it, but the model asked it for "
            f'{name!r}; serve with --additional-config \'{{"nvfp4_tc": {{"fuse_mlp": false, '
            '"fuse_norm": false, "fuse_attention": false}}\''
        )


@dataclass(frozen=True)
class Unreduced:
    """This rank's part of a row-parallel layer's result, which the norm after it adds up.

    Attributes:
        partial: ``(..., N)``; the norm's op leaves the new residual in it.
        producer: the layer's name.
    """

    partial: Tensor
    producer: str

    @property
    def shape(self) -> torch.Size:
        """Shape of the result."""
        return self.partial.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the result."""
        return self.partial.dtype

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(self._refusal(f"asked it for {name!r}"))

    def refuse(self, *operands: Any) -> NoReturn:
        """Refuse to be computed with.

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
"""What a layer of ours may be called with."""


def operand(x: Input) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Data, block scales and row scales of an input, as the custom ops take them."""
    if isinstance(x, QuantizedInput):
        return x.data, x.scales, x.row_scale
    return x, None, None


def shaped(out: Tensor, x: Input) -> Tensor:
    """Give a product of ``(M, N)`` the other dimensions of its input; one of a tensor has them."""
    if isinstance(x, QuantizedInput) and len(x.shape) != 2:
        return out.view(*x.shape[:-1], out.shape[-1])
    return out
