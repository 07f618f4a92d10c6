"""Numbered tuples of registers that a kernel's wgmma instructions access asynchronously."""

from dataclasses import dataclass, field

from tests.emulator.ptx.flow import read, registers_of, written
from tests.emulator.ptx.syntax import Instruction, Kernel, Vector


@dataclass
class RegisterTuples:
    """The accumulators and A fragments that a kernel's wgmma instructions name.

    Attributes:
        number: number of each tuple of registers.
        registers: the tuples, by number.
        accumulators: numbers of the tuples that are accumulators.
        of: numbers of the tuples that contain a register, by register.
        overlaps: by tuple number, the other tuples that share registers with it, where at least one
            of the two is an accumulator.
        unwritten: registers that no instruction writes.
    """

    number: dict[tuple[str, ...], int] = field(default_factory=dict)
    registers: list[tuple[str, ...]] = field(default_factory=list)
    accumulators: set[int] = field(default_factory=set)
    of: dict[str, set[int]] = field(default_factory=dict)
    overlaps: dict[int, tuple[int, ...]] = field(default_factory=dict)
    unwritten: set[str] = field(default_factory=set)

    def add(self, names: tuple[str, ...]) -> int:
        if names not in self.number:
            self.number[names] = len(self.registers)
            self.registers.append(names)
            for name in names:
                self.of.setdefault(name, set()).add(self.number[names])
        return self.number[names]

    def touched(self, instruction: Instruction) -> list[tuple[int, str, str]]:
        """Uses of tuples by an ordinary instruction: (tuple, "read" or "write", register).

        Reading A is allowed while a wgmma reads A.
        """
        found: dict[int, tuple[int, str, str]] = {}
        for name in read(instruction):
            for number in self.of.get(name, ()):
                if number in self.accumulators:
                    found.setdefault(number, (number, "read", name))
        for name in written(instruction):
            for number in self.of.get(name, ()):
                found.setdefault(number, (number, "write", name))
        return list(found.values())


def register_tuples(kernel: Kernel) -> RegisterTuples:
    """Number the tuples of all ``wgmma.mma_async`` of a kernel."""
    tuples = RegisterTuples()
    for instruction in kernel.body:
        if instruction.parts[:2] != ("wgmma", "mma_async"):
            continue
        for place, operand in enumerate(instruction.operands[:2]):
            if isinstance(operand, Vector):
                number = tuples.add(tuple(registers_of(operand)))
                if place == 0:
                    tuples.accumulators.add(number)
    for number, names in enumerate(tuples.registers):
        others = {other for name in names for other in tuples.of[name]} - {number}
        tuples.overlaps[number] = tuple(
            sorted(o for o in others if {o, number} & tuples.accumulators)
        )
    if tuples.of:
        tuples.unwritten = set(tuples.of) - {n for i in kernel.body for n in written(i)}
    return tuples
