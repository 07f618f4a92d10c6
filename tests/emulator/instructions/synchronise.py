"""CTA barriers, warp barriers and the cluster barrier."""

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.emulator.findings import BarrierMisuse, DivergentExecution
from tests.emulator.instructions.mbarrier import pick
from tests.emulator.instructions.registry import family, runtime
from tests.emulator.ptx.syntax import Instruction, Not
from tests.emulator.sync.barrier import Barrier

if TYPE_CHECKING:
    from tests.emulator.codegen import Emitter
    from tests.emulator.machine.warp import Mask, Warp


@family("bar", "barrier")
def barrier(e: "Emitter", i: Instruction) -> None:
    parts = [p for p in i.parts[1:] if p != "cta"]
    if parts[0] == "warp":
        # Lanes of a warp run in lockstep here; the mask names the lanes that must arrive together.
        e.write(f"bar_warp_sync(w, {e.value(i.operands[0], 'u32')}, {e.mask})")
        return
    aligned = i.parts[0] == "bar" or "aligned" in parts
    if parts[0] == "cluster":
        _cluster(e, i, parts, aligned)
        return
    operands = list(i.operands)
    if aligned:
        e.write(f"w.require_all({e.mask}, {i.opcode!r})")
    if parts[0] == "red":
        target, which = operands[0], operands[1]
        predicate = operands[-1]
        threads = e.value(operands[2], "u32") if len(operands) == 4 else "None"
        voting = e.lanes(predicate, "pred")
        if isinstance(predicate, Not) and e.is_uniform(predicate):
            voting = f"np.full(32, {e.value(predicate, 'pred')})"
        name = e.temporary()
        e.write(
            f"{name} = yield from bar_red(w, {e.value(which, 'u32')}, {threads}, {parts[1]!r}, "
            f"{voting}, {e.mask}, {i.line})"
        )
        kind = parts[-1] if parts[-1] in ("u32", "pred") else "pred"
        e.assign(target, name, kind, uniform=True)
        return
    number = e.value(operands[0], "u32")
    threads = e.value(operands[1], "u32") if len(operands) > 1 else "None"
    if parts[0] == "sync":
        e.write(f"yield from bar_sync(w, {number}, {threads}, {e.mask}, {i.line})")
    elif parts[0] == "arrive":
        e.write(f"bar_arrive(w, {number}, {threads}, {e.mask}, {i.line})")
        e.write("if w.jitter: yield")
    else:
        raise e.unknown(i)


def _cluster(e: "Emitter", i: Instruction, parts: list[str], aligned: bool) -> None:
    if aligned:
        e.write(f"w.require_all({e.mask}, {i.opcode!r})")
    known = ("cluster", "arrive", "wait", "release", "relaxed", "acquire", "aligned")
    if any(part not in known for part in parts):
        raise e.unknown(i)
    if parts[1] == "arrive":
        e.write(f"cluster_arrive(w, {'relaxed' in parts}, {i.line})")
        e.write("if w.jitter: yield")
    else:
        e.write(f"yield from cluster_wait(w, {i.line})")


# Functions called by generated code


@runtime
def bar_warp_sync(w: "Warp", members: Any, mask: "Mask") -> None:
    lane = w.active(mask)[0]
    wanted = pick(members, lane)
    here = w.mask_bits(mask)
    missing = wanted & ~here & w.mask_bits(None)
    if missing:
        w.launch.report(
            DivergentExecution(
                f"bar.warp.sync waits for lanes {missing:#010x} that took another way"
            )
        )
    w.order_lanes()


def _arrive(w: "Warp", found: Barrier, threads: Any, votes: tuple[int, int] = (0, 0)) -> int:
    expected = 32 * w.cta.running if threads is None else pick(threads, 0)
    return found.arrive(w.index, 32, expected, w.actor.release(), votes, threads is None)


@runtime
def bar_sync(
    w: "Warp", number: Any, threads: Any, mask: "Mask", line: int
) -> Generator[None, None, None]:
    found = w.cta.barrier(pick(number, w.active(mask)[0]))
    generation = _arrive(w, found, threads)
    w.note("barrier", line, ("barrier", w.cta.position, found.name), generation, "sync")
    yield from _await(w, found, generation)


@runtime
def bar_arrive(w: "Warp", number: Any, threads: Any, mask: "Mask", line: int) -> None:
    if threads is None:
        raise BarrierMisuse("barrier.arrive without a thread count")
    found = w.cta.barrier(pick(number, w.active(mask)[0]))
    generation = _arrive(w, found, threads)
    w.note("barrier", line, ("barrier", w.cta.position, found.name), generation, "arrive")


def _await(w: "Warp", found: Any, generation: int) -> Generator[None, None, None]:
    if found.generation == generation:
        w.launch.counters.waits["barrier"] += 1
    while found.generation == generation:
        w.blocked(found.waiters, lambda: str(found))
        yield
    w.actor.acquire(found.handed[generation])
    w.order_lanes()


@runtime
def bar_red(
    w: "Warp",
    number: Any,
    threads: Any,
    operation: str,
    predicate: np.ndarray,
    mask: "Mask",
    line: int,
) -> Generator[None, None, int]:
    lanes = w.live if mask is None else mask
    votes = (int((predicate & lanes).sum()), int(lanes.sum()))
    found = w.cta.barrier(pick(number, w.active(mask)[0]))
    generation = _arrive(w, found, threads, votes)
    w.note("barrier", line, ("barrier", w.cta.position, found.name), generation, "sync")
    yield from _await(w, found, generation)
    true, voted = found.result[generation]
    if operation == "popc":
        return true
    return true == voted if operation == "and" else true > 0


@runtime
def cluster_arrive(w: "Warp", relaxed: bool, line: int) -> None:
    if w.cluster_generation is not None:
        raise BarrierMisuse("barrier.cluster.arrive twice without a barrier.cluster.wait")
    clocks = w.actor.relaxed() if relaxed else w.actor.release()
    w.cluster_generation = w.cta.cluster.barrier.arrive((w.cta.rank, w.index), clocks)
    w.note("cluster_arrive", line, ("cluster", w.cta.cluster.number), w.cluster_generation)


@runtime
def cluster_wait(w: "Warp", line: int) -> Generator[None, None, None]:
    generation = w.cluster_generation
    if generation is None:
        raise BarrierMisuse("barrier.cluster.wait without a barrier.cluster.arrive before it")
    found = w.cta.cluster.barrier
    w.note("cluster_wait", line, ("cluster", w.cta.cluster.number), generation)
    while found.generation == generation:
        w.blocked(found.waiters, lambda: str(found))
        yield
    w.cluster_generation = None
    w.actor.acquire(found.handed)
    w.order_lanes()
