"""Random draws of a seed: numbers, tensors of every magnitude, views with every stride."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3 = torch.float8_e4m3fn


class Draw:
    """Random choices of one seed.

    Attributes:
        rng: source of the choices.
        gpu: whether the draws are for an sm_100 kernel, which makes them small and aligned as the
            kernel requires.
    """

    def __init__(self, rng: np.random.Generator, gpu: bool = False) -> None:
        self.rng = rng
        self.gpu = gpu

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def one(self, *options: T) -> T:
        return options[int(self.rng.integers(len(options)))]

    def number(self, low: int, high: int) -> int:
        """Number from ``low`` to ``high``, inclusive; one draw in five is an end of the range."""
        if self.chance(0.2):
            return self.one(low, high)
        return int(self.rng.integers(low, high + 1))

    def lengths(self, count: int, low: int, high: int) -> list[int]:
        return [self.number(low, high) for _ in range(count)]

    def batch(self) -> tuple[int, ...]:
        """Leading dimensions of rows."""
        return self.one((), (), (), (1,), (2,), (0,), (2, 1), (1, 3))

    def floats(self, shape: Sequence[int], dtype: torch.dtype, octaves: int = 6) -> Tensor:
        """Normal values; rows scaled by up to 2^±``octaves``, some rows and elements zero."""
        sizes = 2.0 ** self.rng.uniform(-octaves, octaves, (*shape[:-1], 1))
        values = self.rng.standard_normal(shape) * sizes
        if self.chance(0.3):
            values = values * (self.rng.random((*shape[:-1], 1)) > 0.3)
        if self.chance(0.3):
            values = values * (self.rng.random(shape) > 0.5)
        return torch.from_numpy(np.asarray(values)).to(dtype)

    def extremes(self, x: Tensor) -> Tensor:
        """Copy of ``x`` with an occasional element at an end of the range, NaN or infinity."""
        if x.numel() and self.chance(0.2):
            info = torch.finfo(x.dtype)
            what = self.one(info.max, -info.max, info.tiny, info.tiny / 4, torch.nan, torch.inf)
            x.view(-1)[int(self.rng.integers(x.numel()))] = what
        return x

    def scalar(self, usual: float) -> Tensor:
        """A float32 scale, positive and finite; one draw in five from the ends of the range."""
        if self.chance(0.2):
            return torch.tensor(self.one(2.0**-126, 1e-30, 1.0, 1e20, 3e38), dtype=FP32)
        return torch.tensor(usual * 2.0 ** self.rng.uniform(-4, 4), dtype=FP32)

    def integers(self, low: int, high: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.asarray(self.rng.integers(low, high, shape))).to(dtype)

    # --- strides ------------------------------------------------------------------------------

    def rows(self, x: Tensor) -> Tensor:
        """Values of ``x``, occasionally in rows of a wider tensor, with last stride 1."""
        if x.ndim < 2 or not self.chance(0.4):
            return self.odd(x)
        # Row offsets of 64 bytes keep the alignment that a GPU kernel needs.
        step = 64 // x.element_size()
        apart = step * self.number(1, 2) if self.gpu else self.number(1, 40)
        before = step * self.number(0, 1) if self.gpu else self.number(0, apart)
        wider = x.new_full((*x.shape[:-1], x.shape[-1] + apart + before), 7)
        view = wider[..., before : before + x.shape[-1]]
        view.copy_(x)
        return self.odd(view)

    def heads(self, x: Tensor) -> Tensor:
        """Values of ``x`` ``(..., H, D)``, occasionally among the heads of a wider projection."""
        if not self.chance(0.5):
            return self.odd(x)
        wider = torch.cat([x, x[..., :1, :], x], -2)
        return self.odd(wider[..., x.shape[-2] + 1 :, :])

    def strided(self, x: Tensor) -> Tensor:
        """Values of ``x`` with any strides that the op accepts."""
        if self.gpu or not x.ndim or not self.chance(0.4):
            return self.rows(x)
        if x.ndim > 1 and self.chance(0.5):
            return x.mT.contiguous().mT
        apart = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), 7)
        apart[..., ::2] = x
        return apart[..., ::2]

    def odd(self, x: Tensor) -> Tensor:
        """Tensor ``x``, occasionally with an arbitrary stride in a dimension of size 1."""
        if 1 not in x.shape[:-1] or not self.chance(0.5):
            return x
        strides = [
            self.one(0, 1, 3, 1 << 40) if size == 1 and dim < x.ndim - 1 else stride
            for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True))
        ]
        return x.as_strided(x.shape, strides)
