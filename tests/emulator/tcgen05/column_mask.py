"""Zero-column masks of tcgen05.mma.ws (PTX ISA 9.7.16.4.3)."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tests.emulator.findings import IllegalInstruction, UnknownInstruction


@dataclass(frozen=True, slots=True)
class ColumnMask:
    """Zero-column mask: B's columns that count as zero, and B's shift.

    Attributes:
        shift: column n of the instruction is column n + shift of B in shared memory.
        zero: bool [n], or None where no column is masked.
    """

    shift: int
    zero: npt.NDArray[np.bool_] | None


@lru_cache(maxsize=256)
def decode_column_mask(word: int, m: int, n: int, max_shift: int) -> ColumnMask:
    """Expand a 64-bit zero-column mask descriptor for an instruction of m rows and n columns.

    Args:
        word: the descriptor.
        m: number of rows of the instruction.
        n: number of columns of the instruction.
        max_shift: largest shift that the instruction descriptor allows, 0, 8, 16 or 32.

    Raises:
        IllegalInstruction: reserved bits are set, or the shift is more than allowed.
        UnknownInstruction: a start count reaches beyond the first span.
    """
    if word & (0b111 << 36 | 0b11 << 62):
        raise IllegalInstruction(
            f"zero-column mask {word:#018x}: reserved bits 36-38 and 62-63 must be 0"
            " (PTX ISA 9.7.16.4.3, Table 45)"
        )
    shift = word >> 56 & 0b111111
    limit = min(max_shift, 16 if m == 32 else 32)
    if shift > limit:
        raise IllegalInstruction(
            f"zero-column mask {word:#018x}: column shift {shift}, at most {limit} with M = {m} and"
            f" a maximum shift of {max_shift} in the instruction descriptor (PTX ISA 9.7.16.4.3)"
        )
    if not word >> 39 & 1:
        return ColumnMask(shift, None)
    # The table swaps the names of the spans; its examples 2-4, and CUTLASS, use this order.
    zeros = (word >> 40 & 0xFF) + 1
    uses = (word >> 48 & 0xFF) + 1
    banks = 128 // m
    zero = np.empty((banks, n // banks), dtype=np.bool_)
    for bank in range(banks):
        start = word >> 8 * bank & 0xFF
        zeros_first = word >> (32 + bank) & 1
        if start >= (zeros if zeros_first else uses):
            raise UnknownInstruction(
                f"zero-column mask {word:#018x}: start count {start} of sub-mask {bank} skips all"
                " of the first span, which PTX ISA 9.7.16.4.3 does not describe"
            )
        position = (np.arange(n // banks) + start) % (zeros + uses)
        zero[bank] = position < zeros if zeros_first else position >= uses
    return ColumnMask(shift, zero.reshape(n))
