"""Clusters and the grid: mapa, getctarank, launch control, dependent launches, register budgets."""

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.emulator.findings import IllegalInstruction
from tests.emulator.instructions.mbarrier import barrier_at, check_visible, pick
from tests.emulator.instructions.registry import family, runtime
from tests.emulator.memory.clocks import PREREQUISITE, Origin
from tests.emulator.memory.shadow import Access
from tests.emulator.ptx.syntax import Instruction, Sink, Symbol, Vector
from tests.emulator.windows import SHARED_WINDOW

if TYPE_CHECKING:
    from tests.emulator.codegen import Emitter
    from tests.emulator.machine.warp import Mask, Warp


@family("mapa")
def map_address(e: "Emitter", i: Instruction) -> None:
    target, source, rank = i.operands
    bits = i.parts[-1]
    generic = not any(p.startswith("shared") for p in i.parts)
    value = e.address_of(source) if isinstance(source, Symbol) else e.value(source, bits)
    window = SHARED_WINDOW if generic else 0
    uniform = e.is_uniform(source) and e.is_uniform(rank)
    e.assign(
        target,
        f"mapped(w, {value}, {e.value(rank, 'u32')}, {window}, {bits == 'u64'})",
        bits,
        uniform,
    )


@runtime
def mapped(w: "Warp", address: Any, rank: Any, window: int, wide: bool) -> Any:
    """mapa: address of the same offset in CTA ``rank``, which is checked only at the access."""
    if isinstance(address, np.ndarray) or isinstance(rank, np.ndarray):
        inside = np.asarray(address).astype(np.uint64) & np.uint64(0xFFFFFF)
        found = (np.asarray(rank).astype(np.uint64) << np.uint64(24)) | inside | np.uint64(window)
        found = np.broadcast_to(found, 32)
        return found if wide else found.astype(np.uint32)
    return rank << 24 | address & 0xFFFFFF | window


@family("getctarank")
def rank_of(e: "Emitter", i: Instruction) -> None:
    target, source = i.operands
    bits = i.parts[-1]
    value = e.address_of(source) if isinstance(source, Symbol) else e.value(source, bits)
    text = f"({value} >> 24 & 0xff)"
    if not e.is_uniform(source):
        text = f"({value} >> 24 & 0xff).astype(np.uint32)"
    e.assign(target, text, "u32", uniform=e.is_uniform(source))


@family("griddepcontrol")
def dependent_launch(e: "Emitter", i: Instruction) -> None:
    actions = {"wait": "await_prerequisites", "launch_dependents": "release_dependents"}
    if len(i.parts) != 2 or i.parts[1] not in actions:
        raise e.unknown(i)
    e.write(f"w.launch.counters.waits['{i.opcode}'] += 1")
    e.write(f"if traced: w.note('dependency', {i.line}, detail={i.parts[1]!r})")
    e.write(f"yield from {actions[i.parts[1]]}(w)")


@runtime
def await_prerequisites(w: "Warp") -> Generator[None, None, None]:
    """griddepcontrol.wait: wait until the preceding launch has ended and its writes are visible."""
    link = w.launch.link
    before = link.before
    while before is not None and not before.done:
        what = f"the end of {before.launch.program.kernel.name}, the launch before its own"
        w.blocked(before.waiters, lambda what=what: what)  # type: ignore[misc]
        yield
    link.order.waited = True
    w.actor.finished(PREREQUISITE, 1)
    for component in link.learn():
        w.actor.finished(component, 1)


@runtime
def release_dependents(w: "Warp") -> Generator[None, None, None]:
    """griddepcontrol.launch_dependents; note a release that precedes griddepcontrol.wait."""
    link = w.launch.link
    if PREREQUISITE not in w.actor.clocks.generic:
        link.order.released_early = True
    if link.release(w.cta):
        yield


@family("setmaxnreg")
def register_budget(e: "Emitter", i: Instruction) -> None:
    count = e.value(i.operands[0], "u32")
    e.write(f"w.require_all({e.mask}, {i.opcode!r})")
    e.write(f"set_registers(w, {count}, {i.parts[1] == 'inc'})")


