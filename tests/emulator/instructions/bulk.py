"""cp.async.bulk and the other instructions of the tensor memory accelerator (PTX ISA)."""

import functools
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.emulator.findings import IllegalInstruction, OutOfBounds
from tests.emulator.instructions.load_store import memory_at, misaligned
from tests.emulator.instructions.mbarrier import barrier_at, check_visible, near, pick
from tests.emulator.instructions.registry import family, runtime
from tests.emulator.machine.trace import SECTOR, Touched
from tests.emulator.memory.clocks import Origin, Scope, Snapshot
from tests.emulator.memory.linear import LinearMemory
from tests.emulator.memory.shadow import Access, OneLane
from tests.emulator.ptx.syntax import Address, Immediate, Instruction, Operand
from tests.emulator.sync.mbarrier import MBarrier
from tests.emulator.tma import bulk as bulk_rules
from tests.emulator.tma.box import place
from tests.emulator.tma.reduction import combine
from tests.emulator.tma.replace import replace_field
from tests.emulator.tma.tensor_map import TensorMap, decode
from tests.emulator.tma.tile import Direction, Tile, locate, locate_rows

if TYPE_CHECKING:
    from tests.emulator.codegen import Emitter
    from tests.emulator.machine.cta import Cta
    from tests.emulator.machine.warp import Mask, Warp

Bytes = np.ndarray[Any, Any]

_OPERATIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
_RANKS = ("1d", "2d", "3d", "4d", "5d")


def write(e: "Emitter", i: Instruction) -> None:
    """Emit any cp.*bulk* instruction."""
    parts = i.parts
    if "commit_group" in parts:
        e.write(f"w.bulk_groups.commit(w.mask_bits({e.mask}))")
    elif "wait_group" in parts:
        allowed = e.value(i.operands[0], "u32")
        e.write(f"yield from wait_bulk(w, {allowed}, {parts[-1] == 'read'}, {e.mask}, {i.line})")
    elif "tensor" in parts:
        _tensor(e, i)
        e.write("if w.jitter: yield")
    else:
        _plain(e, i)
        e.write("if w.jitter: yield")


def _coordinates(e: "Emitter", address: Operand) -> str:
    assert isinstance(address, Address)
    return "(" + "".join(f"{e.value(c, 's32')}, " for c in address.coordinates) + ")"


def _map_address(e: "Emitter", address: Operand) -> str:
    assert isinstance(address, Address)
    return e.address(Address(address.start, address.offset))


def _tensor(e: "Emitter", i: Instruction) -> None:
    parts = i.parts
    group, multicast, mode, operation = 1, False, "tile", ""
    for part in parts[1:]:
        if part.startswith("cta_group::"):
            group = int(part[-1])
        elif part == "multicast::cluster":
            multicast = True
        elif part.startswith(("tile", "im2col")):
            mode = part
        elif part in _OPERATIONS:
            operation = part
        elif part not in (
            "async",
            "bulk",
            "tensor",
            "reduce",
            "prefetch",
            "global",
            "shared::cta",
            "shared::cluster",
            "bulk_group",
            "mbarrier::complete_tx::bytes",
            "L2::cache_hint",
            "L2",
            *_RANKS,
        ):
            raise e.unknown(i, f"modifier .{part}")
    if mode.startswith("im2col"):
        raise e.unknown(i, "im2col")
    rows = mode.endswith(("gather4", "scatter4"))
    operands = list(i.operands)
    if "prefetch" in parts:
        tensor = operands[0]
        e.write(
            f"tensor_prefetch(w, {_map_address(e, tensor)}, {_coordinates(e, tensor)}, {rows}, "
            f"{e.mask}, {i.line})"
        )
        return
    if parts.index("global") < _first_shared(parts):
        tensor, source = operands[:2]
        e.write(
            f"tensor_store(w, {_map_address(e, tensor)}, {_coordinates(e, tensor)}, "
            f"{e.address(source)}, {operation!r}, {rows}, {e.mask}, {i.line})"
        )
        return
    target, tensor, barrier = operands[:3]
    ranks = e.value(operands[3], "u32") if multicast else "None"
    e.write(
        f"tensor_load(w, {e.address(target)}, {_map_address(e, tensor)}, "
        f"{_coordinates(e, tensor)}, {e.address(barrier)}, {ranks}, {group}, {rows}, {e.mask}, "
        f"{i.line})"
    )


