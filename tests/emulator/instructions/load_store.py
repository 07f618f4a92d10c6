"""ld, st, cache hints and fences: accesses through the generic proxy, and their order."""

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.emulator.findings import Misaligned, UnknownInstruction
from tests.emulator.instructions.mbarrier import pick
from tests.emulator.instructions.registry import family, runtime
from tests.emulator.machine.trace import SECTOR
from tests.emulator.machine.warp import RANK_SHIFT
from tests.emulator.memory.clocks import Scope
from tests.emulator.memory.linear import LinearMemory
from tests.emulator.memory.published import GLOBAL, Place, Published
from tests.emulator.memory.shadow import ANY_LANE, MANY_LANES
from tests.emulator.ptx.syntax import (
    TYPE_BITS,
    Immediate,
    Instruction,
    Operand,
    Register,
    Sink,
    Vector,
)
from tests.emulator.windows import LOCAL_WINDOW, PARAMETER_WINDOW, WINDOW_SHIFT

if TYPE_CHECKING:
    from tests.emulator.codegen import Emitter
    from tests.emulator.machine.warp import Mask, Warp

Lanes = np.ndarray[Any, Any]

SPACES = ("global", "shared", "local", "param", "const")
ORDERS = ("weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "sc", "mmio")
SCOPES = ("cta", "cluster", "gpu", "sys")
VECTORS = {"v2": 2, "v4": 4, "v8": 8}
ITEMS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}
_SHARED_TOP = 6
_LANES = np.arange(32, dtype=np.int8)
_LINE = 128  # bytes of a cache line