@runtime
def set_registers(w: "Warp", count: int, more: bool) -> None:
    if not 24 <= count <= 256 or count % 8:
        raise IllegalInstruction(
            f"setmaxnreg {count}: must be 24 to 256 and a multiple of 8 (PTX ISA, setmaxnreg)"
        )
    w.cta.set_registers(w, count, more)


@family("clusterlaunchcontrol")
def launch_control(e: "Emitter", i: Instruction) -> None:
    if i.parts[1] == "try_cancel":
        response, barrier = i.operands[:2]
        multicast = any(p.startswith("multicast") for p in i.parts)
        e.write(
            f"try_cancel(w, {e.address(response)}, {e.address(barrier)}, {multicast}, {e.mask}, "
            f"{i.line})"
        )
        e.write("if w.jitter: yield")
        return
    target, source = i.operands
    value = e.value(source, "b128")
    uniform = e.is_uniform(source)
    if i.has("is_canceled"):
        e.assign(target, f"was_cancelled({value})", "pred", uniform)
        return
    items = list(target.items) if isinstance(target, Vector) else [target]
    axis = next((p[-1] for p in i.parts if p.startswith("get_first_ctaid::")), "")
    name = e.temporary()
    e.write(f"{name} = first_cta({value})")
    for number, item in enumerate(items):
        index = "xyz".index(axis) if axis else number
        if not isinstance(item, Sink):
            e.assign(item, f"{name}[{index}]", "u32", uniform)


# The response is opaque (PTX ISA, clusterlaunchcontrol): here x, y, z and a flag, 32 bits each.


@runtime
def was_cancelled(response: Any) -> Any:
    if isinstance(response, np.ndarray):
        return response.view(np.uint32).reshape(32, 4)[:, 3] == 1
    return response >> 96 == 1


@runtime
def first_cta(response: Any) -> list[Any]:
    if isinstance(response, np.ndarray):
        words = response.view(np.uint32).reshape(32, 4)
        return [words[:, n] for n in range(4)]
    return [response >> 32 * n & 0xFFFFFFFF for n in range(4)]


@runtime
def try_cancel(
    w: "Warp", response: Any, barrier: Any, multicast: bool, mask: "Mask", line: int
) -> None:
    """try_cancel: request the next cluster; the async proxy writes the shared-memory response."""
    for lane in w.active(mask):
        _cancel(w, pick(response, lane), pick(barrier, lane), multicast, line)


def _cancel(w: "Warp", response: int, barrier: int, multicast: bool, line: int) -> None:
    number = w.launch.next_cluster()
    words = np.zeros(4, np.uint32)
    if number is not None:
        w.launch.link.cancelled()
        shape, grid = w.launch.cluster, w.launch.grid
        across = [grid[axis] // shape[axis] for axis in range(3)]
        words[0] = number % across[0] * shape[0]
        words[1] = number // across[0] % across[1] * shape[1]
        words[2] = number // (across[0] * across[1]) * shape[2]
        words[3] = 1
    place, signal = response & 0xFFFFFF, barrier & 0xFFFFFF
    ctas = [w.reach(cta.rank) for cta in w.cta.cluster.ctas] if multicast else [w.cta]
    before = w.actor.clocks.copy()
    for cta in ctas:
        base = cta.rank << 24
        _, found = barrier_at(w, signal | base)
        check_visible(w, found, cta, True)
        w.note("launch_control", line, found.key)

        def run(cta: Any = cta, found: Any = found, base: int = base) -> None:
            origin = Origin("launch-control write", "async", False, lambda: w.where(line))
            event = w.launch.events.new(found.component, found.phase + 1, origin)
            access = Access(w.launch.events, event, before, {0, 1}, w.launch.report)
            cta.shared.write(place | base, words.view(np.uint8), access)
            cta.touch(found.component, found.phase + 1, origin.verb, origin.where)
            found.complete(16)

        w.issue("copies", ("clc", cta.rank), run, line)