def _first_shared(parts: tuple[str, ...]) -> int:
    return next(n for n, part in enumerate(parts) if part.startswith("shared"))


def _plain(e: "Emitter", i: Instruction) -> None:
    parts = i.parts
    if "prefetch" in parts:
        source, size = i.operands[:2]
        e.write(
            f"bulk_prefetch(w, {e.address(source)}, {e.value(size, 'u32')}, {e.mask}, {i.line})"
        )
        return
    spaces = [p for p in parts if p in ("global", "shared::cta", "shared::cluster", "shared")]
    operation = next((p for p in parts[4:] if p in _OPERATIONS), "")
    kind = parts[-1] if operation else ""
    multicast = "multicast::cluster" in parts
    target, source, size, *rest = i.operands
    if spaces[0] == "global":
        e.write(
            f"bulk_store(w, {e.address(target)}, {e.address(source)}, {e.value(size, 'u32')}, "
            f"{operation!r}, {kind!r}, {'noftz' in parts}, {e.mask}, {i.line})"
        )
        return
    if "cp_mask" in parts:
        raise e.unknown(i, "cp_mask")
    ranks = e.value(rest[1], "u32") if multicast else "None"
    e.write(
        f"bulk_load(w, {e.address(target)}, {spaces[1]!r}, {e.address(source)}, "
        f"{e.value(size, 'u32')}, {e.address(rest[0])}, {ranks}, {operation!r}, {kind!r}, "
        f"{e.mask}, {i.line})"
    )


# Functions called by generated code


@functools.lru_cache(maxsize=1024)
def _decoded(descriptor: bytes) -> TensorMap:
    return decode(descriptor)


def _tensor_map(w: "Warp", address: int) -> TensorMap:
    if address % 64:
        raise IllegalInstruction(f"tensor map at {address:#x}: must be a multiple of 64 bytes")
    memory = memory_at(w, "generic", address, "tensor map read")
    start = address - memory.base
    raw = memory.data[start : start + 128].tobytes()
    if len(raw) != 128:
        raise OutOfBounds(f"tensor map at {address:#x} reaches beyond {memory.name}")
    return _decoded(raw)


def _locate(
    tensor_map: TensorMap, coordinates: tuple[Any, ...], lane: int, rows: bool, way: Direction
) -> Tile:
    numbers = tuple(pick(c, lane) for c in coordinates)
    if rows:
        return locate_rows(tensor_map, numbers[0], numbers[1:], way)
    return locate(tensor_map, numbers, way)


def _async_access(
    w: "Warp",
    component: int,
    clock: int,
    before: Snapshot,
    verb: str,
    line: int,
    strong: bool = False,
) -> Access:
    origin = Origin(verb, "async", strong, lambda: w.where(line))
    event = w.launch.events.new(component, clock, origin)
    return Access(w.launch.events, event, before, before.known["async"], w.launch.report)


def _fetch(w: "Warp", tile: Tile, access: Access, writes: bool) -> Callable[[int, int], Bytes]:
    """Function that returns a region's bytes in global memory, after checks of the access."""
    regions = {footprint.address: footprint for footprint, _ in tile.parts}

    def fetch(address: int, nbytes: int) -> Bytes:
        memory = w.gpu.memory.at(address, "tensor copy")
        footprint = regions[address]
        data = memory.bytes_at(address, nbytes, "write" if writes else "read")
        granule = memory.granule
        first = (address - memory.base) // granule
        writers = footprint.of(memory.shadow.writer[first:], granule)
        readers = footprint.of(memory.shadow.reader[first:], granule)
        if writes:
            memory.shadow.write_view(writers, readers, access)
        else:
            memory.shadow.read_view(writers, readers, access)
        return data

    return fetch


