"""A kernel cut into straight-line segments, with the cost of each for a warp that runs alone.

Segments end at instructions whose traces leave events, and before the first use of a value that a
load may still be fetching. In between, time depends on issue slots, pipes and dependencies only, so
that one list schedule per segment is enough.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from tests.emulator.ptx.flow import Flow, read, written
from tests.emulator.ptx.syntax import Instruction
from tests.emulator.timing.costs import NOTHING, Cost, Costs, is_device_fence, is_event, is_load
from tests.emulator.timing.fusion import absorbed

STORES = "%stores"  # stands for the warp's stores under way, as a register for a load


@dataclass(eq=False)
class Segment:
    """Instructions that one warp issues with no wait other than for its own arithmetic.

    Attributes:
        block: basic block of the segment.
        length: cycles from the first issue until the warp can issue the next segment, with one warp
            on the scheduler.
        slots: cycles of each pipe; "issue" counts instructions.
        line: PTX line of the last instruction; events of that line follow the segment.
        waits: registers of loads that must have arrived before the segment starts; ``STORES`` if
            the warp's stores must have been performed.
        loads: registers that the last instruction, a load, fetches.
        branch: whether the segment ends the block with a jump.
        late: by register, cycles from the segment's end until the register's value is ready.
        early: by register, cycles from the segment's start until the first use.
    """

    block: int
    length: float = 0.0
    slots: dict[str, float] = field(default_factory=dict)
    line: int = 0
    waits: tuple[str, ...] = ()
    loads: tuple[str, ...] = ()
    branch: bool = False
    late: dict[str, float] = field(default_factory=dict)
    early: dict[str, float] = field(default_factory=dict)


def segments_of(flow: Flow, costs: Costs) -> list[list[Segment]]:
    """The segments of every basic block, in order."""
    body = flow.kernel.body
    fetched = {name for i in body if is_load(i) for name in written(i)}
    free = absorbed(body[block.first : block.last] for block in flow.blocks)
    return [
        [
            _schedule(
                number, part, waits, [NOTHING if i.line in free else costs.of(i) for i in part]
            )
            for waits, part in _cut(body[block.first : block.last], fetched)
        ]
        for number, block in enumerate(flow.blocks)
    ]


def _cut(
    body: list[Instruction], fetched: set[str]
) -> Iterator[tuple[tuple[str, ...], list[Instruction]]]:
    """Parts of a block, each with the registers that its start waits for.

    ``fetched``: registers that any load of the kernel fetches.
    """
    pending = set(fetched)
    waits: tuple[str, ...] = ()
    part: list[Instruction] = []
    for instruction in body:
        needed = pending.intersection(read(instruction)) | pending.intersection(
            written(instruction)
        )
        if is_device_fence(instruction):
            needed.add(STORES)
        if needed:
            if part:
                yield waits, part
                part = []
                waits = ()
            waits = tuple(sorted(needed.union(waits)))
            pending -= needed
        part.append(instruction)
        if is_load(instruction):
            pending.update(written(instruction))
        if is_event(instruction):
            yield waits, part
            part, waits = [], ()
    if part:
        yield waits, part


def _schedule(
    number: int, part: list[Instruction], waits: tuple[str, ...], priced: list[Cost]
) -> Segment:
    """List schedule of a segment: longest remaining dependency chain first, one issue per cycle.

    ``number``: basic block; ``part``, ``priced``: instructions and their costs.
    """
    last = part[-1]
    segment = Segment(number, line=last.line, waits=waits)
    segment.loads = tuple(written(last)) if is_load(last) else ()
    segment.branch = last.parts[0] in ("bra", "brx")
    for cost in priced:
        if cost.issue:
            segment.slots["issue"] = segment.slots.get("issue", 0.0) + cost.issue
        if cost.pipe and cost.cycles:
            segment.slots[cost.pipe] = segment.slots.get(cost.pipe, 0.0) + cost.cycles
    before, remaining = _dependencies(part, priced)
    issued = _issue_times(priced, before, remaining)
    end = max((t + _taken(c) for t, c in zip(issued, priced, strict=True)), default=0.0)
    segment.length = end
    for instruction, at, cost in zip(part, issued, priced, strict=True):
        for name in read(instruction):
            segment.early.setdefault(name, at)
        for name in written(instruction):
            late = at + cost.latency - end
            segment.late.pop(name, None)
            if late > 0:
                segment.late[name] = late
    return segment


def _taken(cost: Cost) -> float:
    """Number of cycles until the warp can issue the next instruction."""
    return max(cost.issue, cost.stall)


def _dependencies(
    part: list[Instruction], priced: list[Cost]
) -> tuple[list[list[int]], list[float]]:
    """Producers of each instruction, and the longest latency chain from the instruction on."""
    producer: dict[str, int] = {}
    before: list[list[int]] = []
    for index, instruction in enumerate(part):
        before.append([producer[name] for name in read(instruction) if name in producer])
        for name in written(instruction):
            producer[name] = index
    remaining = [cost.latency for cost in priced]
    for index in range(len(part) - 1, -1, -1):
        for earlier in before[index]:
            chain = priced[earlier].latency + remaining[index]
            remaining[earlier] = max(remaining[earlier], chain)
    return before, remaining


def _issue_times(
    priced: list[Cost], before: list[list[int]], remaining: list[float]
) -> list[float]:
    last = len(priced) - 1
    issued = [0.0] * len(priced)
    after: list[list[int]] = [[] for _ in priced]
    missing = [len(set(earlier)) for earlier in before]
    for index, earlier in enumerate(before):
        for producer in set(earlier):
            after[producer].append(index)
    # Instructions by the time their operands are ready; ready instructions by the longest chain.
    later = [(0.0, -remaining[i], i) for i in range(last) if not missing[i]]
    heapify(later)
    now: list[tuple[float, int]] = []
    operands = [0.0] * len(priced)
    free: dict[str, float] = {}
    clock = 0.0

    def place(index: int, at: float) -> None:
        cost = priced[index]
        issued[index] = at
        free[cost.pipe] = at + cost.cycles
        for consumer in after[index]:
            operands[consumer] = max(operands[consumer], at + cost.latency)
            missing[consumer] -= 1
            if not missing[consumer] and consumer != last:
                heappush(later, (operands[consumer], -remaining[consumer], consumer))

    while later or now:
        while later and later[0][0] <= clock:
            _, chain, index = heappop(later)
            heappush(now, (chain, index))
        if not now:
            clock = later[0][0]
            continue
        chain, index = heappop(now)
        if free.get(priced[index].pipe, 0.0) > clock:
            heappush(later, (free[priced[index].pipe], chain, index))
            continue
        place(index, clock)
        clock += _taken(priced[index])
    # The instruction that ends the segment, an event or a jump, comes last.
    place(last, max(clock, operands[last], free.get(priced[last].pipe, 0.0)))
    return issued
