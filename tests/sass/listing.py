"""Listings of sm_100 machine code: instructions, registers written, and control flow."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_x?_?\w+):")
_TARGET = re.compile(r"`\((\.L\w+)\)")
_REGISTER = re.compile(r"^(UR|R)(\d+)(?:\.reuse)?$")
_PREDICATE = re.compile(r"^!?U?P(?:T|\d+)$")
_ENDS = ("EXIT", "RET", "KILL", "BRX", "JMX")
# Registers that an instruction writes, by the end of its name; other instructions write one.
_WIDTHS = {"64": 2, "WIDE": 2, "128": 4, "256": 8} | {f"x{2**n}": 2**n for n in range(8)}


@dataclass(frozen=True)
class Register:
    """A 32-bit register.

    Attributes:
        uniform: whether the register belongs to a warp (``UR``) rather than to a thread (``R``).
        number: number in its register file.
    """

    uniform: bool
    number: int

    def __str__(self) -> str:
        return f"{'UR' if self.uniform else 'R'}{self.number}"


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        address: byte offset in the kernel.
        predicate: predicate that guards the instruction; empty: always executed.
        opcode: opcode with modifiers.
        operands: operands as printed.
    """

    address: int
    predicate: str
    opcode: str
    operands: tuple[str, ...]

    @property
    def name(self) -> str:
        """Opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def target(self) -> str:
        """Label of the jump target; empty if the instruction is not a jump."""
        found = _TARGET.search(self.operands[-1]) if self.operands else None
        return found[1] if found else ""

    @property
    def writes(self) -> tuple[Register, ...]:
        """Registers written: those of the first operand that is not a predicate."""
        if "SETP" in self.name:
            return ()
        rest = list(self.operands)
        while rest and _PREDICATE.match(rest[0]):
            rest.pop(0)
        first = register(rest[0]) if rest else None
        if first is None:
            return ()
        modifiers = self.opcode.split(".")[1:]
        width = max(_WIDTHS.get(modifier, 1) for modifier in ["", *modifiers])
        return tuple(Register(first.uniform, first.number + n) for n in range(width))

    def __str__(self) -> str:
        guard = f"@{self.predicate} " if self.predicate else ""
        return f"{self.address:#x}: {guard}{self.opcode} {', '.join(self.operands)}"


def register(operand: str) -> Register | None:
    """Register that an operand names; None for other operands and for the zero register."""
    found = _REGISTER.match(operand)
    return Register(found[1] == "UR", int(found[2])) if found else None


@dataclass
class Listing:
    """Instructions of one kernel in order, and the possible predecessors of each.

    Attributes:
        instructions: instructions in order of address.
        before: for each instruction, indices of its possible predecessors.
        entries: indices of instructions with untracked predecessors: the kernel's start, and the
            instructions after calls.
    """

    instructions: list[Instruction] = field(default_factory=list)
    before: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    entries: set[int] = field(default_factory=set)


def parse(text: str) -> Listing:
    """Parse the output of ``nvdisasm -c`` for a cubin of one kernel."""
    listing = Listing(entries={0})
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(listing.instructions)
        elif found := _INSTRUCTION.match(line):
            address, predicate, opcode, operands = found.groups()
            split = tuple(o.strip() for o in operands.split(",")) if operands else ()
            listing.instructions.append(
                Instruction(int(address, 16), predicate or "", opcode, split)
            )
    for index, each in enumerate(listing.instructions):
        if each.name in ("BRA", "UBRA"):
            listing.before[labels[each.target]].append(index)
        if each.name in ("CALL", "WARPSYNC") and each.target:
            listing.entries |= {labels[each.target], index + 1}
        elif not _leaves(each):
            listing.before[index + 1].append(index)
    _let_go(listing, labels)
    return listing


def _let_go(listing: Listing, labels: dict[str, int]) -> None:
    """Add control-flow edges from each BSYNC to the targets of the BSSYs that may match it."""
    found = True
    while found:  # a way that is found may lead on to another BSYNC
        found = False
        after: dict[int, list[int]] = defaultdict(list)
        for index, sources in listing.before.items():
            for source in sources:
                after[source].append(index)
        for start, each in enumerate(listing.instructions):
            if each.name != "BSSY":
                continue
            barrier, target = each.operands[0], labels[each.target]
            for index in _reached(listing, after, start, barrier):
                if index not in listing.before[target]:
                    listing.before[target].append(index)
                    found = True


def _reached(
    listing: Listing, after: dict[int, list[int]], start: int, barrier: str
) -> Iterator[int]:
    """Each BSYNC of ``barrier`` that control reaches before another BSSY of the same barrier."""
    seen, waiting = {start}, [*after[start]]
    while waiting:
        index = waiting.pop()
        if index in seen or index >= len(listing.instructions):
            continue
        seen.add(index)
        each = listing.instructions[index]
        if barrier in each.operands and each.name == "BSYNC":
            yield index
        elif barrier not in each.operands or each.name != "BSSY":
            waiting += after[index]


def _leaves(each: Instruction) -> bool:
    """Whether control never continues to the next instruction."""
    conditional = each.predicate not in ("", "PT", "UPT")
    conditional |= any(o.lstrip("!").startswith(("UP", "P")) for o in each.operands[:-1])
    leaves = each.name in _ENDS or (each.name == "BRA" and "DIV" not in each.opcode)
    return leaves and not conditional