def _destinations(
    w: "Warp", place: int, barrier: int, ranks: Any, group: int, lane: int
) -> list[tuple["Cta", int, MBarrier]]:
    """CTAs that receive a copy, each with the destination address and the mbarrier to signal.

    ``place``, ``barrier``: shared addresses in the instruction; ``ranks``: multicast mask or None.
    """
    cluster = w.cta.cluster
    if ranks is None:
        cta = w.cta_at(place)
        owner, found = barrier_at(w, barrier)
        if owner is not cta and (group == 1 or owner.rank ^ cta.rank != 1):
            raise IllegalInstruction(
                f"copy into CTA rank {cta.rank} completes on an mbarrier of CTA rank {owner.rank}: "
                "must be the same CTA, or its peer with .cta_group::2"
            )
        check_visible(w, found, owner, True)
        return [(cta, place, found)]
    chosen = pick(ranks, lane) & 0xFFFF
    if not chosen or chosen >> len(cluster.ctas):
        raise OutOfBounds(f"multicast to CTA mask {chosen:#x} in a cluster of {len(cluster.ctas)}")
    result = []
    for rank in range(len(cluster.ctas)):
        if chosen >> rank & 1:
            # With a pair, the mbarrier is in the CTA with the parity of the named CTA.
            owner_rank = rank & ~1 | barrier >> 24 & 1 if group == 2 else rank
            owner, found = barrier_at(w, owner_rank << 24 | barrier & 0xFFFFFF)
            check_visible(w, found, owner, True)
            result.append((w.reach(rank), rank << 24 | place & 0xFFFFFF, found))
    return result


def _receive(w: "Warp", cta: "Cta", barrier: MBarrier, line: int) -> None:
    """Record a copy to a CTA; the CTA has to wait for the copy before it exits."""
    cta.touch(barrier.component, barrier.phase + 1, "bulk copy", lambda: w.where(line))


@runtime
def tensor_load(
    w: "Warp",
    target: Any,
    tensor: Any,
    coordinates: tuple[Any, ...],
    barrier: Any,
    ranks: Any,
    group: int,
    rows: bool,
    mask: "Mask",
    line: int,
) -> None:
    for lane in w.active(mask):
        descriptor = pick(tensor, lane)
        tensor_map = _tensor_map(w, descriptor)
        tile = _locate(tensor_map, coordinates, lane, rows, Direction.LOAD)
        shared = pick(target, lane) & 0xFFFFFFFF
        placed = place(tensor_map, tile.box, shared & 0xFFFFFF)
        copies = _destinations(w, shared, pick(barrier, lane) & 0xFFFFFFFF, ranks, group, lane)
        before, issuer = w.actor.snapshot(), w.one_lane(lane)
        nbytes = tile.box.transaction_bytes
        keys = tuple(owner.key for _, _, owner in copies)
        detail = "global", keys, nbytes
        w.note("copy", line, ("map", descriptor), nbytes, detail, _regions(tile))

        def run(
            tile: Tile = tile,
            placed: Any = placed,
            copies: Any = copies,
            before: Any = before,
            issuer: OneLane = issuer,
        ) -> None:
            found = copies[0][2]
            access = _async_access(
                w, found.component, found.phase + 1, before, "tensor copy read", line
            )
            data = tile.read(_fetch(w, tile, access, writes=False))
            nbytes = tile.box.transaction_bytes
            w.launch.counters.nbytes["copy global to shared"] += nbytes
            for cta, address, owner in copies:
                access = _async_access(
                    w, owner.component, owner.phase + 1, before, "tensor copy write", line
                )
                _receive(w, cta, owner, line)
                window = cta.shared.write_window(address, placed.nbytes, issuer.given(access))
                placed.scatter(data, window)
                w.launch.counters.nbytes["copies received in shared"] += nbytes
            for _, _, owner in copies:
                owner.complete(nbytes, before, near(w, owner))

        w.issue("copies", ("load", next(_serial)), run, line)


