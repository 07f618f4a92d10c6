"""cp.async: per-lane asynchronous copies from global to shared memory (PTX ISA, cp.async)."""

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.emulator.findings import IllegalInstruction, Misaligned
from tests.emulator.instructions.load_store import bank_passes, sectors
from tests.emulator.instructions.mbarrier import barrier_at, check_visible, pick
from tests.emulator.instructions.registry import family, runtime
from tests.emulator.memory.clocks import Origin
from tests.emulator.memory.shadow import ANY_LANE, Access
from tests.emulator.ptx.syntax import Immediate, Instruction, Not, Operand, Register

if TYPE_CHECKING:
    from tests.emulator.codegen import Emitter
    from tests.emulator.machine.warp import Mask, Warp


@family("cp")
def copy(e: "Emitter", i: Instruction) -> None:
    from tests.emulator.instructions import bulk

    parts = i.parts
    if "bulk" in parts:
        bulk.write(e, i)
    elif parts[1] != "async":
        raise e.unknown(i)
    elif parts[2] == "commit_group":
        e.write(f"w.copy_groups.commit(w.mask_bits({e.mask}))")
    elif parts[2] == "wait_group":
        e.write(f"yield from wait_copies(w, {e.value(i.operands[0], 'u32')}, {e.mask}, {i.line})")
    elif parts[2] == "wait_all":
        e.write(f"w.copy_groups.commit(w.mask_bits({e.mask}))")
        e.write(f"yield from wait_copies(w, 0, {e.mask}, {i.line})")
    elif parts[2] == "mbarrier":
        e.write(
            f"copies_arrive(w, {e.address(i.operands[0])}, {'noinc' in parts}, {e.mask}, {i.line})"
        )
    elif parts[2] in ("ca", "cg"):
        _issue(e, i)
    else:
        raise e.unknown(i)


def _issue(e: "Emitter", i: Instruction) -> None:
    for part in i.parts[3:]:
        if part.split("::")[0] not in ("shared", "global", "L2"):
            raise e.unknown(i, f"modifier .{part}")
    target, source, size, *rest = i.operands
    if not isinstance(size, Immediate):
        raise e.unknown(i, "copy size that is not a literal")
    source_size, ignored = "None", "False"
    if len(rest) > i.has("L2::cache_hint"):
        if _is_predicate(e, rest[0]):
            ignored = e.value(rest[0], "pred")
        else:
            source_size = e.value(rest[0], "u32")
    e.write(
        f"copy_async(w, {e.address(target)}, {e.address(source)}, {size.value}, {source_size}, "
        f"{ignored}, {i.parts[2]!r}, {e.mask}, {i.line})"
    )


def _is_predicate(e: "Emitter", operand: Operand) -> bool:
    if isinstance(operand, Not):
        return True
    return isinstance(operand, Register) and e.storage(operand.name).bits == 1


@runtime
def copy_async(
    w: "Warp",
    target: Any,
    source: Any,
    size: int,
    source_size: Any,
    ignored: Any,
    cache: str,
    mask: "Mask",
    line: int,
) -> None:
    """Copy ``size`` bytes per lane; zeros past ``source_size``, and only zeros if ``ignored``.

    ``cache``: cache operator, "ca" or "cg".
    """
    allowed = (16,) if cache == "cg" else (4, 8, 16)
    if size not in allowed:
        raise IllegalInstruction(f"cp.async.{cache} of {size} bytes: must be one of {allowed}")
    groups = w.copy_groups
    clock = groups.issued(line, w.mask_bits(mask))
    before = w.actor.clocks.copy()
    work, lanes = [], w.active(mask)
    issuer = w.one_lane(ANY_LANE) if w.unordered or w.unordered_reads else None
    for lane in lanes:
        place, origin = pick(target, lane), pick(source, lane)
        for address in (place, origin):
            if address % size:
                raise Misaligned(f"cp.async address {address:#x} is not a multiple of {size}")
        wanted = size if source_size is None else pick(source_size, lane)
        if wanted > size:
            raise IllegalInstruction(
                f"cp.async of {size} bytes with src-size {wanted}: must be at most {size}"
            )
        if pick(ignored, lane):
            wanted = 0
        work.append((place & 0xFFFFFFFF, origin, wanted))
    if w.trace is not None and work:
        _note_copy(w, work, size, clock, line)

    def run() -> None:
        made = Origin("cp.async write", "generic", False, lambda: w.where(line))
        event = w.launch.events.new(groups.writes, clock, made)
        access = Access(w.launch.events, event, before, {0, 1}, w.launch.report)
        for lane, (place, origin, wanted) in zip(lanes, work, strict=True):
            data = np.zeros(size, np.uint8)
            if wanted:
                data[:wanted] = w.gpu.memory.at(origin, "cp.async read").read(
                    origin, wanted, access
                )
            if issuer is not None:
                issuer._replace(lane=lane).given(access)
            w.cta.shared.write(place, data, access)
        w.launch.counters.nbytes["cp.async"] += size * len(work)

    groups.queue_work(clock, run, line)


def _note_copy(
    w: "Warp", work: list[tuple[int, int, int]], size: int, clock: int, line: int
) -> None:
    places, origins, wanted = np.array(work, np.uint64).T
    read = origins[wanted > 0]
    where, count, tags = sectors(read, size) if read.size else ((), 0, 0)
    detail = (len(work), count, bank_passes(places, size), tags)
    key = ("group", w.copy_groups.reads, clock)
    w.note("async_copy", line, key, size * len(work), detail, where)


@runtime
def wait_copies(w: "Warp", allowed: int, mask: "Mask", line: int) -> Generator[None, None, None]:
    groups = w.copy_groups
    until = groups.until(allowed, w.mask_bits(mask))
    w.note("wait_group", line, ("group", groups.reads), until, "writes")
    # cp.async is in the generic proxy (PTX ISA, cp.async).
    groups.wait(until, reads_only=False, proxy=False)
    if w.jitter:
        yield


@runtime
def copies_arrive(w: "Warp", address: Any, noinc: bool, mask: "Mask", line: int) -> None:
    """cp.async.mbarrier.arrive: arrive once all earlier cp.async of the lane are complete."""
    groups = w.copy_groups
    handed = w.actor.release()
    clock = handed.generic[groups.writes] = groups.mark()
    for lane in w.active(mask):
        cta, barrier = barrier_at(w, pick(address, lane))
        check_visible(w, barrier, cta, False)
        if not noinc:
            barrier.pending += 1
        w.note("async_arrive", line, barrier.key, 1, noinc)

        def run(barrier: Any = barrier) -> None:
            barrier.arrive(handed)

        groups.queue_work(clock, run, line)
