"""Residual NVFP4 quantisation: x ≈ q1 + q2 + …, where each term quantises the remainder so far.

All terms share one global scale; their block scales shrink by a factor of about 11 from term to
term. A GEMM of such a sum with an NVFP4 weight is then a sum of NVFP4 GEMMs with one factor
``alpha``, in one accumulator. Two terms have a third of the rounding error of per-token E4M3, three
terms half that of bfloat16. From the second term on, the scale of a nonzero block is at least
the smallest E4M3 number, 2⁻⁹: any element may keep an error of up to 2⁻¹¹ times the global scale,
and blocks far below the row's maximum become coarse.

An operand of one term is a plain NVFP4 operand. With t terms, ``data`` is uint8 ``(..., t, M,
K/2)``, and ``scales`` has t · P stacked rows in the blocked layout (see ``nvfp4``), row m of term i
at row i · P + m. If M ≤ 32, P is 32, so that one atom of 128 rows holds the scales of all terms;
otherwise P is M rounded up to a multiple of 128. Padding is zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.formats.nvfp4 import (
    ATOM_ROWS,
    BLOCK_SIZE,
    E4M3_TINY,
    activation_step,
    blocked_shape,
    decode_blocks,
    decode_e2m1,
    from_blocked,
    quantize_activation,
    scale_blocks,
    to_blocked,
)
from nvfp4_kernels.settings import MAX_TERMS

# Fewest NVFP4 terms that lose less than bfloat16 does, where activations would be in 16 bits.
EXACT_TERMS = 3
PACKED_ROWS = 32  # most rows for which the scales of all terms share an atom


def check_terms(name: str, terms: int) -> None:
    """Raise unless ``terms`` is a number of terms that kernels support."""
    if isinstance(terms, bool) or not isinstance(terms, int) or not 1 <= terms <= MAX_TERMS:
        raise InvalidArgument(
            f"{name}: is {terms!r}, must be 1 to {MAX_TERMS}; 3 lose less than bfloat16 does"
        )


@dataclass(frozen=True)
class TermLayout:
    """Layout of an operand's terms, a compile-time parameter of kernels.

    Attributes:
        count: number of terms.
        packed: whether one atom holds the scales of all terms; possible for operands of at most 32
            rows.
    """

    count: int = 1
    packed: bool = False

    def __post_init__(self) -> None:
        assert 1 <= self.count <= MAX_TERMS, self.count
        assert self.count > 1 or not self.packed

    @classmethod
    def of(cls, count: int, rows: int) -> "TermLayout":
        """Layout of ``count`` terms of an operand of ``rows`` rows."""
        return cls(count, packed=count > 1 and rows <= PACKED_ROWS)


ONE_TERM = TermLayout()


def term_rows(rows: int) -> int:
    """Stride between the scales of consecutive terms of ``rows`` rows each, in rows."""
    return PACKED_ROWS if 0 < rows <= PACKED_ROWS else -(-rows // ATOM_ROWS) * ATOM_ROWS


def data_shape(batch: tuple[int, ...], rows: int, k: int, terms: int) -> tuple[int, ...]:
    """Shape of the packed data of an activation ``(*batch, rows, k)`` in ``terms`` terms."""
    return (*batch, *((terms,) if terms > 1 else ()), rows, k // 2)


def scales_shape(batch: tuple[int, ...], rows: int, k: int, terms: int) -> tuple[int, ...]:
    """Shape of the blocked scales of an activation ``(*batch, rows, k)`` in ``terms`` terms.

    Computed without branches on sizes, for ``torch.compile``.
    """
    down, *rest = blocked_shape(rows, k // BLOCK_SIZE)
    if terms > 1:
        packed = torch.sym_max(0, 2 - -(-rows // PACKED_ROWS))  # 1, beyond that many rows 0
        down = torch.sym_max(0, terms * down - (terms - 1) * packed)
    return (*batch, down, *rest)


def quantize_terms(x: Tensor, global_scale: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    """Quantise activations, then each remainder, to ``terms`` terms in all.

    Args:
        x: bfloat16, float16 or float32 ``(..., M, K)``, K a multiple of 16.
        global_scale: float32 ``()`` or one per row ``(..., M)``; all terms share it.
        terms: 1 to 4.

    Returns:
        ``data`` and blocked ``scales``, see the module. Each term is ``nvfp4.quantize_activation``
        of the float32 difference of ``x`` and the previous terms, each difference rounded once, as
        by a fused multiply-add. From the second term on, block scales are at least E4M3's smallest
        number.
    """
    left = x.float()
    parts = []
    for term in range(terms):
        data, scales = quantize_activation(left, global_scale, E4M3_TINY if term else 0.0)
        parts.append((data, scales))
        if term + 1 < terms:
            left = _left(left, data, activation_step(scales, global_scale))
    if terms == 1:
        return data, to_blocked(scales)
    all_data, all_scales = (torch.stack(each, dim=-3) for each in zip(*parts, strict=True))
    return all_data, stack_scales(all_scales)


def _left(values: Tensor, data: Tensor, step: Tensor) -> Tensor:
    """``values`` minus a term, rounded once: float64 holds each product (24 + 2 bits) exactly."""
    term = scale_blocks(decode_e2m1(data).double(), step.double())
    return (values.double() - term).float()


def stack_scales(scales: Tensor) -> Tensor:
    """Convert linear scales ``(..., t, M, K/16)``, t > 1, to the blocked layout of stacked rows."""
    *batch, terms, rows, columns = scales.shape
    pitch = term_rows(rows)
    stacked = scales.new_zeros((*batch, terms, pitch, columns), dtype=torch.uint8)
    stacked[..., :rows, :] = scales.view(torch.uint8)
    return to_blocked(stacked.flatten(-3, -2).view(scales.dtype))


def unstack_scales(blocked: Tensor, terms: int, rows: int, columns: int) -> Tensor:
    """Undo ``stack_scales``: linear scales ``(..., t, M, K/16)``."""
    pitch = term_rows(rows)
    linear = from_blocked(blocked, terms * pitch, columns)
    return linear.unflatten(-2, (terms, pitch))[..., :rows, :].contiguous()


def decode_terms(data: Tensor, scales: Tensor, terms: int) -> Tensor:
    """Sum of the terms without the global scale: float32 ``(..., M, K)``.

    Each sum is exact in float32 (at most 24 significant bits), unless two nonzero terms of the same
    element differ by a factor of 2¹⁸ or more; then the sum may be rounded.
    """
    if terms == 1:
        return decode_blocks(data, scales)
    rows, columns = data.shape[-2], 2 * data.shape[-1] // BLOCK_SIZE
    linear = unstack_scales(scales, terms, rows, columns)
    values = scale_blocks(decode_e2m1(data), linear.float())
    total = values[..., -1, :, :]
    for term in reversed(range(terms - 1)):
        total = values[..., term, :, :] + total
    return total