_serial = iter(range(1 << 62))


def _regions(tile: Tile) -> Touched:
    return tuple(region for region, _ in tile.parts)


def _run(address: int, nbytes: int) -> Touched:
    first = address // SECTOR
    return ((first, -(-(address + nbytes) // SECTOR) - first),)


@runtime
def tensor_store(
    w: "Warp",
    tensor: Any,
    coordinates: tuple[Any, ...],
    source: Any,
    operation: str,
    rows: bool,
    mask: "Mask",
    line: int,
) -> None:
    groups = w.bulk_groups
    for lane in _distinct(w, mask, operation, tensor, source, *coordinates):
        tensor_map = _tensor_map(w, pick(tensor, lane))
        way = Direction.REDUCE if operation else Direction.STORE
        tile = _locate(tensor_map, coordinates, lane, rows, way)
        shared = pick(source, lane) & 0xFFFFFFFF
        placed = place(tensor_map, tile.box, shared & 0xFFFFFF)
        cta = w.cta_at(shared)
        before, issuer = w.actor.snapshot(), w.one_lane(lane)
        clock = groups.issued(line, 1 << lane)
        w.note("store", line, ("group", groups.reads, clock), tile.box.transaction_bytes)

        def run(
            tile: Tile = tile,
            placed: Any = placed,
            shared: int = shared,
            cta: "Cta" = cta,
            before: Any = before,
            clock: int = clock,
            issuer: OneLane = issuer,
        ) -> None:
            read = _async_access(w, groups.reads, clock, before, "tensor copy read", line)
            data = placed.gather(cta.shared.read(shared, placed.nbytes, issuer.given(read)))
            write = _async_access(
                w, groups.writes, clock, before, "tensor copy write", line, bool(operation)
            )
            fetch = _fetch(w, tile, write, writes=True)
            if operation:
                tile.reduce(operation, data, fetch)
            else:
                tile.write(data, fetch)
            w.launch.counters.nbytes["copy shared to global"] += tile.box.transaction_bytes

        groups.queue_work(clock, run, line)


def _distinct(w: "Warp", mask: "Mask", operation: str, *operands: Any) -> list[int]:
    """Lanes that issue a bulk store: all active lanes of a reduction, else one per set of operands.

    Lanes with equal operands store the same bytes to the same address.
    """
    lanes = w.active(mask)
    if operation or len(lanes) == 1:
        return lanes
    return list({tuple(pick(o, lane) for o in operands): lane for lane in lanes}.values())


@runtime
def wait_bulk(
    w: "Warp", allowed: Any, reads_only: bool, mask: "Mask", line: int
) -> Generator[None, None, None]:
    groups = w.bulk_groups
    until = groups.until(pick(allowed, 0), w.mask_bits(mask))
    what = "reads" if reads_only else "writes"
    w.note("wait_group", line, ("group", groups.reads), until, what)
    groups.wait(until, reads_only)
    if w.jitter:
        yield


@runtime
def tensor_prefetch(
    w: "Warp", tensor: Any, coordinates: tuple[Any, ...], rows: bool, mask: "Mask", line: int
) -> None:
    for lane in w.active(mask):
        tile = _locate(
            _tensor_map(w, pick(tensor, lane)), coordinates, lane, rows, Direction.PREFETCH
        )
        w.launch.counters.nbytes["prefetch to L2"] += tile.box.transaction_bytes
        w.note("prefetch", line, amount=tile.box.transaction_bytes, where=_regions(tile))


@runtime
def bulk_prefetch(w: "Warp", source: Any, size: Any, mask: "Mask", line: int) -> None:
    for lane in w.active(mask):
        address, nbytes = pick(source, lane), pick(size, lane)
        bulk_rules.check_copy(nbytes, address)
        if not nbytes:
            continue
        w.gpu.memory.at(address, "bulk prefetch").bytes_at(address, nbytes, "read")
        w.launch.counters.nbytes["prefetch to L2"] += nbytes
        w.note("prefetch", line, amount=nbytes, where=_run(address, nbytes))


@runtime
def bulk_load(
    w: "Warp",
    target: Any,
    space: str,
    source: Any,
    size: Any,
    barrier: Any,
    ranks: Any,
    operation: str,
    kind: str,
    mask: "Mask",
    line: int,
) -> None:
    """Copy or reduce into shared memory, from global memory or the CTA's own shared memory.

    ``space``: state space of the source; ``operation``: reduction, or empty for a copy.
    """
    if operation:
        bulk_rules.check_reduction(operation, kind, "shared::cluster")
    for lane in w.active(mask):
        nbytes, origin = pick(size, lane), pick(source, lane)
        shared = pick(target, lane) & 0xFFFFFFFF
        bulk_rules.check_copy(nbytes, shared, origin)
        if not nbytes:
            continue  # an ignored copy: moves and completes nothing (seen on an H200)
        signal = pick(barrier, lane) & 0xFFFFFFFF
        copies = _destinations(w, shared, signal, ranks, 1, lane)
        before, issuer = w.actor.snapshot(), w.one_lane(lane)
        memory = (
            w.gpu.memory.at(origin, "bulk copy")
            if space == "global"
            else w.cta_at(origin & 0xFFFFFFFF).shared
        )

        keys = tuple(owner.key for _, _, owner in copies)
        where = _run(origin, nbytes) if space == "global" else ()
        w.note("copy", line, (), nbytes, (memory.kind, keys, nbytes), where)

        def run(
            memory: Any = memory,
            origin: int = origin,
            nbytes: int = nbytes,
            copies: Any = copies,
            before: Any = before,
            issuer: OneLane = issuer,
        ) -> None:
            for cta, where, owner in copies:
                clock = owner.phase + 1
                access = _async_access(w, owner.component, clock, before, "bulk copy read", line)
                data = memory.read(origin, nbytes, access).copy()
                access = _async_access(
                    w, owner.component, clock, before, "bulk copy write", line, bool(operation)
                )
                _receive(w, cta, owner, line)
                window = cta.shared.write_window(where, nbytes, issuer.given(access))
                window[...] = combine(operation, kind, window.copy(), data) if operation else data
                w.launch.counters.nbytes[f"copy {memory.kind} to shared"] += nbytes
            for _, _, owner in copies:
                owner.complete(nbytes, before, near(w, owner))

        w.issue("copies", ("load", next(_serial)), run, line)


@runtime
def bulk_store(
    w: "Warp",
    target: Any,
    source: Any,
    size: Any,
    operation: str,
    kind: str,
    noftz: bool,
    mask: "Mask",
    line: int,
) -> None:
    if operation:
        bulk_rules.check_reduction(operation, kind, "global", noftz)
    groups = w.bulk_groups
    for lane in _distinct(w, mask, operation, target, source, size):
        nbytes, address = pick(size, lane), pick(target, lane)
        shared = pick(source, lane) & 0xFFFFFFFF
        bulk_rules.check_copy(nbytes, shared, address)
        if not nbytes:
            continue
        cta = w.cta_at(shared)
        memory = w.gpu.memory.at(address, "bulk copy")
        before, issuer = w.actor.snapshot(), w.one_lane(lane)
        clock = groups.issued(line, 1 << lane)
        w.note("store", line, ("group", groups.reads, clock), nbytes)

        def run(
            nbytes: int = nbytes,
            address: int = address,
            shared: int = shared,
            cta: "Cta" = cta,
            memory: Any = memory,
            before: Any = before,
            clock: int = clock,
            issuer: OneLane = issuer,
        ) -> None:
            read = _async_access(w, groups.reads, clock, before, "bulk copy read", line)
            data = cta.shared.read(shared, nbytes, issuer.given(read))
            access = _async_access(
                w, groups.writes, clock, before, "bulk copy write", line, bool(operation)
            )
            window = memory.write_window(address, nbytes, access)
            if operation:
                # Subnormals stay, unlike in red.global.add.f32 (seen on an H200).
                window[...] = combine(operation, kind, window.copy(), data.copy())
            else:
                window[...] = data
            w.launch.counters.nbytes["copy shared to global"] += nbytes

        groups.queue_work(clock, run, line)


@family("tensormap")
def tensor_map_change(e: "Emitter", i: Instruction) -> None:
    if i.parts[1] == "cp_fenceproxy":
        target, source, size = i.operands
        if not isinstance(size, Immediate) or size.value != 128:
            raise e.unknown(i, "a size other than 128")
        e.write(f"copy_tensor_map(w, {e.address(target)}, {e.address(source)}, {e.mask}, {i.line})")
        return
    if i.parts[1] != "replace" or i.parts[2] != "tile":
        raise e.unknown(i)
    field = i.parts[3]
    space = "shared" if i.parts[4].startswith("shared") else i.parts[4]
    address, *rest = i.operands
    ordinal = "None"
    if len(rest) == 2:
        assert isinstance(rest[0], Immediate)
        ordinal = str(rest[0].value)
    kind = "u64" if i.parts[-1] == "b64" else "u32"
    e.write(
        f"replace_in_map(w, {space!r}, {e.address(address)}, {field!r}, {ordinal}, "
        f"{e.value(rest[-1], kind)}, {e.mask}, {i.line})"
    )


@runtime
def replace_in_map(
    w: "Warp",
    space: str,
    address: Any,
    field: str,
    ordinal: int | None,
    value: Any,
    mask: "Mask",
    line: int,
) -> None:
    lanes = w.active(mask)
    if not isinstance(address, np.ndarray) and not isinstance(value, np.ndarray):
        lanes = lanes[:1]
    for lane in lanes:
        place = pick(address, lane)
        memory = memory_at(w, space, place, "tensormap.replace")
        if memory.kind == "shared":
            place &= 0xFFFFFFFF
        if place % 128:
            misaligned(memory, place, 128)
        raw = _map_bytes(w, memory, place, line).tobytes()
        changed = np.frombuffer(replace_field(raw, field, pick(value, lane), ordinal), np.uint8)
        memory.write(place, changed[:_MAP_BYTES], w.access(line, "write"))


# The contents of a tensor map lie in its first half; the rest is padding that kernels leave unset.
_MAP_BYTES = 64


def _map_bytes(w: "Warp", memory: LinearMemory, address: int, line: int) -> Bytes:
    memory.read(address, _MAP_BYTES, w.access(line, "read"))
    return memory.bytes_at(address, 128, "read")


@runtime
def copy_tensor_map(w: "Warp", target: Any, source: Any, mask: "Mask", line: int) -> None:
    """tensormap.cp_fenceproxy: copy a tensor map from shared to global memory, and release it."""
    w.require_all(mask, "tensormap.cp_fenceproxy")
    lane = w.active(mask)[0]
    place, origin = pick(target, lane), pick(source, lane)
    memory = memory_at(w, "shared", origin, "tensor map read")
    raw = _map_bytes(w, memory, origin & 0xFFFFFFFF, line).copy()
    w.gpu.memory.at(place, "tensor map write").write(place, raw, w.access(line, "write"))
    w.actor.fence_thread(Scope.GPU)
