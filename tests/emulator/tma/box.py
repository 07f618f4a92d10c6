"""Box of a tensor map: the elements, rows and bytes that one copy moves."""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from tests.emulator.findings import Misaligned, UnknownInstruction
from tests.emulator.tma.swizzle import Placement, placement
from tests.emulator.tma.tensor_map import TensorMap

SHARED_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class Box:
    """Box that one tile copy moves.

    Attributes:
        counts: elements moved along each dimension, innermost first.
        rows: product of all counts but the first.
        row_bytes: bytes of a row in shared memory.
        packed_row_bytes: bytes of a row in global memory.
    """

    counts: tuple[int, ...]
    rows: int
    row_bytes: int
    packed_row_bytes: int

    @property
    def transaction_bytes(self) -> int:
        """Bytes that complete_tx counts: the whole box, in or out of bounds, without padding."""
        return self.rows * self.packed_row_bytes


@lru_cache(maxsize=1024)
def box_of(tensor_map: TensorMap, rows_gathered: int | None = None) -> Box:
    """The box of a copy, or of a gather4 or scatter4 of ``rows_gathered`` rows.

    Raises:
        UnknownInstruction: an interleaved layout.
    """
    if tensor_map.interleave:
        raise UnknownInstruction(
            f"tensor map with {tensor_map.interleave.name} interleave: only uninterleaved layouts "
            "are modelled"
        )
    # A traversal stride moves ceil(box / stride) elements; the first stride is ignored without an
    # interleave (CUDA driver API, cuTensorMapEncodeTiled; both seen on an H200).
    steps = (1, *tensor_map.element_strides[1:])
    counts = tuple(-(-b // step) for b, step in zip(tensor_map.box, steps, strict=True))
    if rows_gathered is not None:
        counts = (counts[0], rows_gathered)
    packed = counts[0] * tensor_map.element_type.bits // 8
    row = counts[0] if tensor_map.element_type.padded else packed
    return Box(counts, prod(counts[1:]), row, packed)


def place(tensor_map: TensorMap, box: Box, shared_address: int) -> Placement:
    """Placement of the box in shared memory, starting at ``shared_address``.

    Raises:
        Misaligned: the address is not a multiple of 128 (seen on an H200, for loads and stores).
    """
    if shared_address % SHARED_ALIGNMENT:
        raise Misaligned(
            f"tensor copy at shared address {shared_address:#x}, accepted multiples of "
            f"{SHARED_ALIGNMENT}"
        )
    phase = shared_address % tensor_map.swizzle.period
    return placement(tensor_map.swizzle, box.rows, box.row_bytes, phase)
