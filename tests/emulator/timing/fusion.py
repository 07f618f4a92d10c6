"""Fusion of logic by the assembler: one LOP3 computes any bitwise function of 3 operands."""

from collections import Counter
from collections.abc import Iterable

from tests.emulator.ptx.flow import read, written
from tests.emulator.ptx.syntax import Immediate, Instruction, Register

_LOGIC = frozenset(("and", "or", "xor", "not"))
_OPERANDS = 3
_CONSTANTS = 1  # constant operands: further constants need registers


def absorbed(blocks: Iterable[list[Instruction]]) -> set[int]:
    """PTX lines of 32-bit logic instructions that the assembler fuses into their only reader.

    Args:
        blocks: basic blocks of a kernel, each a list of instructions.
    """
    blocks = list(blocks)
    readers = Counter(name for body in blocks for i in body for name in read(i))
    found: set[int] = set()
    for body in blocks:
        made: dict[str, tuple[int, frozenset[object]]] = {}
        for instruction in body:
            if not _is_logic(instruction):
                for name in written(instruction):
                    made.pop(name, None)
                continue
            inputs = _inputs(instruction)
            for name in read(instruction):
                if name not in made or readers[name] != 1:
                    continue
                line, leaves = made[name]
                both = (inputs - {name}) | leaves
                if _fits(both):
                    inputs = both
                    found.add(line)
            (target,) = written(instruction)
            made[target] = (instruction.line, inputs)
    return found


def _is_logic(instruction: Instruction) -> bool:
    return (
        instruction.parts[0] in _LOGIC
        and instruction.parts[-1] == "b32"
        and instruction.guard is None
        and all(isinstance(o, Register | Immediate) for o in instruction.operands)
    )


def _inputs(instruction: Instruction) -> frozenset[object]:
    return frozenset(o.name if isinstance(o, Register) else o for o in instruction.operands[1:])


def _fits(inputs: frozenset[object]) -> bool:
    constants = sum(isinstance(each, Immediate) for each in inputs)
    return len(inputs) <= _OPERANDS and constants <= _CONSTANTS
