"""Batch-invariant row-wise functions on CPU: a row of the result depends on its input row alone.

torch picks the summation order of a product by the matrices' sizes, and computes exponentials with
vector code except in the scalar tail of a tensor or thread chunk. Here every row is computed by a
separate call, always of the same sizes.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def row_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply float32 ``(..., M, K)`` by ``(..., K, N)``; batch dimensions are broadcast."""
    if b.ndim == 2:
        return by_row(lambda row: torch.mv(b.mT, row), a, b.shape[-1])
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    pairs = zip(*(x.expand(*batch, -1, -1).flatten(0, -3) for x in (a, b)), strict=True)
    out = a.new_empty((batch.numel(), a.shape[-2], b.shape[-1]))
    for index, pair in enumerate(pairs):
        out[index] = row_product(*pair)
    return out.view(*batch, *out.shape[1:])


def by_row(function: Callable[[Tensor], Tensor], x: Tensor, width: int | None = None) -> Tensor:
    """Apply ``function``, from ``(K,)`` to ``(width,)``, to each row of ``x`` ``(..., K)``.

    ``width`` is K unless given. The result has ``x``'s dtype.
    """
    out = x.new_empty((*x.shape[:-1], x.shape[-1] if width is None else width))
    flat, results = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    # A copy: all rows have the same alignment, on which BLAS may depend too.
    row = x.new_empty(x.shape[-1:])
    for index in range(len(flat)):
        results[index] = function(row.copy_(flat[index]))
    return out
