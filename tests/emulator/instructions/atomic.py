"""atom and red: what they compute, and the instructions."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tests.emulator.instructions import remote
from tests.emulator.instructions.load_store import (
    ITEMS,
    ORDERS,
    SCOPES,
    SPACES,
    VECTORS,
    memory_at,
    observe,
    publish,
    scope_of,
)
from tests.emulator.instructions.registry import family, runtime
from tests.emulator.memory.clocks import Scope
from tests.emulator.ptx.syntax import TYPE_BITS, Instruction, Sink, Vector
from tests.emulator.tma.reduction import ACCEPTED, combine

if TYPE_CHECKING:
    from tests.emulator.codegen import Emitter
    from tests.emulator.machine.warp import Warp

Bytes = npt.NDArray[np.uint8]
Lanes = npt.NDArray[Any]

_RELEASING = ("release", "acq_rel", "sc")
_SWAPS = ("exch", "cas")
_SWAPPED = frozenset({"b16", "b32", "b64", "b128"})  # of exch and cas (PTX ISA, atom)


def _result(operation: str, kind: str, old: Bytes, operands: list[Bytes], flush: bool) -> Bytes:
    """Value that an atomic leaves: one row of bytes for each lane, as in ``old``."""
    if operation == "exch":
        return operands[0]
    if operation == "cas":
        same = (old == operands[0]).all(-1, keepdims=True)
        return np.where(same, operands[1], old)
    plain = kind.removesuffix("x2")
    found = combine(
        operation, plain, old.reshape(-1), operands[0].reshape(-1), flush and plain == "f32"
    )
    return found.reshape(old.shape)


@family("atom", "red")
def write_atomic(e: "Emitter", i: Instruction) -> None:
    if i.has("async"):
        remote.reduce(e, i)
        return
    parts = [p for p in i.parts[1:] if p not in ("noftz",)]
    space, order, count = "generic", "relaxed", 1
    operation = ""
    for part in parts[:-1]:
        stem = part.split("::")[0]
        if stem in SPACES:
            space = stem
        elif part in ORDERS:
            order = part
        elif part in SCOPES or stem in ("L1", "L2", "level"):
            continue
        elif part in VECTORS:
            count = VECTORS[part]
        elif part in (*_SWAPS, *ACCEPTED) and not operation:
            operation = part
        else:
            raise e.unknown(i, f"modifier .{part}")
    kind = parts[-1]
    returns = i.parts[0] == "atom"
    operands = list(i.operands[1:] if returns else i.operands)
    address = e.address(operands[0])
    if e.is_uniform(operands[0]):
        address = f"np.full(32, {address}, np.uint64)"
    groups = [list(o.items) if isinstance(o, Vector) else [o] for o in operands[1:]]
    if kind.removesuffix("x2") not in ACCEPTED.get(operation, _SWAPPED):
        raise e.unknown(i, f"{operation or 'no operation'} of .{kind}")
    own = "b128" if kind == "b128" else f"u{TYPE_BITS[kind]}"
    arguments = ", ".join(
        "(" + "".join(f"{e.lanes(item, own)}, " for item in group) + ")" for group in groups
    )
    e.write("yield")
    call = (
        f"atomic(w, {space!r}, {operation!r}, {kind!r}, {address}, ({arguments},), {e.mask}, "
        f"{i.line}, {order!r}, {int(scope_of(i, Scope.GPU))})"
    )
    if not returns:
        e.write(call)
        return
    target = i.operands[0]
    targets = list(target.items) if isinstance(target, Vector) else [target]
    names = [e.temporary() for _ in targets]
    e.write(f"{', '.join(names)}{',' if count == 1 else ''} = {call}")
    for item, name in zip(targets, names, strict=True):
        if not isinstance(item, Sink):
            e.assign(item, name, own)


@runtime
def atomic(
    w: "Warp",
    space: str,
    operation: str,
    kind: str,
    addresses: Lanes,
    values: tuple[tuple[Lanes, ...], ...],
    mask: Lanes | None,
    line: int,
    order: str,
    scope: int,
) -> list[Lanes]:
    """Lane after lane where they meet, or all at once; returns the old values."""
    width, count = TYPE_BITS[kind] // 8, len(values[0])
    nbytes = width * count
    access = w.access(line, "atomic", strong=True)
    operands = [np.stack(group, 1).view(np.uint8).reshape(32, nbytes) for group in values]
    old = np.zeros((32, nbytes), np.uint8)
    for lanes in _batches(w, space, addresses, mask):
        places = addresses[lanes].astype(np.uint64)
        memory = memory_at(w, space, int(places[0]), "atomic")
        if memory.kind == "shared":
            places &= np.uint64(0xFFFFFFFF)
        for address in places.tolist():
            observe(w, memory, address, order in ("acquire", "acq_rel", "sc"), scope)
        before = memory.read_lanes(places, nbytes, access).view(np.uint8).reshape(-1, nbytes)
        # Additions of f32 flush in global memory alone (PTX ISA, atom).
        after = _result(
            operation, kind, before, [rows[lanes] for rows in operands], memory.kind == "global"
        )
        items = np.ascontiguousarray(after).view(ITEMS[nbytes])[:, 0]
        memory.write_lanes(places, nbytes, items, access)
        old[lanes] = before
        # Or it is a poll that does not end by itself.
        changed = (before != after).any(1).tolist()
        for address, differs in zip(places.tolist(), changed, strict=True):
            publish(w, memory, address, order in _RELEASING, scope, mask, differs)
        amount = nbytes * len(lanes)
        w.launch.counters.nbytes[f"{memory.kind} atomic"] += amount
        w.note("atomic", line, amount=amount, detail=(memory.kind, len(lanes), len(lanes), 1))
    return list(np.ascontiguousarray(old.view(ITEMS[width]).T))


def _batches(
    w: "Warp", space: str, addresses: Lanes, mask: Lanes | None
) -> list[npt.NDArray[np.intp]]:
    """Lanes that go together: in one memory, those before which as many have the same place.

    Where time is modelled, all of them if each has its own place, or else one after the other.
    """
    lanes = np.flatnonzero(w.live if mask is None else mask)
    places = addresses[lanes].astype(np.uint64)
    memory = memory_at(w, space, int(places[0]), "atomic")
    if memory.kind == "shared":
        places &= np.uint64(0xFFFFFFFF)
    inside = places - np.uint64(memory.base) < np.uint64(memory.nbytes)
    found = places.tolist()
    distinct = len(set(found))
    if inside.all() and distinct == lanes.size:
        return [lanes]
    if distinct == 1 or w.trace is not None or not inside.all():
        return list(lanes[:, None])
    turns: list[list[int]] = []
    before: Counter[int] = Counter()
    for lane, place in zip(lanes.tolist(), found, strict=True):
        turn = before[place]
        before[place] += 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(lane)
    return [np.array(turn, np.intp) for turn in turns]
