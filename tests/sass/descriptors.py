"""Check of shared-memory descriptors in machine code: no addition carries into their high word.

A descriptor is a pair of uniform registers. Its low word holds the address, to which kernels add;
its high word holds strides, the version and the swizzle (PTX ISA, tcgen05 shared memory
descriptor). The check traces every value that may reach the high word of a descriptor back to its
definition, which must be one of the constants that the descriptors of these kernels can have. A
value that an addition defines, or that cannot be traced, is a fault.
"""

import re
import struct
from collections import Counter
from dataclasses import dataclass

from tests.sass.listing import Instruction, Listing, Register, parse, register

_DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")
_CONSTANT = re.compile(r"^-?0x[0-9a-f]+$")
_MOVES = ("MOV", "UMOV", "R2UR")
_ZERO = ("RZ", "URZ")
VERSION = 1 << 14  # bits 46 to 48: 1 on sm_100
# High words of rows of 128, 64 or 32 bytes with their swizzle, in groups of eight; and of
# unswizzled rows of 16 bytes.
SWIZZLES = {128: 2, 64: 4, 32: 6}
HIGH_WORDS = {8 * width // 16 | VERSION | mode << 29 for width, mode in SWIZZLES.items()}
HIGH_WORDS |= {8 * 16 // 16 | VERSION}


@dataclass(frozen=True)
class Checked:
    """Outcome of the check of one kernel.

    Attributes:
        readers: instructions that read descriptors, by name.
        high_words: values that reach the high word of descriptors, and the number of descriptors.
        faults: a line for each fault; empty for a sound kernel.
    """

    readers: Counter[str]
    high_words: Counter[int]
    faults: list[str]


class UntracedValue(ValueError):
    """Error for a value whose definition is not a constant; the message names the instruction."""


def check(text: str) -> Checked:
    """Check all descriptors in the listing of a kernel."""
    listing = parse(text)
    outcome = Checked(Counter(), Counter(), [])
    for index, each in enumerate(listing.instructions):
        for operand in each.operands:
            for number in _DESCRIPTOR.findall(operand):
                high = Register(True, int(number) + 1)
                outcome.readers[each.name] += 1
                try:
                    values = constants(listing, index, high)
                except UntracedValue as error:
                    outcome.faults.append(f"{each}: high word {high} {error}")
                    continue
                outcome.high_words.update(values)
                if wrong := values - HIGH_WORDS:
                    shown = ", ".join(f"{value:#x}" for value in sorted(wrong))
                    outcome.faults.append(f"{each}: high word {high} may be {shown}")
    return outcome


def constants(listing: Listing, index: int, wanted: Register) -> set[int]:
    """Constants that the register ``wanted`` may hold just before the instruction at ``index``.

    Raises:
        UntracedValue: a value is not a constant.
    """
    found: set[int] = set()
    seen: set[tuple[int, Register]] = set()
    waiting = [(index, wanted)]
    while waiting:
        at, which = waiting.pop()
        if (at, which) in seen:
            continue
        seen.add((at, which))
        if at in listing.entries:
            raise UntracedValue(f"is {which} of before {listing.instructions[at]}")
        for before in listing.before[at]:
            maker = listing.instructions[before]
            if which not in maker.writes:
                waiting.append((before, which))
                continue
            value = _made(maker)
            if isinstance(value, Register):
                waiting.append((before, value))
            else:
                found.add(value)
            if maker.predicate:
                waiting.append((before, which))
    return found


def _made(maker: Instruction) -> int | Register:
    """Constant that an instruction writes, or the register that it copies."""
    *_, last = maker.operands
    if maker.name in _MOVES and len(maker.writes) == 1:
        return _value(maker, last)
    if {o.lstrip("-") for o in maker.operands[1:3]} <= set(_ZERO):  # a product of zeros, and
        if maker.opcode in ("IMAD.MOV", "IMAD.MOV.U32", "IMAD.U32"):
            return _value(maker, last)
        if maker.name == "HFMA2":
            halves = (struct.pack("<e", float(operand)) for operand in maker.operands[:2:-1])
            return int.from_bytes(b"".join(halves), "little")
    raise UntracedValue(f"is made by {maker}")


def _value(maker: Instruction, operand: str) -> int | Register:
    """Constant or register that an operand denotes."""
    if operand in _ZERO:
        return 0
    if _CONSTANT.match(operand):
        return int(operand, 16) & 0xFFFF_FFFF
    found = register(operand)
    if found is None:
        raise UntracedValue(f"is made by {maker}")
    return found
