"""Shared-memory matrix descriptors (PTX ISA 9.7.16.4.1)."""

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from tests.emulator.findings import IllegalInstruction, UnknownInstruction


class Swizzle(IntEnum):
    """Layout type of a descriptor, bits 61-63."""

    NONE = 0
    B128_ATOM32 = 1
    B128 = 2
    B64 = 4
    B32 = 6

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the swizzle atom."""
        return {
            Swizzle.NONE: 16,
            Swizzle.B32: 32,
            Swizzle.B64: 64,
            Swizzle.B128: 128,
            Swizzle.B128_ATOM32: 128,
        }[self]


@dataclass(frozen=True, slots=True)
class SharedDescriptor:
    """A matrix in shared memory.

    Attributes:
        start: byte address within the CTA's shared memory, a multiple of 16.
        leading: leading-dimension byte offset.
        stride: stride-dimension byte offset.
        swizzle: layout type.
    """

    start: int
    leading: int
    stride: int
    swizzle: Swizzle


@lru_cache(maxsize=4096)
def decode_shared_descriptor(word: int) -> SharedDescriptor:
    """Decode a 64-bit descriptor.

    Raises:
        IllegalInstruction: version, reserved bits or layout type are not as specified.
        UnknownInstruction: the matrix base offset is not 0.
    """
    where = "PTX ISA 9.7.16.4.1"
    version = word >> 46 & 0b111
    if version != 0b001:
        raise IllegalInstruction(
            f"shared-memory descriptor {word:#018x} has {version:#05b} in bits 46-48, 0b001 is"
            f" required ({where}): the descriptor was not built for tcgen05, or not initialised"
        )
    if word >> 14 & 0b11 or word >> 30 & 0b11:
        raise IllegalInstruction(
            f"shared-memory descriptor {word:#018x} has reserved bits 14-15 or 30-31 set ({where}):"
            " an address or offset of 256 KiB or more overflowed its field"
        )
    if word >> 52 & 1:
        raise IllegalInstruction(
            f"shared-memory descriptor {word:#018x} asks for an absolute leading-dimension address"
            f" (bit 52), which needs sm_103a ({where}.1)"
        )
    if word >> 53 & 0xFF:
        raise IllegalInstruction(
            f"shared-memory descriptor {word:#018x} has bits 53-60 set, 0 is required ({where})"
        )
    layout = word >> 61
    if layout not in Swizzle.__members__.values():
        raise IllegalInstruction(
            f"shared-memory descriptor {word:#018x} has layout type {layout}, accepted are 0"
            f" (none), 1 (128B, 32B atoms), 2 (128B), 4 (64B) and 6 (32B) ({where})"
        )
    base_offset = word >> 49 & 0b111
    if base_offset:
        raise UnknownInstruction(
            f"shared-memory descriptor {word:#018x} has matrix base offset {base_offset}; only 0,"
            f" patterns that start where {where} Table 41 says, is modelled"
        )
    return SharedDescriptor(
        start=(word & 0x3FFF) << 4,
        leading=(word >> 16 & 0x3FFF) << 4,
        stride=(word >> 32 & 0x3FFF) << 4,
        swizzle=Swizzle(layout),
    )
