"""st.async and red.async: stores and reductions that complete on an mbarrier of the target CTA."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.emulator.findings import IllegalInstruction, Misaligned
from tests.emulator.instructions.mbarrier import barrier_at, check_visible, near, pick
from tests.emulator.instructions.registry import runtime
from tests.emulator.memory.clocks import Origin
from tests.emulator.memory.shadow import Access
from tests.emulator.ptx.syntax import TYPE_BITS, Instruction, Vector
from tests.emulator.tma.bulk import check_reduction
from tests.emulator.tma.reduction import ACCEPTED, combine

if TYPE_CHECKING:
    from tests.emulator.codegen import Emitter
    from tests.emulator.machine.trace import Key
    from tests.emulator.machine.warp import Mask, Warp

_NEEDED = frozenset(["async", "shared::cluster", "mbarrier::complete_tx::bytes"])


def store(e: "Emitter", i: Instruction) -> None:
    """Emit st.async to shared memory of the cluster (PTX ISA, st.async)."""
    rest = _rest(e, i, ("weak", "cluster", "v2", "v4"))
    if i.parts[-1] not in ("b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64", "b128"):
        raise e.unknown(i)
    vector = next((part for part in rest if part in ("v2", "v4")), "")
    count = len(i.operands[1].items) if isinstance(i.operands[1], Vector) else 1
    if count != int(vector[1:] or 1):
        raise IllegalInstruction(f"{i.opcode} of {count} values")
    _issue(e, i, "")


def reduce(e: "Emitter", i: Instruction) -> None:
    """Emit red.async on shared memory of the cluster (PTX ISA, red.async)."""
    rest = _rest(e, i, ("relaxed", "cluster", *ACCEPTED))
    operations = [part for part in rest if part in ACCEPTED]
    if i.parts[0] != "red" or len(operations) != 1 or not {"relaxed", "cluster"} <= set(rest):
        raise e.unknown(i)
    check_reduction(operations[0], i.parts[-1], "shared::cluster")
    _issue(e, i, operations[0])


def _rest(e: "Emitter", i: Instruction, accepted: tuple[str, ...]) -> list[str]:
    """Modifiers of the instruction beyond the required modifiers."""
    parts = i.parts[1:-1]
    rest = [part for part in parts if part not in _NEEDED]
    if not set(parts) >= _NEEDED or not set(rest) <= set(accepted):
        raise e.unknown(i)
    return rest


def _issue(e: "Emitter", i: Instruction, operation: str) -> None:
    target, source, barrier = i.operands
    items = source.items if isinstance(source, Vector) else (source,)
    bits = TYPE_BITS[i.parts[-1]]
    kind = "b128" if bits == 128 else f"u{bits}"
    values = "".join(f"{e.lanes(item, kind)}, " for item in items)
    e.write(
        f"write_async(w, {operation!r}, {i.parts[-1]!r}, {e.address(target)}, ({values}), "
        f"{e.address(barrier)}, {e.mask}, {i.line})"
    )
    e.write("if w.jitter: yield")


_serial = iter(range(1 << 62))


@runtime
def write_async(
    w: "Warp",
    operation: str,
    kind: str,
    target: Any,
    values: tuple[np.ndarray, ...],
    barrier: Any,
    mask: "Mask",
    line: int,
) -> None:
    """Write each lane's values, or reduce them if ``operation``; complete bytes on an mbarrier."""
    data = np.stack(values, 1).view(np.uint8).reshape(32, -1)
    nbytes = data.shape[1]
    before = w.actor.clocks.copy()
    verb = "red.async" if operation else "st.async write"
    sent: Counter[Key] = Counter()  # bytes by mbarrier
    for lane in w.active(mask):
        address = pick(target, lane) & 0xFFFFFFFF
        if address % nbytes:
            raise Misaligned(f"{verb} at {address:#x}, accepted multiples of {nbytes}")
        cta = w.cta_at(address)
        owner, found = barrier_at(w, pick(barrier, lane))
        if owner is not cta:
            raise IllegalInstruction(
                f"{verb} to CTA rank {cta.rank} completes on an mbarrier of CTA rank {owner.rank}: "
                "must be the same CTA (PTX ISA, st.async)"
            )
        check_visible(w, found, owner, owner is not w.cta)
        sent[found.key] += nbytes

        def run(
            address: int = address, cta: Any = cta, found: Any = found, lane: int = lane
        ) -> None:
            # The access is in the generic proxy, unlike bulk copies (PTX ISA, st.async and
            # red.async).
            origin = Origin(verb, "generic", bool(operation), lambda: w.where(line))
            event = w.launch.events.new(found.component, found.phase + 1, origin)
            access = Access(w.launch.events, event, before, {0, 1}, w.launch.report)
            after = data[lane]
            if operation:
                after = combine(
                    operation, kind, cta.shared.read(address, nbytes, access).copy(), after
                )
            cta.shared.write(address, after, access)
            cta.touch(found.component, found.phase + 1, verb, lambda: w.where(line))
            w.launch.counters.nbytes["shared write"] += nbytes
            found.complete(nbytes, before, near(w, found))

        w.issue("copies", ("store", next(_serial)), run, line)
    for key, total in sent.items():
        w.note("copy", line, amount=total, detail=("remote", (key,), total))
