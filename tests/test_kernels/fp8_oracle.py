"""Second implementation of E4M3 rows, in NumPy: values from ml_dtypes, places from the description.

Element ``16·c + i`` of a group of 64 is byte ``16 · (i % 8 // 2) + 4·c + 2 · (i % 2) + i // 8``.
"""

import numpy as np
import torch
from torch import Tensor

from tests.test_kernels.oracle import E4M3, Float64, float64

F32 = np.float32
NAN = 0x7F


def byte_of(element: int) -> int:
    """Byte of a row in which ``element`` is stored."""
    c, i = element % 64 // 16, element % 16
    return element // 64 * 64 + 16 * (i % 8 // 2) + 4 * c + 2 * (i % 2) + i // 8


def rows(x: Tensor, scale: Tensor) -> Tensor:
    """E4M3 rows of ``x`` ``(..., M, K)`` with a scale ``()`` or ``(..., M)``, as stored."""
    k = x.shape[-1]
    with np.errstate(all="ignore"):
        inverse = F32(1) / scale.numpy().astype(F32)
        factor = inverse[..., None] if inverse.ndim else inverse
        scaled = float64(x).astype(F32) * factor
    codes = np.clip(scaled, F32(-448), F32(448)).astype(E4M3).view(np.uint8)
    codes[np.isnan(scaled)] = NAN
    stored = np.zeros((*x.shape[:-1], (k + 63) // 64 * 64), np.uint8)
    stored[..., [byte_of(element) for element in range(k)]] = codes
    return torch.from_numpy(stored).view(torch.float8_e4m3fn)


def token_scales(x: Tensor) -> Tensor:
    """Scale of each row: its largest magnitude divided by 448; 1 for zeros, or with a NaN."""
    with np.errstate(all="ignore"):
        largest = np.abs(float64(x)).max(-1).astype(F32)
        scale = np.maximum(largest / F32(448), F32(2.0**-126))
    found = torch.empty(x.shape[:-1])  # NumPy's strides of an empty array are not torch's
    return found.copy_(torch.from_numpy(np.where(largest > 0, scale, F32(1))))


def values(stored: Tensor, scale: Tensor, k: int) -> Float64:
    """Exact float64 values ``(..., M, K)`` of E4M3 rows."""
    ordered = float64(stored)[..., [byte_of(element) for element in range(k)]]
    factor = scale.double().numpy()
    return ordered * (factor[..., None] if factor.ndim else factor)
