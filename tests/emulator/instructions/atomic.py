"""atom and red: what they compute, and the instructions."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tests.emulator.findings import UnknownInstruction
from tests.emulator.instructions.load_store import (
    ITEMS,
    ORDERS,
    SCOPES,
    SPACES,
    VECTORS,
    address_in,
    memory_at,
    misaligned,
    observe,
    publish,
)
from tests.emulator.instructions.registry import family, runtime
from tests.emulator.isa.lanewise import lookup
from tests.emulator.isa.semantics import compiled
from tests.emulator.ptx.syntax import TYPE_BITS, Instruction, Sink, Vector

if TYPE_CHECKING:
    from tests.emulator.codegen import Emitter
    from tests.emulator.machine.warp import Warp

Items = npt.NDArray[Any]
Lanes = npt.NDArray[Any]


def _integers(kind: str, items: Items) -> Items:
    return items.view(f"{'i' if kind[0] == 's' else 'u'}{items.dtype.itemsize}")


def _lanewise(opcode: str, old: Items, value: Items) -> Items:
    semantics = lookup(opcode)
    if semantics is None:
        raise UnknownInstruction(f"atomic {opcode}")
    function = semantics.vector
    if isinstance(function, str):
        function = compiled(function, 2)
    result: Items = function(old, value)
    return result


def _add(kind: str, old: Items, value: Items) -> Items:
    if kind in ("f32", "f64"):
        code = "f4" if kind == "f32" else "f8"
        return old.view(code) + value.view(code)
    if kind in ("f16", "f16x2"):
        return old.view("f2") + value.view("f2")
    if kind in ("bf16", "bf16x2"):
        return _lanewise(f"add.rn.{kind}", old, value)
    return _integers(kind, old) + _integers(kind, value)


def _extreme(name: str) -> Callable[[str, Items, Items], Items]:
    def run(kind: str, old: Items, value: Items) -> Items:
        if kind[0] in "us":
            pick = np.minimum if name == "min" else np.maximum
            return pick(_integers(kind, old), _integers(kind, value))
        if kind in ("f16", "f16x2"):
            choose = np.fmin if name == "min" else np.fmax
            return choose(old.view("f2"), value.view("f2"))
        return _lanewise(f"{name}.{kind}", old, value)

    return run


def _increment(kind: str, old: Items, limit: Items) -> Items:
    return np.where(old >= limit, np.zeros_like(old), old + old.dtype.type(1))


def _decrement(kind: str, old: Items, limit: Items) -> Items:
    wraps = (old == 0) | (old > limit)
    return np.where(wraps, limit, old - old.dtype.type(1))


OPERATIONS: dict[str, Callable[..., Items]] = {
    "add": _add,
    "min": _extreme("min"),
    "max": _extreme("max"),
    "inc": _increment,
    "dec": _decrement,
    "and": lambda kind, old, value: old & value,
    "or": lambda kind, old, value: old | value,
    "xor": lambda kind, old, value: old ^ value,
    "exch": lambda kind, old, value: value,
    "cas": lambda kind, old, compare, value: np.where(old == compare, value, old),
}


@family("atom", "red")
def write_atomic(e: "Emitter", i: Instruction) -> None:
    if i.has("async"):
        raise e.unknown(i)
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
        elif part in OPERATIONS and not operation:
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
    bits = TYPE_BITS[kind]
    if bits == 128:
        raise e.unknown(i, "128-bit atomics")
    arguments = ", ".join(
        "(" + "".join(f"{e.lanes(item, f'u{bits}')}, " for item in group) + ")" for group in groups
    )
    e.write("yield")
    call = (
        f"atomic(w, {space!r}, {operation!r}, {kind!r}, {address}, ({arguments},), {e.mask}, "
        f"{i.line}, {order!r})"
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
            e.assign(item, name, f"u{bits}")


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
) -> list[Lanes]:
    """Lane after lane; returns the old values."""
    width = TYPE_BITS[kind] // 8
    count = len(values[0])
    old = [np.zeros(32, ITEMS[width]) for _ in range(count)]
    access = w.access(line, "atomic", strong=True)
    run = OPERATIONS[operation]
    for lane in w.active(mask):
        address = int(addresses[lane])
        memory = memory_at(w, space, address, "atomic")
        address = address_in(memory, address)
        if address % (width * count):
            misaligned(memory, address, width * count)
        observe(w, address, order in ("acquire", "acq_rel", "sc"))
        for n in range(count):
            place = address + n * width
            before = memory.read(place, width, access).copy()
            after = run(kind, before.view(ITEMS[width]), *(v[n][lane : lane + 1] for v in values))
            memory.write(place, after.view(np.uint8), access)
            old[n][lane] = before.view(ITEMS[width])[0]
        publish(w, address, order in ("release", "acq_rel", "sc"))
        w.launch.counters.nbytes[f"{memory.kind} atomic"] += width * count
        w.note("atomic", line, amount=width * count, detail=(memory.kind, 1, 1))
    return old
