"""A and B in shared memory: the bytes that a descriptor addresses, and the decoded matrix.

The layouts are the canonical layouts of PTX ISA 9.7.16.3.3, in units of 16 bytes: every layout
keeps 16 bytes along the leading dimension together, so one gather of 16-byte items fetches an
operand.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tests.emulator.findings import IllegalInstruction, UnknownInstruction
from tests.emulator.tcgen05.descriptors import SharedDescriptor, Swizzle
from tests.emulator.tcgen05.formats import Bytes, Element, decode

_CHUNK = 16
# A swizzle pattern repeats after at most this many bytes (PTX ISA 9.7.16.4.1, Table 41).
_PATTERN = 1024


@dataclass(frozen=True, slots=True)
class OperandShape:
    """One CTA's part of A or B.

    Attributes:
        rows: number of rows along M or N.
        k: number of elements along K.
        element: element format.
        mn_major: whether M or N, not K, is the leading dimension (the transpose bit).
        padded: whether sub-byte elements lie in groups of 16, each padded to 16 bytes.
        first_row: row of the descriptor's matrix where the operand begins.
    """

    rows: int
    k: int
    element: Element
    mn_major: bool = False
    padded: bool = False
    first_row: int = 0

    @property
    def slot_bits(self) -> int:
        """Number of bits of address space that an element takes, padding included."""
        return 8 if self.padded and self.element.bits < 8 else self.element.bits

    @property
    def payload(self) -> int:
        """Number of bytes in a 16-byte chunk that hold elements; the rest is padding."""
        return _CHUNK * self.element.bits // self.slot_bits


def swizzle(address: npt.NDArray[np.intp], mode: Swizzle) -> npt.NDArray[np.intp]:
    """Byte addresses after the swizzle, which permutes absolute address bits."""
    match mode:
        case Swizzle.NONE:
            return address
        case Swizzle.B128_ATOM32:
            return address ^ (address >> 7 & 3) << 5
    mask = {Swizzle.B128: 7, Swizzle.B64: 3, Swizzle.B32: 1}[mode]
    return address ^ (address >> 7 & mask) << 4


def k_major_offsets(
    rows: npt.NDArray[np.intp], chunks: int, descriptor: SharedDescriptor
) -> npt.NDArray[np.intp]:
    """Byte offsets [rows, chunks] of each row's 16-byte chunks, before the swizzle."""
    if descriptor.swizzle is Swizzle.B128_ATOM32:
        raise UnknownInstruction(
            "a K-major matrix with 128B swizzle of 32B atoms: PTX ISA 9.7.16.10.6, Table 55, has no"
            " layout for it"
        )
    pitch = descriptor.swizzle.row_bytes
    step = descriptor.leading if descriptor.swizzle is Swizzle.NONE else _CHUNK
    lines = rows // 8 * descriptor.stride + rows % 8 * pitch
    return lines[:, None] + np.arange(chunks, dtype=np.intp) * step


def _mn_major_offsets(
    rows: npt.NDArray[np.intp],
    ks: npt.NDArray[np.intp],
    descriptor: SharedDescriptor,
    slot_bits: int,
) -> npt.NDArray[np.intp]:
    """Byte offsets [k, chunks] of the 16-byte chunks that begin at ``rows``, before the swizzle."""
    pitch = descriptor.swizzle.row_bytes
    row_stride, k_stride = descriptor.leading, descriptor.stride
    if descriptor.swizzle is Swizzle.NONE:
        row_stride, k_stride = k_stride, row_stride
    atom = 4 if descriptor.swizzle is Swizzle.B128_ATOM32 else 8
    along, period = rows * slot_bits // 8, pitch
    columns = along % period + along // period * row_stride
    lines = ks % atom * pitch + ks // atom * k_stride
    return lines[:, None] + columns


