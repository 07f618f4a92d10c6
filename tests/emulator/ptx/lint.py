"""Static lint of a kernel: mistakes that need no run to find.

``tcgen05.ld`` is asynchronous: its registers are undefined until ``tcgen05.wait::ld`` (PTX ISA,
tcgen05.wait). Compilers move arithmetic on these registers across the wait, and ptxas corrects the
order, so only uses that leave the registers are mistakes: a store, a branch, an exchange with other
lanes.
"""

from dataclasses import dataclass

from tests.emulator.ptx.flow import Flow, read, written
from tests.emulator.ptx.syntax import Instruction

_LEAVES = frozenset(
    [
        "st",
        "red",
        "atom",
        "stmatrix",
        "bra",
        "brx",
        "shfl",
        "vote",
        "redux",
        "match",
        "mma",
        "wgmma",
    ]
)


@dataclass(frozen=True)
class Lint:
    """A mistake at a line of the PTX."""

    line: int
    fact: str


def _leaves_registers(instruction: Instruction) -> bool:
    if instruction.parts[0] == "tcgen05":
        return instruction.parts[1] == "st"
    return instruction.parts[0] in _LEAVES


def unwaited_loads(flow: Flow) -> list[Lint]:
    """Uses of a tcgen05.ld's registers that some path reaches without tcgen05.wait::ld."""
    body = flow.kernel.body
    entering: list[dict[str, int]] = [{} for _ in flow.blocks]
    found: dict[int, Lint] = {}
    waiting = [0] if flow.blocks else []
    reached = set(waiting)
    while waiting:
        number = waiting.pop()
        block = flow.blocks[number]
        pending = dict(entering[number])
        for index in range(block.first, block.last):
            _step(body[index], pending, found)
        for successor in block.successors:
            if successor < 0:
                continue
            target = entering[successor]
            grown = {name: line for name, line in pending.items() if name not in target}
            if grown or successor not in reached:
                target.update(grown)
                reached.add(successor)
                waiting.append(successor)
    return [found[line] for line in sorted(found)]


def _step(instruction: Instruction, pending: dict[str, int], found: dict[int, Lint]) -> None:
    """Track the pending registers across one instruction, and record its mistake, if any."""
    parts = instruction.parts
    if parts[0] == "tcgen05" and parts[1] == "wait::ld":
        if instruction.guard is None:
            pending.clear()
        return
    loaded = parts[0] == "tcgen05" and parts[1] == "ld"
    sources = [pending[name] for name in read(instruction) if name in pending]
    if sources and _leaves_registers(instruction):
        found.setdefault(
            instruction.line,
            Lint(
                instruction.line,
                f"{instruction.opcode} uses what the tcgen05.ld of PTX line {sources[0]} has not "
                "loaded yet on some path; tcgen05.wait::ld between the two is missing",
            ),
        )
    for name in written(instruction):
        if loaded:
            pending[name] = instruction.line
        elif sources:
            pending[name] = sources[0]
        elif instruction.guard is None:
            pending.pop(name, None)
