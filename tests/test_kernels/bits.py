"""Bitwise comparison of results on any device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def bits(x: Tensor) -> Tensor:
    """Bytes of ``x``, on the CPU."""
    return x.cpu().contiguous().view(torch.uint8)


def check_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Assert equal dtypes, shapes and bits."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        torch.testing.assert_close(bits(ours), bits(theirs), rtol=0, atol=0)
