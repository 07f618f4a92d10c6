"""Control flow: branches, reconvergence, the end of lanes and kernels."""

from typing import TYPE_CHECKING

import numpy as np

from tests.emulator.findings import KernelAssertion
from tests.emulator.instructions.registry import family, runtime
from tests.emulator.ptx.syntax import Instruction, Symbol

if TYPE_CHECKING:
    from tests.emulator.codegen import Emitter
    from tests.emulator.machine.warp import Warp

Lanes = np.ndarray
Stack = list[tuple[int, int, Lanes]]


@runtime
def part(
    stack: Stack, taken: Lanes, running: Lanes, target: int, following: int, meeting: int
) -> tuple[int, Lanes]:
    """Split the ``running`` lanes at a branch; returns the block to run next and its lanes.

    Lanes in ``taken`` go to block ``target``, the others to ``following``; they reconverge at block
    ``meeting``.
    """
    other = running & ~taken
    taken = running & taken
    if not other.any():
        return target, running
    if not taken.any():
        return following, running
    stack.append((meeting, meeting, running))
    stack.append((meeting, following, other))
    return target, taken


@runtime
def meet(stack: Stack, w: "Warp", here: int, running: Lanes) -> tuple[int, Lanes]:
    """Block and lanes to run next: first lanes that are not yet at ``here``, then all lanes."""
    while stack and stack[-1][0] == here:
        _, pc, lanes = stack.pop()
        lanes = lanes & w.live
        if not lanes.any():
            continue
        running = lanes
        if pc != here:
            return pc, lanes
    return here, running


@runtime
def leave(stack: Stack, w: "Warp", lanes: Lanes) -> tuple[int, Lanes]:
    """Retire exited lanes; returns the block and lanes to run next, or (-1, no lanes)."""
    w.live = w.live & ~lanes
    while stack:
        _, pc, waiting = stack.pop()
        waiting = waiting & w.live
        if waiting.any():
            return pc, waiting
    return -1, w.live


@runtime
def trap(w: "Warp", what: str) -> None:
    raise KernelAssertion(f"{what} executed by {w.name}")


@family("bra")
def branch(e: "Emitter", i: Instruction) -> None:
    target_operand = i.operands[0]
    assert isinstance(target_operand, Symbol)
    target = e.block_number(target_operand.name)
    go = f"pc = {target}" if target >= 0 else "return"
    if i.guard is None:
        e.write(go)
        return
    number = e.block
    following = number + 1 if number + 1 < len(e.flow.blocks) else -1
    form = e.storage(i.guard)
    if form.uniform:
        sense = "not " if i.guard_negated else ""
        if target >= 0 and following >= 0:
            e.write(f"pc = {target} if {sense}{form.name} else {following}")
            return
        with e.indented(f"if {sense}{form.name}:"):
            e.write(go)
        with e.indented("else:"):
            e.write(f"pc = {following}" if following >= 0 else "return")
        return
    meeting = e.flow.blocks[number].reconverges_at
    sense = "~" if i.guard_negated else ""
    running = "m" if e.masked else "w.live"
    e.write(f"pc, m = part(stack, {sense}{form.name}, {running}, {target}, {following}, {meeting})")
    if target < 0 or following < 0:
        with e.indented("if pc < 0:"):
            e.write("pc, m = leave(stack, w, m)")
            e.write("if pc < 0: return")


@family("brx")
def indexed_branch(e: "Emitter", i: Instruction) -> None:
    raise e.unknown(i, "indirect branches; compile with jump tables off")


@family("ret", "exit")
def leave_kernel(e: "Emitter", i: Instruction) -> None:
    number = e.block
    running = "m" if e.masked else "w.live"
    if i.guard is None:
        e.write(f"pc, m = leave(stack, w, {running})")
        e.write("if pc < 0: return")
        return
    form = e.storage(i.guard)
    if form.uniform:
        sense = "not " if i.guard_negated else ""
        with e.indented(f"if {sense}{form.name}:"):
            e.write(f"pc, m = leave(stack, w, {running})")
            e.write("if pc < 0: return")
            e.write("continue")
        e.write(f"m = {running}")
        return
    sense = "~" if i.guard_negated else ""
    gone = e.temporary()
    e.write(f"{gone} = {sense}{form.name} & {running}")
    with e.indented(f"if {gone}.any():"):
        # The other lanes continue at the next block, as if they had been waiting there.
        e.write(f"stack.append((-1, {number + 1}, {running} & ~{gone}))")
        e.write(f"pc, m = leave(stack, w, {gone})")
        e.write("if pc < 0: return")
        e.write("continue")
    e.write(f"m = {running}")


@family("trap", "brkpt")
def stop(e: "Emitter", i: Instruction) -> None:
    e.write(f"trap(w, {i.opcode!r})")


@family("pragma", "nanosleep", "pmevent")
def nothing(e: "Emitter", i: Instruction) -> None:
    """Emit a yield to the scheduler, for an instruction without architectural effect."""
    e.write("yield")
