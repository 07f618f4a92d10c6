"""Uniformity analysis: registers with one value per warp, and blocks that all lanes run together.

The generated code keeps a uniform register as one Python integer and runs a convergent block
without masks; everything else is 32 lanes wide. The analysis is optimistic and repeated until
nothing changes.
"""

from collections import defaultdict
from dataclasses import dataclass

from tests.emulator.ptx.flow import Flow, read, registers_of, results, written
from tests.emulator.ptx.syntax import Immediate, Instruction, Operand, Register

# Families whose result is uniform if their sources are; lane-wise families are added below.
_LIKE_SOURCES = frozenset(
    ["ld", "ldu", "mapa", "cvta", "getctarank", "isspacep", "clusterlaunchcontrol"]
)
_LANE_BOUND = frozenset(["atom", "tcgen05", "ldmatrix", "mma", "wgmma", "match", "multimem"])
_WARP_WIDE = frozenset(["vote", "redux", "activemask", "bar", "barrier"])
_LANE_REGISTERS = frozenset(
    ["%laneid", "%lanemask_eq", "%lanemask_lt", "%lanemask_le", "%lanemask_gt", "%lanemask_ge"]
)


@dataclass(frozen=True)
class Uniformity:
    """Sets of registers and blocks found by :func:`analyse_uniformity`.

    Attributes:
        divergent: registers that may differ between the lanes of a warp.
        masked: blocks that some lanes of a warp may run without the others.
        merged: registers whose writes in a masked block must keep the other lanes' values.
        meeting: blocks at which diverged lanes reconverge.
    """

    divergent: frozenset[str]
    masked: frozenset[int]
    merged: frozenset[str]
    meeting: frozenset[int]


def _special_is_divergent(name: str, block_x: int) -> bool:
    if name in _LANE_REGISTERS or name in ("%tid.x", "%tid"):
        return True
    return name in ("%tid.y", "%tid.z") and block_x % 32 != 0


def _is_warp_index(instruction: Instruction, divergent: set[str], block_x: int) -> bool:
    """Whether the instruction is like ``shr.u32 d, %tid.x, 5``: uniform if rows are whole warps."""
    operands = instruction.operands
    return (
        instruction.parts[0] == "shr"
        and len(operands) == 3
        and isinstance(operands[1], Register)
        and operands[1].name in divergent
        and isinstance(operands[2], Immediate)
        and 5 <= operands[2].value < 32
        and block_x % 32 == 0
    )


def analyse_uniformity(flow: Flow, block_x: int, partial: bool = False) -> Uniformity:
    """Find the divergent registers and masked blocks of a kernel.

    Args:
        flow: the kernel's control flow.
        block_x: threads of a CTA along x; if thread rows are not whole warps, nothing in ``%tid.y``
            is uniform.
        partial: whether lanes are missing from the start (partial warps): all blocks then run
            masked.
    """
    body, blocks = flow.kernel.body, flow.blocks
    definitions: dict[str, list[tuple[int, int]]] = defaultdict(list)
    uses: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for number, block in enumerate(blocks):
        for index in range(block.first, block.last):
            for name in written(body[index]):
                definitions[name].append((number, index))
            for name in read(body[index]):
                uses[name].add((number, index))

    thread_x = {
        name
        for name, places in definitions.items()
        if len(places) == 1
        and body[places[0][1]].parts[0] == "mov"
        and any(isinstance(o, Register) and o.name == "%tid.x" for o in body[places[0][1]].operands)
    }

    def confined(name: str) -> bool:
        """Whether each reading lane wrote the register earlier in the same loop iteration."""
        places = definitions[name]
        if len(places) != 1:
            return False
        number, index = places[0]
        if body[index].guard is not None:
            return False
        return all(
            blocks[other].loop == blocks[number].loop
            and (at > index if other == number else flow.dominates(number, other))
            for other, at in uses[name]
        )

    once = {name for name in definitions if confined(name)}
    divergent: set[str] = set()
    masked: set[int] = set(range(len(blocks))) if partial else set()
    meeting: set[int] = set()

    def differs(operand: Operand) -> bool:
        return any(
            name in divergent or (name[0] == "%" and _special_is_divergent(name, block_x))
            for name in registers_of(operand)
        )

    def source_divergent(instruction: Instruction) -> bool:
        return any(differs(o) for o in instruction.operands[results(instruction) :])

    def result_divergent(instruction: Instruction, number: int) -> bool:
        parts = instruction.parts
        family = parts[0]
        if instruction.guard is not None and instruction.guard in divergent:
            return True
        if family in _LANE_BOUND and not (family == "tcgen05" and parts[1] != "ld"):
            return True
        if family == "ld" and "local" in parts:
            return True
        if family == "mbarrier":
            return parts[1] not in ("try_wait", "test_wait") or source_divergent(instruction)
        if family == "elect":
            return True
        if family in _WARP_WIDE:
            return number in masked
        if family == "shfl":
            lane, clamp = instruction.operands[2:4]
            fixed = isinstance(clamp, Immediate) and clamp.value == 31
            return not ("idx" in parts and fixed and not differs(lane) and number not in masked)
        if _is_warp_index(instruction, thread_x, block_x):
            return False
        return source_divergent(instruction)

    changed = True
    while changed:
        changed = False
        for number, block in enumerate(blocks):
            for index in range(block.first, block.last):
                instruction = body[index]
                names = [name for name in written(instruction) if name not in divergent]
                if names:
                    spread = result_divergent(instruction, number)
                    for name in names:
                        if spread or (number in masked and name not in once):
                            divergent.add(name)
                            changed = True
            ender = body[block.last - 1] if block.last > block.first else None
            parts_lanes = (
                ender is not None
                and len(block.successors) > 1
                and (
                    (ender.guard is not None and ender.guard in divergent)
                    or (ender.parts[0] == "brx" and source_divergent(ender))
                )
            )
            if parts_lanes:
                region = flow.between(number)
                if not region <= masked:
                    masked |= region
                    changed = True
                if block.reconverges_at >= 0:
                    meeting.add(block.reconverges_at)
    merged = {name for name in divergent if name not in once}
    return Uniformity(
        frozenset(divergent), frozenset(masked), frozenset(merged), frozenset(meeting)
    )