class _Form:
    """The modifiers of a load or store."""

    def __init__(self, e: "Emitter", i: Instruction) -> None:
        self.space = "generic"
        self.order = "weak"
        self.count = 1
        self.scope = ""
        for part in i.parts[1:-1]:
            stem = part.split("::")[0]
            if stem in SPACES:
                self.space = stem
            elif part in ORDERS:
                self.order = part
            elif part in VECTORS:
                self.count = VECTORS[part]
            elif part in SCOPES:
                self.scope = part
            elif stem in ("L1", "L2", "nc", "ca", "cg", "cs", "cv", "lu", "wb", "wt", "level"):
                continue  # cache behaviour only
            else:
                raise e.unknown(i, f"modifier .{part}")
        self.kind = i.parts[-1]
        self.width = max(TYPE_BITS[self.kind] // 8, 1)
        self.nbytes = self.width * self.count
        self.strong = self.order not in ("weak",)
        self.reach = int(scope_of(i, Scope.SYS))  # volatile and mmio name no scope


def scope_of(i: Instruction, default: Scope) -> Scope:
    """Scope named by an instruction, or ``default``."""
    named = [Scope[part.upper()] for part in i.parts[1:] if part in SCOPES]
    return named[0] if named else default


def _polls(e: "Emitter", form: _Form) -> None:
    """Emit a yield before a strong access, so that other threads get a turn."""
    if form.strong and form.space != "param":
        e.write("yield")


def _parks(e: "Emitter", form: _Form) -> None:
    """Emit a yield for a polling load: the warp sleeps until a write to the load's address."""
    if form.strong and form.space != "param":
        e.write("if not w.ready: yield")


@family("ld", "ldu")
def load(e: "Emitter", i: Instruction) -> None:
    form = _Form(e, i)
    target, source = i.operands[0], i.operands[1]
    targets: list[Operand] = list(target.items) if isinstance(target, Vector) else [target]
    address = e.address(source)
    if form.space == "param":
        _load_parameter(e, form, targets, address)
        return
    _polls(e, form)
    acquire = form.order in ("acquire", "acq_rel", "sc")
    common = f"{i.line}, {form.strong}, {acquire}, {form.reach}"
    if e.is_uniform(source) and form.space != "local":
        shape = f"{form.width}, {form.count}, {e.mask}"
        value = f"ld_uniform(w, {form.space!r}, {address}, {shape}, {common})"
        names = [e.temporary() for _ in targets]
        e.write(f"{', '.join(names)}{',' if len(names) == 1 else ''} = {value}")
        for item, name in zip(targets, names, strict=True):
            if isinstance(item, Sink):
                continue
            if form.kind[0] == "s" and form.width < 4:
                name = _extend(name, form.width, _bits(e, item))
            e.assign(item, name, _container(e, item), uniform=True)
        _parks(e, form)
        return
    if e.is_uniform(source):
        address = f"np.full(32, {address}, np.uint64)"
    names = [e.temporary() for _ in targets]
    e.write(
        f"{', '.join(names)}{',' if len(names) == 1 else ''} = ld_lanes(w, {form.space!r}, "
        f"{address}, {form.width}, {form.count}, {e.mask}, {common})"
    )
    kind = (
        form.kind
        if form.kind[0] in "us"
        else ("b128" if form.width == 16 else f"u{form.width * 8}")
    )
    for item, name in zip(targets, names, strict=True):
        if isinstance(item, Sink):
            continue
        if kind[0] == "s":
            name = f"{name}.view({e.dtype(f'i{form.width}')})"
        e.assign(item, name, kind)
    _parks(e, form)


def _bits(e: "Emitter", item: Operand) -> int:
    """Width of a destination register."""
    assert isinstance(item, Register)
    return e.storage(item.name).bits


def _container(e: "Emitter", item: Operand) -> str:
    bits = _bits(e, item)
    return "b128" if bits == 128 else f"u{bits}"


def _extend(name: str, width: int, bits: int) -> str:
    half, full = 1 << (8 * width - 1), (1 << bits) - 1
    return f"((({name} ^ {half}) - {half}) & {full:#x})"


def _load_parameter(e: "Emitter", form: _Form, targets: list[Operand], address: str) -> None:
    e.write(f"p = {address} & {(1 << WINDOW_SHIFT) - 1:#x}")
    for number, item in enumerate(targets):
        start = number * form.width
        value = (
            f"int.from_bytes(w.launch.parameters[p + {start}:p + {start + form.width}], 'little')"
        )
        if not isinstance(item, Sink):
            if form.kind[0] == "s" and form.width < 4:
                value = _extend(value, form.width, _bits(e, item))
            e.assign(item, value, _container(e, item), uniform=True)


@family("st")
def store(e: "Emitter", i: Instruction) -> None:
    if i.has("async"):
        from tests.emulator.instructions import remote

        remote.store(e, i)
        return
    form = _Form(e, i)
    target, source = i.operands[0], i.operands[1]
    sources = list(source.items) if isinstance(source, Vector) else [source]
    release = form.order in ("release", "acq_rel", "sc")
    if form.strong:
        e.write("yield")
    common = f"{i.line}, {form.strong}, {release}, {form.reach}"
    bits = form.width * 8
    kind = "b128" if bits == 128 else f"u{bits}"
    address = e.address(target)
    if e.is_uniform(target) and all(e.is_uniform(s) for s in sources) and form.space != "local":
        values = ", ".join(_plain(e, s, kind) for s in sources)
        what = f"{form.space!r}, {address}, {form.width}, ({values},), {e.mask}"
        e.write(f"st_uniform(w, {what}, {common})")
        return
    if e.is_uniform(target):
        address = f"np.full(32, {address}, np.uint64)"
    values = ", ".join(
        e.full(_plain(e, s, kind), kind) if e.is_uniform(s) else e.value(s, kind) for s in sources
    )
    e.write(
        f"st_lanes(w, {form.space!r}, {address}, {form.width}, ({values},), {e.mask}, {common})"
    )


def _plain(e: "Emitter", operand: Operand, kind: str) -> str:
    if isinstance(operand, Immediate) and operand.bits and kind == "b128":
        raise UnknownInstruction("a float literal stored as .b128")
    return e.value(operand, kind)


# Functions called by generated code


def memory_at(w: "Warp", space: str, address: int, verb: str) -> LinearMemory:
    """The memory that contains ``address`` of state space ``space``.

    Raises:
        OutOfBounds: no memory has the address.
    """
    if space == "generic":
        top = address >> WINDOW_SHIFT
        if top == _SHARED_TOP:
            space = "shared"
        elif top == LOCAL_WINDOW >> WINDOW_SHIFT:
            raise UnknownInstruction("generic access to local memory")
        elif top == PARAMETER_WINDOW >> WINDOW_SHIFT:
            return w.launch.parameter_memory()
        else:
            space = "global"
    if space == "shared":
        address &= 0xFFFFFFFF
        own = w.cta.shared
        if own.contains(address):
            return own
        return _peer(w, address >> RANK_SHIFT, address, verb)
    return w.gpu.memory.at(address, verb)


def _peer(w: "Warp", rank: int, address: int, verb: str) -> LinearMemory:
    """Shared memory of another CTA of the cluster, about to be accessed."""
    cta = w.reach(rank, address)
    w.touch(cta, w.actor.now, f"generic {verb}", w.line())
    return cta.shared


def address_in(memory: LinearMemory, address: int) -> int:
    return address & 0xFFFFFFFF if memory.kind == "shared" else address


@runtime
def ld_uniform(
    w: "Warp",
    space: str,
    address: int,
    width: int,
    count: int,
    mask: Lanes | None,
    line: int,
    strong: bool,
    acquire: bool,
    scope: int,
) -> tuple[int, ...]:
    """Load ``count`` unsigned integers of ``width`` bytes from an address that all lanes share."""
    if space == "generic" and address >> WINDOW_SHIFT == LOCAL_WINDOW >> WINDOW_SHIFT:
        raise UnknownInstruction("a generic load of local memory from an address all lanes share")
    memory = memory_at(w, space, address, "read")
    address = address_in(memory, address)
    nbytes = width * count
    access = w.access(line, "read", strong)
    if memory.kind == "shared":
        w.accessed(access.event, mask)
        w.read(access.event, mask)
        access.lanes = _lane_of(w, mask)
    data = memory.read(address, nbytes, access)
    access.lanes = ANY_LANE
    if address % nbytes:
        misaligned(memory, address, nbytes)
    if strong:
        observe(w, memory, address, acquire, scope)
        w.polled(line, [_meeting(w, memory, address)], data.tobytes())
    w.launch.counters.nbytes[f"{memory.kind} read"] += nbytes
    if w.trace is not None:
        where = ((address // SECTOR, -(-nbytes // SECTOR)),) if memory.kind == "global" else ()
        w.note("read", line, amount=nbytes, detail=(memory.kind, 1, 1, 1), where=where)
    raw = data.tobytes()
    if count == 1:
        return (int.from_bytes(raw, "little"),)
    return tuple(int.from_bytes(raw[n : n + width], "little") for n in range(0, nbytes, width))


@runtime
def st_uniform(
    w: "Warp",
    space: str,
    address: int,
    width: int,
    values: tuple[int, ...],
    mask: Lanes | None,
    line: int,
    strong: bool,
    release: bool,
    scope: int,
) -> None:
    memory = memory_at(w, space, address, "write")
    address = address_in(memory, address)
    raw = b"".join(int(v).to_bytes(width, "little") for v in values)
    if address % len(raw):
        misaligned(memory, address, len(raw))
    access = w.access(line, "write", strong)
    lane = access.lanes = _lane_of(w, mask) if memory.kind == "shared" else ANY_LANE
    memory.write(address, np.frombuffer(raw, np.uint8), access)
    access.lanes = ANY_LANE
    w.accessed(access.event, mask)
    if lane >= 0:
        memory.written_by(address, len(raw), lane)
        w.wrote(access.event, mask)
    if strong:
        publish(w, memory, address, release, scope, mask)
    w.launch.counters.nbytes[f"{memory.kind} write"] += len(raw)
    where = memory.kind if memory.kind != "shared" or memory is w.cta.shared else "peer"
    w.note("write", line, amount=len(raw), detail=(where, 1, 1, 1))


def _lane_of(w: "Warp", mask: Lanes | None) -> int:
    """Index of the active lane if ``mask`` has just one, else MANY_LANES."""
    lanes = w.active(mask) if mask is not None else ()
    return lanes[0] if len(lanes) == 1 else MANY_LANES


def misaligned(memory: LinearMemory, address: int, nbytes: int) -> None:
    raise Misaligned(f"address {address:#x} in {memory.name} is not a multiple of {nbytes}")


def _meeting(w: "Warp", memory: LinearMemory, address: int) -> Place:
    """Key of the clocks published at an address; shared memory is keyed by cluster."""
    return w.cta.cluster.number if memory.kind == "shared" else GLOBAL, address


def observe(w: "Warp", memory: LinearMemory, address: int, acquire: bool, scope: int) -> None:
    """Acquire, by a strong read, the vector clocks that strong writes published at an address."""
    published = w.launch.published.get(_meeting(w, memory, address))
    if published is not None:
        seen = published.seen(w, Scope(scope))
        w.actor.strong_read(seen, acquire, published.reach(w))


def publish(
    w: "Warp",
    memory: LinearMemory,
    address: int,
    release: bool,
    scope: int,
    mask: Lanes | None,
    changed: bool = True,
) -> None:
    """Publish, at an address, the vector clock released by a strong write of ``mask``'s lanes."""
    handed = w.actor.strong_write(release, Scope(scope))
    key = _meeting(w, memory, address)
    if changed:
        w.launch.written(key)
    if handed is not None:
        w.hand_over(mask, handed[0])
        w.launch.published.setdefault(key, Published()).add(w, *handed)


def _by_memory(
    w: "Warp", space: str, addresses: Lanes, verb: str
) -> list[tuple[LinearMemory, Lanes | None, Lanes]]:
    """Memories that lanes address, each with its lanes (None: all) and their addresses."""
    if addresses.dtype != np.uint64:
        addresses = addresses.astype(np.uint64)
    memory = memory_at(w, space, int(addresses[0]), verb)
    if memory.kind == "shared":
        addresses = addresses & np.uint64(0xFFFFFFFF)
    # An address below the base wraps to a huge unsigned value.
    if np.maximum.reduce(addresses - np.uint64(memory.base)) < memory.nbytes:
        return [(memory, None, addresses)]
    if space == "shared" or memory.kind == "shared":
        groups: list[tuple[LinearMemory, Lanes | None, Lanes]] = []
        for rank in np.unique(addresses >> np.uint64(24)).tolist():
            chosen = np.flatnonzero(addresses >> np.uint64(24) == rank)
            memory = _peer(w, rank, int(addresses[chosen[0]]), verb)
            groups.append((memory, chosen, addresses[chosen]))
        return groups
    return [
        (found, chosen, addresses if chosen is None else addresses[chosen])
        for found, chosen in w.gpu.memory.of_lanes(addresses, verb)
    ]


@runtime
def ld_lanes(
    w: "Warp",
    space: str,
    addresses: Lanes,
    width: int,
    count: int,
    mask: Lanes | None,
    line: int,
    strong: bool,
    acquire: bool,
    scope: int,
) -> list[Lanes]:
    """Load ``count`` arrays of 32 items of ``width`` bytes; lanes outside of ``mask`` get zeros."""
    if space == "local" or _is_local(space, addresses):
        return _local(w, addresses, width, count, mask, line, None)
    chosen = None
    if mask is not None and not mask.all():
        chosen = np.flatnonzero(mask)
        addresses = addresses[chosen]
    nbytes = width * count
    access = w.access(line, "read", strong)
    asking = _LANES if chosen is None else chosen.astype(np.int8)
    groups = _by_memory(w, space, addresses, "read")
    whole = np.zeros((32, nbytes), np.uint8) if chosen is not None or len(groups) > 1 else None
    if any(memory.kind == "shared" for memory, _, _ in groups):
        w.accessed(access.event, mask)
        w.read(access.event, mask)
    for memory, part, where in groups:
        step = min(nbytes, 16)
        pieces = [
            memory.read_lanes(
                where + np.uint64(n) if n else where,
                step,
                access,
                asking if part is None else asking[part],
            )
            for n in range(0, nbytes, step)
        ]
        w.launch.counters.nbytes[f"{memory.kind} read"] += nbytes * where.size
        if w.trace is not None:
            _note_lanes(w, "read", line, memory, where, nbytes)
        if strong:
            for address in where.tolist():
                observe(w, memory, address, acquire, scope)
            places = {_meeting(w, memory, address) for address in where.tolist()}
            w.polled(line, sorted(places), b"".join(piece.tobytes() for piece in pieces))
        if nbytes > 16 and int(np.bitwise_or.reduce(where)) % nbytes:
            misaligned(memory, int(where[0]), nbytes)
        if whole is None:
            data = pieces[0] if len(pieces) == 1 else np.stack(pieces, 1)
            if count == 1:
                return [data]
            return list(np.ascontiguousarray(data.view(ITEMS[width]).reshape(32, count).T))
        rows = np.arange(addresses.size) if part is None else part
        rows = rows if chosen is None else chosen[rows]
        for n, piece in enumerate(pieces):
            whole[rows, n * step : (n + 1) * step] = piece.view(np.uint8).reshape(-1, step)
    assert whole is not None
    return list(np.ascontiguousarray(whole.view(ITEMS[width]).reshape(32, count).T))


@runtime
def st_lanes(
    w: "Warp",
    space: str,
    addresses: Lanes,
    width: int,
    values: tuple[Lanes, ...],
    mask: Lanes | None,
    line: int,
    strong: bool,
    release: bool,
    scope: int,
    own: bool = True,
) -> None:
    """Store each lane's items; ``own`` is False if lanes store other lanes' items (stmatrix)."""
    if space == "local" or _is_local(space, addresses):
        _local(w, addresses, width, len(values), mask, line, values)
        return
    count = len(values)
    nbytes = width * count
    if count == 1:
        data = values[0]
    else:
        data = np.empty((32, count), ITEMS[width])
        for n, value in enumerate(values):
            data[:, n] = value
    writing = _LANES
    if mask is not None and not mask.all():
        chosen = np.flatnonzero(mask)
        addresses = addresses[chosen]
        data = data[chosen]
        writing = chosen.astype(np.int8)
    access = w.access(line, "write", strong)
    step = min(nbytes, 16)
    w.accessed(access.event, mask)
    packed = np.ascontiguousarray(data).view(ITEMS[step]).reshape(data.shape[0], -1)
    for memory, part, where in _by_memory(w, space, addresses, "write"):
        rows = packed if part is None else packed[part]
        if nbytes > 16 and int(np.bitwise_or.reduce(where)) % nbytes:
            misaligned(memory, int(where[0]), nbytes)
        for n in range(nbytes // step):
            place = where + np.uint64(n * step) if n else where
            lanes = None
            if own and memory.kind == "shared":
                lanes = writing if part is None else writing[part]
                w.wrote(access.event, mask)
            memory.write_lanes(place, step, rows[:, n], access, lanes)
        w.launch.counters.nbytes[f"{memory.kind} write"] += nbytes * where.size
        if w.trace is not None:
            _note_lanes(w, "write", line, memory, where, nbytes)
        if strong:
            for address in where.tolist():
                publish(w, memory, address, release, scope, mask)


def _note_lanes(
    w: "Warp", kind: str, line: int, memory: LinearMemory, where: Lanes, nbytes: int
) -> None:
    touched: tuple[tuple[int, int], ...] = ()
    tags = 0
    if memory.kind == "shared":
        passes = bank_passes(where, nbytes)
    else:
        touched, passes, tags = sectors(where, nbytes)
    space = memory.kind if memory.kind != "shared" or memory is w.cta.shared else "peer"
    detail = (space, where.size, passes, tags)
    w.note(kind, line, amount=nbytes * where.size, detail=detail, where=touched)


def bank_passes(where: Lanes, nbytes: int) -> int:
    """Shared-memory cycles (32 banks of 4 bytes) of an access of ``nbytes`` per lane."""
    # Wide accesses are split into groups of lanes that together move 128 bytes.
    words = (where[:, None] // 4 + np.arange(max(nbytes // 4, 1), dtype=np.uint64)).astype(int)
    group = max(128 // max(nbytes, 4), 1)
    passes = 0
    for first in range(0, where.size, group):
        distinct = np.unique(words[first : first + group])
        passes += int(np.bincount(distinct % 32).max())
    return passes


def sectors(where: Lanes, nbytes: int) -> tuple[tuple[tuple[int, int], ...], int, int]:
    """Sectors that an access of ``nbytes`` per lane touches.

    Returns:
        Runs of 32-byte sectors as (first, count), number of sectors, and number of cache lines.
    """
    ends = np.concatenate([where, where + np.uint64(nbytes - 1)]).astype(np.int64)
    found = np.unique(ends // SECTOR)
    starts = np.flatnonzero(np.diff(found, prepend=-2) != 1)
    counts = np.diff(starts, append=found.size)
    runs = tuple(zip(found[starts].tolist(), counts.tolist(), strict=True))
    return runs, int(found.size), int(np.unique(found // (_LINE // SECTOR)).size)


def _is_local(space: str, addresses: Lanes) -> bool:
    return space == "generic" and int(addresses[0]) >> WINDOW_SHIFT == LOCAL_WINDOW >> WINDOW_SHIFT


def _local(
    w: "Warp",
    addresses: Lanes,
    width: int,
    count: int,
    mask: Lanes | None,
    line: int,
    values: tuple[Lanes, ...] | None,
) -> list[Lanes]:
    """Load from each lane's own local memory, or store ``values`` to it."""
    found = [np.zeros(32, ITEMS[width]) for _ in range(count)]
    access = w.access(line, "read" if values is None else "write")
    for lane in w.active(mask):
        address = int(addresses[lane])
        for n in range(count):
            place = address + n * width
            if values is None:
                data = w.local[lane].read(place, width, access)
                found[n][lane] = data.view(ITEMS[width])[0]
            else:
                w.local[lane].write(place, values[n][lane : lane + 1].view(np.uint8), access)
    # The lanes' local memories interleave: accesses of lanes to the same offset fill whole sectors.
    lanes = len(w.active(mask))
    nbytes = width * count * lanes
    detail = ("local", lanes, -(-nbytes // SECTOR), -(-nbytes // _LINE))
    w.note("read" if values is None else "write", line, amount=nbytes, detail=detail)
    return found


@family("prefetch", "prefetchu", "discard", "applypriority")
def hint(e: "Emitter", i: Instruction) -> None:
    """Emit a cache hint, of which only the address is checked."""
    target = i.operands[0]
    address = e.address(target)
    if i.has("tensormap"):
        e.write(f"prefetch_map(w, {address}, {e.mask}, {i.line})")
        return
    if e.is_uniform(target):
        address = f"np.full(32, {address}, np.uint64)"
    fetches = i.parts[0].startswith("prefetch")
    e.write(f"hint_lanes(w, {address}, {fetches}, {e.mask}, {i.line})")


@runtime
def prefetch_map(w: "Warp", address: Any, mask: "Mask", line: int) -> None:
    if w.trace is not None:
        for lane in w.active(mask):
            w.note("map", line, ("map", pick(address, lane)))


@runtime
def hint_lanes(w: "Warp", addresses: Lanes, fetches: bool, mask: Lanes | None, line: int) -> None:
    if mask is not None:
        addresses = addresses[mask]
    memory = memory_at(w, "generic", int(addresses[0]), "prefetch")
    if fetches and memory.kind == "global" and w.trace is not None:
        each = _LINE // SECTOR
        where = tuple((n * each, each) for n in sorted(set((addresses // _LINE).tolist())))
        w.note("prefetch", line, amount=_LINE * len(where), where=where)


@family("fence", "membar")
def fence(e: "Emitter", i: Instruction) -> None:
    parts = i.parts
    if i.has("mbarrier_init"):
        e.write("fence_mbarrier_init(w)")
    elif len(parts) > 2 and parts[1] == "proxy":
        if parts[2].split("::")[0] == "async":
            e.write("w.actor.fence_proxy()")
            e.write("publish_inits(w)")
        elif parts[2].split("::")[0] in ("tensormap", "alias"):
            e.write(f"fence_thread(w, {int(scope_of(i, Scope.GPU))})")
        else:
            raise e.unknown(i)
    elif parts[0] == "membar" or parts[1] in ("acq_rel", "sc", "acquire", "release"):
        e.write(f"fence_thread(w, {_fence_scope(i)})")
    else:
        raise e.unknown(i)
    e.write("if w.jitter: yield")


def _fence_scope(i: Instruction) -> int:
    if i.parts[0] == "membar":
        return int({"cta": Scope.CTA, "gl": Scope.GPU, "sys": Scope.SYS}[i.parts[-1]])
    return int(scope_of(i, Scope.CTA))


@runtime
def fence_thread(w: "Warp", scope: int) -> None:
    w.actor.fence_thread(Scope(scope))


@runtime
def fence_mbarrier_init(w: "Warp") -> None:
    """Publish the mbarriers initialised by this warp to the cluster and to the async proxy.

    A relaxed arrival at the cluster barrier then orders the initialisations too.
    """
    w.actor.fence_inits()
    publish_inits(w)


@runtime
def publish_inits(w: "Warp") -> None:
    """Publish the mbarriers initialised by this warp to the async proxy; no arrival orders them."""
    mine = w.actor.component
    for barrier in w.cta.mbarriers.values():
        if barrier.initialiser[0] == mine:
            barrier.fenced = True
