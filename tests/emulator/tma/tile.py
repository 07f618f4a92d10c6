"""Tile copies between a tensor in global memory and a box (PTX ISA 5.5.3, 9.7.9.25.5).

A box is represented by its bytes in order, row after row; :mod:`tests.emulator.tma.swizzle`
scatters the bytes to shared memory and gathers them again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.emulator.findings import IllegalInstruction
from tests.emulator.tma.box import Box, box_of
from tests.emulator.tma.element_type import ElementType
from tests.emulator.tma.reduction import combine
from tests.emulator.tma.swizzle import Bytes, Swizzle
from tests.emulator.tma.tensor_map import TensorMap

# (address, nbytes) -> that much global memory, as a view; called once per contiguous footprint.
Fetch = Callable[[int, int], Bytes]

_OOB_NAN = 0x7FF7  # in every 16 bits, for any type (seen on an H200)


class Direction(StrEnum):
    """Effect of a copy on global memory."""

    LOAD = "load"
    PREFETCH = "prefetch"
    STORE = "store"
    REDUCE = "reduce"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of global memory that a copy touches.

    Attributes:
        address: address of the first byte.
        shape: shape of the region, outermost dimension first; the last counts consecutive bytes.
        strides: strides in bytes, one per dimension, the last 1.
        nbytes: number of bytes from the first to the last, gaps included.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    nbytes: int

    def of(self, memory: npt.NDArray[Any], granule: int = 1) -> npt.NDArray[Any]:
        """The region as a view of ``memory``, which has one item per ``granule`` bytes.

        ``memory`` starts with the granule of the first byte. A partly touched granule counts;
        ``granule`` divides 16.
        """
        item = memory.itemsize
        shape, strides = self.shape, self.strides
        if granule == 1:
            scaled = strides if item == 1 else tuple(s * item for s in strides)
        else:
            shape = (*shape[:-1], -(-shape[-1] // granule))
            scaled = (*(s // granule * item for s in strides[:-1]), item)
        return np.ndarray(shape, memory.dtype, memory, 0, scaled)


@dataclass(frozen=True, slots=True)
class Tile:
    """One box at its place in a tensor.

    Attributes:
        tensor_map: map of the tensor.
        box: shape of the box.
        parts: in-bounds regions, each with slices that select its part of the box's bytes
            (outermost dimension first), or None for the whole box.
    """

    tensor_map: TensorMap
    box: Box
    parts: tuple[tuple[Footprint, tuple[slice, ...] | None], ...]

    @property
    def _shape(self) -> tuple[int, ...]:
        return (*self.box.counts[:0:-1], self.box.packed_row_bytes)

    def read(self, fetch: Fetch) -> Bytes:
        """The box's bytes in order, contiguous, with out-of-bounds elements filled."""
        kind = self.tensor_map.element_type
        parts = self.parts
        if len(parts) == 1 and parts[0][1] is None:
            footprint = parts[0][0]
            packed = footprint.of(fetch(footprint.address, footprint.nbytes)).flatten()
            packed = _rounded(packed) if kind.rounds else packed
        else:
            fill = _OOB_NAN if self.tensor_map.nan_fill else 0
            halves = np.full(self.box.transaction_bytes // 2, fill, np.uint16)
            packed = halves.view(np.uint8).reshape(self._shape)
            for footprint, where in parts:
                data = footprint.of(fetch(footprint.address, footprint.nbytes))
                packed[where or ...] = _rounded(data) if kind.rounds else data
        return _padded(packed, kind) if kind.padded else packed.reshape(-1)

    def write(self, box: Bytes, fetch: Fetch) -> None:
        """Copy the in-bounds part of the box's bytes to global memory."""
        packed = self._packed(box)
        for footprint, where in self.parts:
            view = footprint.of(fetch(footprint.address, footprint.nbytes))
            view[...] = packed if where is None else packed[where]

    def reduce(self, operation: str, box: Bytes, fetch: Fetch) -> None:
        """Reduce the in-bounds part of the box's elements into global memory."""
        kind = self.tensor_map.element_type
        packed = self._packed(box)
        for footprint, where in self.parts:
            view = footprint.of(fetch(footprint.address, footprint.nbytes))
            old, new = view, packed if where is None else packed[where]
            view[...] = combine(
                operation,
                kind.kind,
                np.ascontiguousarray(old),
                np.ascontiguousarray(new),
                kind.flushes,
            )

    def _packed(self, box: Bytes) -> Bytes:
        if self.tensor_map.element_type == ElementType.U6_ALIGN16B:
            # b6p2x16: six bits of every byte are kept (PTX ISA 5.5.1.1).
            bits = np.unpackbits(box.reshape(-1, 1), axis=1, bitorder="little")[:, :6]
            box = np.packbits(bits.reshape(-1), bitorder="little")
        return box.reshape(self._shape)


def locate(
    tensor_map: TensorMap, coordinates: tuple[int, ...], direction: Direction = Direction.LOAD
) -> Tile:
    """Tile of the box at ``coordinates`` (elements, innermost first, signed).

    Raises:
        IllegalInstruction: ``direction`` does not accept the coordinates or the tensor map.
        UnknownInstruction: an interleaved layout.
    """
    if len(coordinates) != len(tensor_map.dims):
        raise IllegalInstruction(
            f"{len(coordinates)} coordinates for a tensor map of rank {tensor_map.rank}"
        )
    _check_use(tensor_map, coordinates, direction)
    box = box_of(tensor_map)
    part = _region(tensor_map, box.counts, coordinates, direction)
    return Tile(tensor_map, box, () if part is None else (part,))


def locate_rows(
    tensor_map: TensorMap, column: int, rows: tuple[int, ...], direction: Direction = Direction.LOAD
) -> Tile:
    """Tile of the four rows of .tile::gather4 or .tile::scatter4, each from ``column`` on.

    Raises:
        IllegalInstruction: a tensor map that is not of rank 2 with boxes of one row, or an error of
            :func:`locate`.
    """
    if tensor_map.rank != 2 or tensor_map.box[1] != 1 or len(rows) != 4:
        raise IllegalInstruction(
            f"gather4 or scatter4 of {len(rows)} rows from boxes {tensor_map.box}: accepted are "
            "4 rows, rank 2 and boxes of one row (PTX ISA 5.5.3.4)"
        )
    _check_use(tensor_map, (column, *rows), direction)
    box = box_of(tensor_map, len(rows))
    parts = []
    for number, row in enumerate(rows):
        part = _region(tensor_map, (box.counts[0], 1), (column, row), direction)
        if part is not None:
            footprint, where = part
            inner = slice(None) if where is None else where[1]
            parts.append((footprint, (slice(number, number + 1), inner)))
    return Tile(tensor_map, box, tuple(parts))


def _check_use(tensor_map: TensorMap, coordinates: tuple[int, ...], direction: Direction) -> None:
    kind = tensor_map.element_type
    # Box addresses are multiples of 16 bytes (PTX ISA 5.5.3.1); padded types go by whole boxes.
    whole = 128 if kind.padded else 128 // kind.bits
    if coordinates[0] % whole:
        raise IllegalInstruction(
            f"first coordinate {coordinates[0]} of {kind.name}, accepted multiples of {whole}"
        )
    if direction in (Direction.LOAD, Direction.PREFETCH):
        if tensor_map.swizzle == Swizzle.B128_ATOM_64B and kind.padded:
            raise IllegalInstruction(f"load of {kind.name} with swizzle B128_ATOM_64B, store only")
        return
    if min(coordinates) < 0:
        raise IllegalInstruction(
            f"{direction} at {coordinates}: coordinates of stores and reductions are not negative"
        )
    if tensor_map.swizzle == Swizzle.B128_ATOM_32B_FLIP_8B:
        raise IllegalInstruction(f"{direction} with swizzle B128_ATOM_32B_FLIP_8B, load only")
    if kind == ElementType.U4_ALIGN16B or (direction == Direction.REDUCE and kind.sub_byte):
        raise IllegalInstruction(f"{direction} of {kind.name}, load only")


def _region(
    tensor_map: TensorMap,
    counts: tuple[int, ...],
    coordinates: tuple[int, ...],
    direction: Direction,
) -> tuple[Footprint, tuple[slice, ...] | None] | None:
    """In-bounds region of ``counts`` elements at ``coordinates``; None if all are out of bounds."""
    bits = tensor_map.element_type.bits
    first, extent = coordinates[0], tensor_map.dims[0]
    if direction in (Direction.STORE, Direction.REDUCE):
        # Stores were seen to write whole 16 bytes at the end of a row, past the tensor (H200).
        extent += -extent * bits % 128 // bits
    low, high = max(0, -first), min(counts[0], extent - first)
    if low >= high:
        return None
    complete = high - low == counts[0]
    address = tensor_map.address + (first + low) * bits // 8
    row_bytes = (high - low) * bits // 8
    shape, strides = [row_bytes], [1]
    where = [slice(low * bits // 8, high * bits // 8)]
    nbytes = row_bytes
    for count, start, extent, stride, step in zip(
        counts[1:],
        coordinates[1:],
        tensor_map.dims[1:],
        tensor_map.strides,
        tensor_map.element_strides[1:],
        strict=True,
    ):
        low, high = 0, count
        if start < 0 or start + (count - 1) * step >= extent:
            low = max(0, -(start // step))
            high = min(count, -((start - extent) // step))
            if low >= high:
                return None
            complete = False
        address += (start + low * step) * stride
        shape.append(high - low)
        strides.append(stride * step)
        where.append(slice(low, high))
        nbytes += (high - low - 1) * stride * step
    footprint = Footprint(address, tuple(shape[::-1]), tuple(strides[::-1]), nbytes)
    return footprint, None if complete else tuple(where[::-1])


def _rounded(data: Bytes) -> Bytes:
    """FP32 to TF32, rounded as by loads: to nearest even, NaN to one pattern (seen on an H200)."""
    bits = np.ascontiguousarray(data).view(np.uint32)
    nan = (bits & 0x7FFF_FFFF) > 0x7F80_0000
    rounded = (bits + 0xFFF + (bits >> 13 & 1)) & np.uint32(0xFFFF_E000)
    return np.where(nan, np.uint32(0x7FFF_E000), rounded).view(np.uint8)


def _padded(packed: Bytes, kind: ElementType) -> Bytes:
    """Elements spread so that every 16 take 16 bytes; the padding, undefined in PTX, is 0."""
    used = 2 * kind.bits
    groups = packed.reshape(-1, used)
    padded = np.zeros((len(groups), 16), np.uint8)
    padded[:, :used] = groups
    return padded.reshape(-1)
