"""Instructions atom and red, and the arithmetic of their operations."""

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
    from tests.emulator.memory.linear import LinearMemory
    from tests.emulator.memory.shadow import Access

Bytes = npt.NDArray[np.uint8]
Lanes = npt.NDArray[Any]

_RELEASING = ("release", "acq_rel", "sc")
_SWAPS = ("exch", "cas")
_SWAPPED = frozenset({"b16", "b32", "b64", "b128"})  # types of exch and cas (PTX ISA, atom)


def _result(operation: str, kind: str, old: Bytes, operands: list[Bytes], flush: bool) -> Bytes:
    """Value that an atomic operation leaves in memory: one row of bytes per lane, as in ``old``.

    ``flush``: whether f32 operands and results flush subnormals.
    """
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
    """Execute an atomic in batches of lanes with distinct addresses; returns the old values.

    ``values``: items of each operand; ``order``: memory order as in PTX; ``scope``: a ``Scope``.
    """
    width, count = TYPE_BITS[kind] // 8, len(values[0])
    nbytes = width * count
    access = w.access(line, "atomic", strong=True)
    operands = [np.stack(group, 1).view(np.uint8).reshape(32, nbytes) for group in values]
    old = np.zeros((32, nbytes), np.uint8)
    acquire, release = order in ("acquire", "acq_rel", "sc"), order in _RELEASING
    batches = _batches(w, space, addresses, mask)
    if len(batches) > 1 and w.trace is None and not (acquire or release):
        lanes = np.sort(np.concatenate(batches))
        memory, places = _places(w, space, addresses[lanes])
        if _inside(memory, places).all():
            return _meet(
                w, memory, places, lanes, batches, (operation, kind), operands, access, mask, scope
            )
    for lanes in batches:
        memory, places = _places(w, space, addresses[lanes])
        for address in places.tolist():
            observe(w, memory, address, acquire, scope)
        before = memory.read_lanes(places, nbytes, access).view(np.uint8).reshape(-1, nbytes)
        # Additions of f32 flush in global memory alone (PTX ISA, atom).
        after = _result(
            operation, kind, before, [rows[lanes] for rows in operands], memory.kind == "global"
        )
        items = np.ascontiguousarray(after).view(ITEMS[nbytes])[:, 0]
        memory.write_lanes(places, nbytes, items, access)
        old[lanes] = before
        # An operation that changes nothing is a poll, which wakes no other warp.
        changed = (before != after).any(1).tolist()
        for address, differs in zip(places.tolist(), changed, strict=True):
            publish(w, memory, address, release, scope, mask, differs)
        amount = nbytes * len(lanes)
        w.launch.counters.nbytes[f"{memory.kind} atomic"] += amount
        w.note("atomic", line, amount=amount, detail=(memory.kind, len(lanes), len(lanes), 1))
    return list(np.ascontiguousarray(old.view(ITEMS[width]).T))


def _meet(
    w: "Warp",
    memory: "LinearMemory",
    places: Lanes,
    lanes: npt.NDArray[np.intp],
    batches: list[npt.NDArray[np.intp]],
    what: tuple[str, str],
    operands: list[Bytes],
    access: "Access",
    mask: Lanes | None,
    scope: int,
) -> list[Lanes]:
    """Run the relaxed operations of ``lanes`` whose addresses repeat; returns the old values.

    ``places``: address of each lane; ``batches``: see ``_batches``; ``what``: operation and type.
    All lanes belong to one warp, so memory is read once, before the first operation, and written
    once, after the last.
    """
    operation, kind = what
    nbytes = operands[0].shape[1]
    distinct, inverse = np.unique(places, return_inverse=True)
    for address in distinct.tolist():
        observe(w, memory, address, False, scope)
    first = memory.read_lanes(distinct, nbytes, access).view(np.uint8).reshape(-1, nbytes)
    old = np.zeros((32, nbytes), np.uint8)
    now = first.copy()
    accumulate = _ACCUMULATED.get(what)
    if accumulate is not None and distinct.size == 1:
        item = ITEMS[nbytes]
        values = np.concatenate([now, operands[0][lanes]]).view(item)[:, 0]
        reached = accumulate(values, dtype=values.dtype)
        old[lanes] = reached[:-1, None].view(np.uint8)
        now = reached[-1:, None].copy().view(np.uint8)
    else:
        place = np.zeros(32, np.intp)
        place[lanes] = inverse
        for turn in batches:
            at = place[turn]
            before = now[at]
            given = [rows[turn] for rows in operands]
            old[turn] = before
            now[at] = _result(operation, kind, before, given, memory.kind == "global")
    items = np.ascontiguousarray(now).view(ITEMS[nbytes])[:, 0]
    memory.write_lanes(distinct, nbytes, items, access)
    # An atomic that changes nothing is a poll; a value that changed and changed back has changed.
    moved = (old[lanes] != now[inverse]).any(1) | (old[lanes] != first[inverse]).any(1)
    changed = np.zeros(distinct.size, bool)
    changed[inverse[moved]] = True
    for address, differs in zip(distinct.tolist(), changed.tolist(), strict=True):
        publish(w, memory, address, False, scope, mask, differs)
    w.launch.counters.nbytes[f"{memory.kind} atomic"] += nbytes * len(lanes)
    return list(np.ascontiguousarray(old.view(ITEMS[TYPE_BITS[kind] // 8]).T))


# Accumulating functions for repeated addresses; only operations that treat signed and unsigned
# alike.
_ACCUMULATED = {
    (operation, kind): ufunc.accumulate
    for operation, ufunc in {
        "add": np.add,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }.items()
    for kind in ("b32", "u32", "s32", "b64", "u64")
}


def _places(w: "Warp", space: str, addresses: Lanes) -> tuple["LinearMemory", Lanes]:
    """Memory that holds the first address, and the addresses, cut to 32 bits in shared memory."""
    places = addresses.astype(np.uint64)
    memory = memory_at(w, space, int(places[0]), "atomic")
    if memory.kind == "shared":
        places &= np.uint64(0xFFFFFFFF)
    return memory, places


def _inside(memory: "LinearMemory", places: Lanes) -> npt.NDArray[np.bool_]:
    """Mask of the ``places`` that lie inside the memory."""
    inside: npt.NDArray[np.bool_] = places - np.uint64(memory.base) < np.uint64(memory.nbytes)
    return inside


def _batches(
    w: "Warp", space: str, addresses: Lanes, mask: Lanes | None
) -> list[npt.NDArray[np.intp]]:
    """Batches of lanes in which no two lanes share an address, in order of occurrence.

    The lanes run one at a time if an address lies outside the memory that holds the first address,
    or if addresses repeat and the launch has a timing trace.
    """
    lanes = np.flatnonzero(w.live if mask is None else mask)
    memory, places = _places(w, space, addresses[lanes])
    inside = _inside(memory, places)
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
