"""Matrix descriptors of wgmma (PTX ISA, "Matrix Descriptor Format").

The layouts are the canonical layouts, as for tcgen05; only the encodings differ.
"""

from functools import lru_cache

from tests.emulator.findings import IllegalInstruction, Misaligned, UnknownInstruction
from tests.emulator.tcgen05.descriptors import SharedDescriptor, Swizzle

_SWIZZLES = (Swizzle.NONE, Swizzle.B128, Swizzle.B64, Swizzle.B32)
_FIELDS = 0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 0b111 << 49 | 0b11 << 62


@lru_cache(maxsize=4096)
def decode_descriptor(word: int) -> SharedDescriptor:
    """Decode a 64-bit descriptor.

    Raises:
        IllegalInstruction: reserved bits are set.
        Misaligned: the start lies in the middle of the swizzle's pattern.
        UnknownInstruction: the base offset is not 0.
    """
    if word & ~_FIELDS:
        raise IllegalInstruction(
            f"wgmma descriptor {word:#018x} has bits {word & ~_FIELDS:#x} set, accepted are start, "
            "leading and stride offset (14 bits each from 0, 16 and 32), base offset (49-51) and "
            "swizzle (62-63): an address or offset overflowed its field, or it is a descriptor of "
            "tcgen05"
        )
    if word >> 49 & 0b111:
        raise UnknownInstruction(
            f"wgmma descriptor {word:#018x} has base offset {word >> 49 & 0b111}; only 0, patterns "
            "that start at a multiple of their size, is modelled"
        )
    mode = _SWIZZLES[word >> 62]
    start = (word & 0x3FFF) << 4
    pattern = 8 * mode.row_bytes
    if mode is not Swizzle.NONE and start % pattern >= mode.row_bytes:
        raise Misaligned(
            f"wgmma descriptor {word:#018x}: start address {start:#x} is not in the first row of "
            f"a swizzle pattern; with {mode.row_bytes}-byte swizzle and base offset 0 a matrix "
            f"starts at a multiple of {pattern}, or less than {mode.row_bytes} bytes after one"
        )
    return SharedDescriptor(
        start=start,
        leading=(word >> 16 & 0x3FFF) << 4,
        stride=(word >> 32 & 0x3FFF) << 4,
        swizzle=mode,
    )