def _check(descriptor: SharedDescriptor, shape: OperandShape) -> None:
    """Check that type, major-ness and swizzle fit (PTX ISA 9.7.16.10.3, Table 54)."""
    if not shape.mn_major:
        return
    wide = shape.element.bits == 32
    if wide != (descriptor.swizzle is Swizzle.B128_ATOM32):
        raise IllegalInstruction(
            f"an M- or N-major matrix of {shape.element.ptx_name} with layout type"
            f" {descriptor.swizzle.value}: "
            + ("only 1 (128B, 32B atoms) is" if wide else "all but 1 (128B, 32B atoms) are")
            + " accepted (PTX ISA 9.7.16.10.3, Table 54)"
        )


@lru_cache(maxsize=4096)
def _chunks(
    phase: int, leading: int, stride: int, mode: Swizzle, shape: OperandShape
) -> npt.NDArray[np.intp]:
    """Indices of an operand's 16-byte chunks [lines, chunks], relative to the origin of `phase`."""
    descriptor = SharedDescriptor(phase, leading, stride, mode)
    _check(descriptor, shape)
    if shape.mn_major:
        per_chunk = _CHUNK * 8 // shape.slot_bits
        if shape.rows % per_chunk or shape.first_row % per_chunk:
            raise IllegalInstruction(
                f"an M- or N-major matrix of {shape.rows} rows from row {shape.first_row}:"
                f" {shape.element.ptx_name} needs multiples of {per_chunk}"
            )
        rows = np.arange(shape.first_row, shape.first_row + shape.rows, per_chunk, dtype=np.intp)
        ks = np.arange(shape.k, dtype=np.intp)
        offsets = _mn_major_offsets(rows, ks, descriptor, shape.slot_bits)
    else:
        rows = np.arange(shape.first_row, shape.first_row + shape.rows, dtype=np.intp)
        offsets = k_major_offsets(rows, shape.k * shape.slot_bits // 128, descriptor)
    index = swizzle(phase + offsets, mode) // _CHUNK
    index.setflags(write=False)
    return index


def chunk_index(
    descriptor: SharedDescriptor, shape: OperandShape
) -> tuple[int, npt.NDArray[np.intp]]:
    """Place of the operand: a base address, and the indices of 16-byte chunks relative to it.

    Returns:
        The address (a multiple of 1024) and a read-only index [lines, chunks]. A line is a row of a
        K-major operand, an index along K of an MN-major operand.
    """
    phase = descriptor.start % _PATTERN
    index = _chunks(phase, descriptor.leading, descriptor.stride, descriptor.swizzle, shape)
    return descriptor.start - phase, index


@lru_cache(maxsize=1024)
def byte_addresses(descriptor: SharedDescriptor, shape: OperandShape) -> npt.NDArray[np.intp]:
    """Byte addresses [lines, bytes] of the operand, without padding."""
    start, index = chunk_index(descriptor, shape)
    addresses = start + index[:, :, None] * _CHUNK + np.arange(shape.payload)
    addresses = addresses.reshape(len(index), -1)
    addresses.setflags(write=False)
    return addresses


def gather(shared: Bytes, descriptor: SharedDescriptor, shape: OperandShape) -> Bytes:
    """The operand's bytes, uint8 [lines, bytes], without padding.

    Args:
        shared: the CTA's shared memory; its length is a multiple of 16.
        descriptor: descriptor of the operand.
        shape: shape of the operand.

    Raises:
        IndexError: the operand reaches beyond the end of `shared`.
    """
    start, index = chunk_index(descriptor, shape)
    # 16-byte items; complex128 is numpy's fastest type of that size to gather.
    items = shared[start:].view(np.complex128).take(index)
    raw = items.view(np.uint8)
    if shape.payload == _CHUNK:
        return raw
    lines, chunks = index.shape
    return raw.reshape(lines, chunks, _CHUNK)[:, :, : shape.payload].reshape(lines, -1)


def decode_operand(raw: Bytes, shape: OperandShape) -> npt.NDArray[np.float32]:
    """Decode the bytes fetched by :func:`gather` to float32 [rows, k]."""
    matrix = decode(raw, shape.element)
    return matrix.T if shape.mn_major else matrix


def read_operand(
    shared: Bytes, descriptor: SharedDescriptor, shape: OperandShape
) -> npt.NDArray[np.float32]:
    """The operand as float32 [rows, k]."""
    return decode_operand(gather(shared, descriptor, shape), shape)
