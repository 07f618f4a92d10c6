"""tcgen05.cp: shared memory to tensor memory (PTX ISA 9.7.16.9).

The source is a K-major matrix of 16- or 32-byte rows; the lanes of each row follow CUTLASS
(include/cute/atom/copy_traits_sm100.hpp, UTCCP). With cta_group::2 both CTAs copy, each from its
own shared memory to its own tensor memory (CUTLASS).
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tests.emulator.findings import IllegalInstruction, OutOfBounds
from tests.emulator.tcgen05.descriptors import SharedDescriptor
from tests.emulator.tcgen05.formats import HOLDER_SHIFT, Bytes, Element, Words
from tests.emulator.tcgen05.operands import OperandShape, byte_addresses, gather
from tests.emulator.tcgen05.tensor_memory_layout import COLUMNS, LANES, Address

# Rows and bytes a row of each shape, with the multicasts it requires.
_SHAPES: dict[str, tuple[int, int, tuple[str | None, ...]]] = {
    "128x256b": (128, 32, (None,)),
    "4x256b": (4, 32, (None,)),
    "128x128b": (128, 16, (None,)),
    "64x128b": (64, 16, ("warpx2::02_13", "warpx2::01_23")),
    "32x128b": (32, 16, ("warpx4",)),
}
_SOURCES = {None: Element.U8, "b6x16_p32": Element.E2M3, "b4x16_p64": Element.E2M1}


@dataclass(frozen=True, slots=True)
class Copy:
    """A tcgen05.cp and its qualifiers, without operands.

    Attributes:
        shape: shape as in PTX.
        multicast: ``warpx2::02_13``, ``warpx2::01_23``, ``warpx4`` or None.
        source: ``b6x16_p32`` or ``b4x16_p64``, decompressed to ``b8x16``, or None.
    """

    shape: str
    multicast: str | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        """Check the qualifiers.

        Raises:
            IllegalInstruction: PTX ISA 9.7.16.9.2 does not have the combination.
        """
        if self.shape not in _SHAPES:
            raise IllegalInstruction(
                f"tcgen05.cp shape .{self.shape}: accepted are {', '.join(_SHAPES)}"
                " (PTX ISA 9.7.16.9.2)"
            )
        accepted = _SHAPES[self.shape][2]
        if self.multicast not in accepted:
            names = " or ".join(f".{name}" if name else "no multicast" for name in accepted)
            raise IllegalInstruction(
                f"tcgen05.cp .{self.shape} with"
                f" {'.' + self.multicast if self.multicast else 'no multicast'}: accepted is"
                f" {names} (PTX ISA 9.7.16.9.2)"
            )
        if self.source not in _SOURCES:
            raise IllegalInstruction(
                f"tcgen05.cp source format .{self.source}: accepted are .b6x16_p32 and .b4x16_p64"
                " (PTX ISA 9.7.16.9.2)"
            )

    @property
    def rows(self) -> int:
        """Number of rows of the source."""
        return _SHAPES[self.shape][0]

    @property
    def columns(self) -> int:
        """Number of tensor memory columns written."""
        return _SHAPES[self.shape][1] // 4


@lru_cache(maxsize=256)
def source_shape(copy: Copy) -> OperandShape:
    """The source as a K-major matrix of bytes, or of padded narrow elements."""
    return OperandShape(
        copy.rows, copy.columns * 4, _SOURCES[copy.source], padded=bool(copy.source)
    )


def source_addresses(copy: Copy, descriptor: SharedDescriptor) -> npt.NDArray[np.intp]:
    """Byte addresses [rows, bytes] that the copy reads, without padding."""
    return byte_addresses(descriptor, source_shape(copy))


@lru_cache(maxsize=256)
def destination_lanes(copy: Copy, lane: int) -> tuple[tuple[slice, slice], ...]:
    """Slices of lanes, each with the slice of source rows that the lanes receive.

    Raises:
        IllegalInstruction: the rows do not fit at that lane.
    """
    match copy.shape, copy.multicast:
        case "4x256b", _:
            # One row for each subpartition, at the same lane of each.
            if lane >= 32:
                raise IllegalInstruction(
                    f"tcgen05.cp .4x256b at lane {lane}: accepted are 0 to 31, the lane of every"
                    " subpartition that receives a row"
                )
            return ((slice(lane, lane + 97, 32), slice(0, 4)),)
        case _, "warpx2::01_23":
            starts = ((0, 0), (32, 0), (64, 32), (96, 32))
        case _, "warpx2::02_13":
            starts = ((0, 0), (32, 32), (64, 0), (96, 32))
        case _, "warpx4":
            starts = ((0, 0), (32, 0), (64, 0), (96, 0))
        case _:
            starts = ((0, 0), (32, 32), (64, 64), (96, 96))
    if lane:
        raise IllegalInstruction(
            f"tcgen05.cp .{copy.shape} at lane {lane}: it writes all {LANES} lanes, from lane 0 on"
        )
    return tuple((slice(to, to + 32), slice(row, row + 32)) for to, row in starts)


def _decompress(raw: Bytes, source: str | None) -> Bytes:
    """Unpack 4- or 6-bit codes, low code first, into bytes' middle bits (PTX ISA 9.7.16.9.1).

    ``source``: format of the codes; None: ``raw`` is returned unchanged.
    """
    if source is None:
        return raw
    if source == "b4x16_p64":
        codes = np.stack([raw & np.uint8(15), raw >> np.uint8(4)], axis=2)
        return (codes << np.uint8(HOLDER_SHIFT[4])).reshape(len(raw), -1)
    triples = raw.reshape(len(raw), -1, 3).astype(np.uint32)
    word = triples[:, :, 0] | triples[:, :, 1] << 8 | triples[:, :, 2] << 16
    six = word[:, :, None] >> np.arange(0, 24, 6, dtype=np.uint32) & 63
    return (six << HOLDER_SHIFT[6]).astype(np.uint8).reshape(len(raw), -1)


def source_words(shared: Bytes, copy: Copy, descriptor: SharedDescriptor) -> Words:
    """Words copied, uint32 [rows, columns], decompressed.

    Raises:
        IndexError: the source lies beyond the end of shared memory.
    """
    raw = _decompress(gather(shared, descriptor, source_shape(copy)), copy.source)
    return np.ascontiguousarray(raw).view(np.uint32)


def write_words(tensor: Words, copy: Copy, address: Address, words: Words) -> None:
    """Write the words read by :func:`source_words` to tensor memory.

    Raises:
        IllegalInstruction: see :func:`destination_lanes`.
        OutOfBounds: the columns end beyond the last column of tensor memory.
    """
    lane, column = address
    if column + copy.columns > COLUMNS:
        raise OutOfBounds(
            f"tcgen05.cp .{copy.shape} takes columns {column} to {column + copy.columns - 1} of"
            f" tensor memory, which has {COLUMNS} (PTX ISA 9.7.16.1)"
        )
    for lanes, rows in destination_lanes(copy, lane):
        tensor[lanes, column : column + copy.columns] = words[rows]
