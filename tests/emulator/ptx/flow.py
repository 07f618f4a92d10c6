"""Control flow: basic blocks, dominators, loops, and reconvergence points of divergent lanes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import networkx as nx

from tests.emulator.findings import PtxSyntaxError
from tests.emulator.ptx.syntax import (
    Address,
    Instruction,
    Kernel,
    Not,
    Operand,
    Pair,
    Register,
    Symbol,
    Vector,
)

_NO_RESULT = frozenset(
    [
        "st",
        "stmatrix",
        "red",
        "bra",
        "brx",
        "ret",
        "exit",
        "trap",
        "brkpt",
        "bar",
        "barrier",
        "fence",
        "membar",
        "cp",
        "prefetch",
        "prefetchu",
        "discard",
        "applypriority",
        "griddepcontrol",
        "nanosleep",
        "pmevent",
        "setmaxnreg",
        "tensormap",
    ]
)
_EXIT = -1


def results(instruction: Instruction) -> int:
    """Number of leading operands that are destinations."""
    parts = instruction.parts
    family = parts[0]
    if family in ("bar", "barrier"):
        return 1 if "red" in parts and "cluster" not in parts else 0
    if family in _NO_RESULT:
        return 0
    if family == "mbarrier":
        operands = instruction.operands
        return 0 if not operands or isinstance(operands[0], Address) else 1
    if family == "tcgen05":
        return 1 if parts[1] == "ld" else 0
    if family == "clusterlaunchcontrol":
        return 1 if parts[1] == "query_cancel" else 0
    if family == "multimem":
        return 1 if parts[1] == "ld_reduce" else 0
    if family == "wgmma":
        return 1 if parts[1] == "mma_async" else 0
    return 1


def registers_of(operand: Operand) -> Iterator[str]:
    """Names of the registers an operand mentions."""
    if isinstance(operand, Register):
        yield operand.name
    elif isinstance(operand, Not):
        yield operand.register.name
    elif isinstance(operand, Vector):
        for item in operand.items:
            yield from registers_of(item)
    elif isinstance(operand, Pair):
        yield from registers_of(operand.first)
        yield from registers_of(operand.second)
    elif isinstance(operand, Address):
        yield from registers_of(operand.start)
        for item in operand.coordinates:
            yield from registers_of(item)


def _registers(operands: Sequence[Operand]) -> list[str]:
    names: list[str] = []
    for operand in operands:
        if type(operand) is Register:  # true of most operands
            names.append(operand.name)
        else:
            names += registers_of(operand)
    return names


def written(instruction: Instruction) -> list[str]:
    return _registers(instruction.operands[: results(instruction)])


def _first_source(instruction: Instruction) -> int:
    # wgmma adds to the previous value of its accumulator.
    return 0 if instruction.parts[0] == "wgmma" else results(instruction)


def read(instruction: Instruction) -> list[str]:
    """Registers that the instruction reads, including its guard."""
    names = _registers(instruction.operands[_first_source(instruction) :])
    if instruction.guard is not None:
        names.append(instruction.guard)
    return names


@dataclass
class Block:
    """Basic block: instructions that run one after the other.

    Attributes:
        first, last: half-open range in ``Kernel.body``.
        successors: block indices; -1 is the end of the kernel.
        reconverges_at: block where lanes that diverge at this block's end reconverge, -1 for the
            end.
        loop: index of the innermost loop's header block, -1 outside of loops.
    """

    first: int
    last: int
    successors: list[int] = field(default_factory=list)
    reconverges_at: int = _EXIT
    loop: int = _EXIT


@dataclass
class Flow:
    """Control-flow graph: a kernel's blocks in textual order, each with its immediate dominator."""

    kernel: Kernel
    blocks: list[Block]
    dominator: dict[int, int]

    def dominates(self, a: int, b: int) -> bool:
        while b != a:
            parent = self.dominator.get(b, b)
            if parent == b:
                return False
            b = parent
        return True

    def between(self, start: int) -> set[int]:
        """Blocks that run before lanes that diverged at ``start``'s end have reconverged."""
        stop = self.blocks[start].reconverges_at
        found: set[int] = set()
        waiting = list(self.blocks[start].successors)
        while waiting:
            block = waiting.pop()
            if block in (stop, _EXIT) or block in found:
                continue
            found.add(block)
            waiting.extend(self.blocks[block].successors)
        return found


def _targets(kernel: Kernel, instruction: Instruction) -> list[int]:
    labels = []
    for operand in instruction.operands:
        items = operand.items if isinstance(operand, Vector) else (operand,)
        labels += [item.name for item in items if isinstance(item, Symbol)]
    for label in labels:
        if label not in kernel.labels:
            raise PtxSyntaxError(f"label {label} is not defined in {kernel.name}")
    return [kernel.labels[label] for label in labels]


def analyse(kernel: Kernel) -> Flow:
    """Cut ``kernel`` into basic blocks and find dominators, loops and reconvergence points."""
    body = kernel.body
    starts = {0, *kernel.labels.values()}
    for index, instruction in enumerate(body):
        if instruction.parts[0] in ("bra", "brx", "ret", "exit", "trap"):
            starts.add(index + 1)
    order = sorted(start for start in starts if start < len(body))
    number = {start: index for index, start in enumerate(order)}
    number[len(body)] = _EXIT
    blocks = []
    for index, first in enumerate(order):
        last = order[index + 1] if index + 1 < len(order) else len(body)
        block = Block(first, last)
        ender = body[last - 1] if last > first else None
        following = number[last]
        if ender is not None and ender.parts[0] in ("bra", "brx"):
            block.successors = [number[target] for target in _targets(kernel, ender)]
            if ender.guard is not None and following not in block.successors:
                block.successors.append(following)
        elif ender is not None and ender.parts[0] in ("ret", "exit", "trap"):
            block.successors = [_EXIT]
            if ender.guard is not None:
                block.successors.append(following)
        else:
            block.successors = [following]
        blocks.append(block)

    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(blocks)))
    graph.add_node(_EXIT)
    graph.add_edges_from((i, j) for i, block in enumerate(blocks) for j in block.successors)
    dominator = nx.immediate_dominators(graph, 0)
    dominator[0] = 0
    backwards = graph.reverse(copy=True)
    # An endless loop never reaches the end: add an edge, so that every block has a reconvergence
    # point.
    for index in set(range(len(blocks))) - nx.descendants(backwards, _EXIT):
        backwards.add_edge(_EXIT, index)
    meeting = nx.immediate_dominators(backwards, _EXIT)
    flow = Flow(kernel, blocks, dominator)
    for index, block in enumerate(blocks):
        block.reconverges_at = meeting.get(index, _EXIT)
    _find_loops(flow, graph)
    return flow


def _find_loops(flow: Flow, graph: nx.DiGraph) -> None:
    """Mark each block with its innermost natural loop."""
    loops: dict[int, set[int]] = {}
    for tail, head in graph.edges:
        if _EXIT in (tail, head) or tail not in flow.dominator or not flow.dominates(head, tail):
            continue
        members = loops.setdefault(head, {head})
        waiting = [tail]
        while waiting:
            block = waiting.pop()
            if block not in members:
                members.add(block)
                waiting.extend(graph.predecessors(block))
    for head, members in sorted(loops.items(), key=lambda item: -len(item[1])):
        for block in members:
            flow.blocks[block].loop = head
