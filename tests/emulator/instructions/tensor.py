"""tcgen05.* (PTX ISA, TensorCore 5th Generation Family Instructions)."""

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.emulator.findings import (
    IllegalInstruction,
    LaneReach,
    OutOfBounds,
    TensorMemoryMisuse,
    UnprovenForm,
)
from tests.emulator.instructions.mbarrier import barrier_at, check_visible, pick, sender
from tests.emulator.instructions.registry import family, runtime
from tests.emulator.memory.clocks import join
from tests.emulator.memory.columns import find_columns
from tests.emulator.ptx.syntax import Address, Immediate, Instruction, Sink, Vector
from tests.emulator.tcgen05 import copy as tensor_copy
from tests.emulator.tcgen05.allocation import check_columns
from tests.emulator.tcgen05.column_mask import decode_column_mask
from tests.emulator.tcgen05.descriptors import SharedDescriptor, decode_shared_descriptor
from tests.emulator.tcgen05.execute import CtaMemory, Mma, a_shape, b_shape, execute, footprint
from tests.emulator.tcgen05.instruction import decode_instruction
from tests.emulator.tcgen05.operands import OperandShape, chunk_index
from tests.emulator.tcgen05.tensor_memory_layout import (
    Address as TensorAddress,
)
from tests.emulator.tcgen05.tensor_memory_layout import (
    split_address,
    split_scale_address,
)
from tests.emulator.tcgen05.transfer import (
    Fragment,
    check_access,
    fragment,
    load,
    shift_down,
    store,
)

if TYPE_CHECKING:
    from tests.emulator.codegen import Emitter
    from tests.emulator.machine.cta import Cta
    from tests.emulator.machine.warp import Mask, Warp


@family("tcgen05")
def tcgen05(e: "Emitter", i: Instruction) -> None:
    writer = _WRITERS.get(i.parts[1])
    if writer is None:
        raise e.unknown(i)
    writer(e, i)


def _group(e: "Emitter", i: Instruction) -> int:
    for part in i.parts:
        if part.startswith("cta_group::"):
            return int(part[-1])
    raise e.unknown(i, "no .cta_group")


def _known(e: "Emitter", i: Instruction, *accepted: str) -> None:
    for part in i.parts[2:]:
        if part not in accepted and not part.startswith("cta_group::"):
            raise e.unknown(i, f"modifier .{part}")


def _alloc(e: "Emitter", i: Instruction) -> None:
    _known(e, i, "sync", "aligned", "shared::cta", "b32")
    target, columns = i.operands
    e.write(f"w.require_all({e.mask}, {i.opcode!r})")
    e.write(
        f"yield from tensor_alloc(w, {e.address(target)}, {e.value(columns, 'u32')}, "
        f"{_group(e, i)}, {i.line})"
    )


def _dealloc(e: "Emitter", i: Instruction) -> None:
    _known(e, i, "sync", "aligned", "b32")
    address, columns = i.operands
    e.write(f"w.require_all({e.mask}, {i.opcode!r})")
    e.write(
        f"tensor_dealloc(w, {e.value(address, 'u32')}, {e.value(columns, 'u32')}, "
        f"{_group(e, i)}, {i.line})"
    )


def _relinquish(e: "Emitter", i: Instruction) -> None:
    _known(e, i, "sync", "aligned")
    e.write(f"w.require_all({e.mask}, {i.opcode!r})")
    e.write(f"w.launch.use_cta_group({_group(e, i)})")
    e.write("w.cta.tensor.relinquish()")
    e.write("if w.launch.scheduler.give_way(): yield")


def _mma(e: "Emitter", i: Instruction) -> None:
    kind, scale_vector, ws, ashift = "", None, False, False
    collector = ""
    for part in i.parts[2:]:
        if part.startswith("collector::"):
            collector = part.removeprefix("collector::")
        elif part.startswith("kind::"):
            kind = part[6:]
        elif part.startswith("scale_vec::") or part in ("block16", "block32"):
            scale_vector = part
        elif part == "ws":
            ws = True
        elif part == "ashift":
            ashift = True
        elif part == "sp":
            raise e.unknown(i, "sparse A")
        elif part != "block_scale" and not part.startswith("cta_group::"):
            raise e.unknown(i, f"modifier .{part}")
    operands = list(i.operands)
    d, a, b, descriptor = operands[:4]
    rest = operands[4:]
    scales = "None, None"
    if i.has("block_scale"):
        scales = f"{e.address(rest[0])}, {e.address(rest[1])}"
        rest = rest[2:]
    disabled = "()"
    if rest and isinstance(rest[0], Vector):
        disabled = "(" + "".join(f"{e.value(x, 'u32')}, " for x in rest[0].items) + ")"
        rest = rest[1:]
    enable = e.value(rest[0], "pred")
    last = "0"
    if len(rest) > 1:
        last = e.value(rest[1], "u64" if ws else "u32")
    from_tensor = isinstance(a, Address)
    first = e.address(a) if from_tensor else e.value(a, "u64")
    e.write(
        f"tensor_mma(w, {kind!r}, {_group(e, i)}, {scale_vector!r}, {ws}, {ashift}, "
        f"{e.address(d)}, {first}, {from_tensor}, {e.value(b, 'u64')}, "
        f"{e.value(descriptor, 'u32')}, {enable}, {scales}, {disabled}, {last}, {collector!r}, "
        f"{e.mask}, {i.line})"
    )
    e.write("if w.jitter: yield")


def _cp(e: "Emitter", i: Instruction) -> None:
    shape, multicast, source = "", None, None
    for part in i.parts[2:]:
        if part[0].isdigit():
            shape = part
        elif part.startswith("warpx"):
            multicast = part
        elif part in ("b6x16_p32", "b4x16_p64"):
            source = part
        elif part != "b8x16" and not part.startswith("cta_group::"):
            raise e.unknown(i, f"modifier .{part}")
    target, descriptor = i.operands
    what = e.constant(
        tensor_copy.Copy(shape, multicast, source), ("copy", shape, multicast, source)
    )
    e.write(
        f"tensor_cp(w, {what}, {_group(e, i)}, {e.address(target)}, {e.value(descriptor, 'u64')}, "
        f"{e.mask}, {i.line})"
    )


def _shift(e: "Emitter", i: Instruction) -> None:
    _known(e, i, "down")
    e.write(f"tensor_shift(w, {_group(e, i)}, {e.address(i.operands[0])}, {e.mask}, {i.line})")


def _fragment(e: "Emitter", i: Instruction, half_split: int | None) -> str:
    shape, count, packed = "", 0, False
    for part in i.parts[2:]:
        if part in (
            "sync",
            "aligned",
            "b32",
            "red",
            "min",
            "max",
            "abs",
            "NaN",
            "f32",
            "u32",
            "s32",
        ):
            continue
        if part in ("pack::16b", "unpack::16b"):
            packed = True
        elif part[0] == "x" and part[1:].isdigit():
            count = int(part[1:])
        elif part[0].isdigit():
            shape = part
        else:
            raise e.unknown(i, f"modifier .{part}")
    return e.constant(
        fragment(shape, count, packed=packed, half_split=half_split),
        ("fragment", shape, count, packed, half_split),
    )


def _half_split(operands: tuple[Any, ...], at: int) -> int | None:
    extra = operands[at] if len(operands) > at else None
    return extra.value if isinstance(extra, Immediate) else None


def _ld(e: "Emitter", i: Instruction) -> None:
    reduces = i.has("red")
    if reduces:
        raise e.unknown(i, "tcgen05.ld.red")
    target, address = i.operands[:2]
    items = target.items if isinstance(target, Vector) else (target,)
    part = _fragment(e, i, _half_split(i.operands, 2))
    e.write(f"w.require_all({e.mask}, {i.opcode!r})")
    name = e.temporary()
    e.write(f"{name} = tensor_ld(w, {part}, {e.address(address)}, {i.line})")
    for number, item in enumerate(items):
        if not isinstance(item, Sink):
            e.assign(item, f"{name}[{number}]", "u32")


def _st(e: "Emitter", i: Instruction) -> None:
    address, *rest = i.operands
    half_split = None
    if len(rest) > 1 and isinstance(rest[0], Immediate):
        half_split = _half_split(i.operands, 1)
        rest.pop(0)
    source = rest[0]
    items = source.items if isinstance(source, Vector) else (source,)
    part = _fragment(e, i, half_split)
    e.write(f"w.require_all({e.mask}, {i.opcode!r})")
    values = ", ".join(e.lanes(item, "u32") for item in items)
    e.write(f"tensor_st(w, {part}, {e.address(address)}, ({values},), {i.line})")


def _commit(e: "Emitter", i: Instruction) -> None:
    multicast = i.has("multicast::cluster")
    ranks = e.value(i.operands[1], "u32") if multicast else "None"
    e.write(
        f"tensor_commit(w, {_group(e, i)}, {e.address(i.operands[0])}, {ranks}, {e.mask}, {i.line})"
    )
    e.write("if w.jitter: yield")


def _wait(e: "Emitter", i: Instruction) -> None:
    e.write(f"w.require_all({e.mask}, {i.opcode!r})")
    loads = i.parts[1] == "wait::ld"
    e.write("w.tensor.wait_loads()" if loads else "w.tensor.wait_stores()")
    e.write(
        f"if traced: w.note('tensor_wait', {i.line}, detail={'loads' if loads else 'stores'!r})"
    )


def _fence(e: "Emitter", i: Instruction) -> None:
    which = "before" if i.parts[1] == "fence::before_thread_sync" else "after"
    e.write(f"w.actor.fence_tensor_{which}()")


_WRITERS: dict[str, Callable[["Emitter", Instruction], None]] = {
    "alloc": _alloc,
    "dealloc": _dealloc,
    "relinquish_alloc_permit": _relinquish,
    "mma": _mma,
    "cp": _cp,
    "shift": _shift,
    "ld": _ld,
    "st": _st,
    "commit": _commit,
    "wait::ld": _wait,
    "wait::st": _wait,
    "fence::before_thread_sync": _fence,
    "fence::after_thread_sync": _fence,
}


# Functions called by generated code


def _ctas(w: "Warp", group: int) -> list["Cta"]:
    """CTAs of an instruction with ``.cta_group::<group>``; in a pair, the even rank is first."""
    w.launch.use_cta_group(group)
    if group == 1:
        return [w.cta]
    rank = w.cta.rank & ~1
    if rank + 1 >= len(w.cta.cluster.ctas):
        raise IllegalInstruction(
            f"cta_group::2 in CTA rank {w.cta.rank} of a cluster of {len(w.cta.cluster.ctas)}: "
            "it has no peer"
        )
    return [w.reach(rank), w.reach(rank + 1)]


def _touch(w: "Warp", ctas: list["Cta"], clock: int, verb: str, line: int) -> None:
    """Record an access of the tensor pipe to each CTA."""
    for cta in ctas:
        cta.touch(w.tensor.pipe, clock, verb, lambda: w.where(line))


@runtime
def tensor_alloc(
    w: "Warp", target: Any, columns: int, group: int, line: int
) -> Generator[None, None, None]:
    """Allocate tensor memory, and write the first column to the shared address ``target``.

    The second CTA of a pair gets the columns allocated by the first.
    """
    columns = pick(columns, 0)
    check_columns(columns)
    ctas = _ctas(w, group)
    w.note("tensor_alloc", line, amount=columns, detail=group)
    own = w.cta.tensor
    while (start := _allocated(w, ctas, columns)) is None:
        own.wanted = columns
        w.launch.counters.waits["tensor memory"] += 1
        waiters: list[Callable[[], None]] = []
        w.blocked(waiters, lambda: f"{columns} free columns of {own.name}")
        for cta in ctas:
            cta.tensor.table.waiters.extend(waiters)
        yield
    own.wanted = 0
    place = pick(target, 0) & 0xFFFFFFFF
    data = np.array([start], np.uint32).view(np.uint8)
    w.cta.shared.write(place, data, w.access(line, "write"))
    if w.launch.scheduler.give_way():
        yield


def _allocated(w: "Warp", ctas: list["Cta"], columns: int) -> int | None:
    """Allocate for a CTA or a pair; returns the first column, None while there is no room."""
    own = w.cta.tensor
    if own.promised:
        start, promised = own.promised.pop(0)
        if promised != columns:
            raise TensorMemoryMisuse(
                f"tcgen05.alloc of {columns} columns, the peer CTA asked for {promised}"
            )
        return start
    for cta in ctas:
        cta.tensor.check_permit()
    found = find_columns([cta.tensor.table for cta in ctas], columns)
    if found is None or not all(cta.tensor.table.may_allocate(cta.tensor) for cta in ctas):
        return None
    for cta in ctas:
        cta.tensor.allocate(found, columns)
        if cta is not w.cta:
            cta.tensor.promise(found, columns)
    return found


@runtime
def tensor_dealloc(w: "Warp", address: Any, columns: Any, group: int, line: int) -> None:
    w.launch.use_cta_group(group)
    lane, start = split_address(pick(address, 0))
    columns = pick(columns, 0)
    tensor = w.cta.tensor
    w.note("tensor_free", line, amount=columns)
    if lane:
        raise TensorMemoryMisuse(f"tcgen05.dealloc of address {pick(address, 0):#x}: not at lane 0")
    tensor.free(start, columns)
    tensor.order_free(start, columns, w.tensor.store_access(line))


def chunks_of(descriptor: SharedDescriptor, shape: OperandShape) -> np.ndarray:
    """Indices of the 16-byte chunks of shared memory that an operand touches."""
    start, index = chunk_index(descriptor, shape)
    return (index + start // 16).reshape(-1)


def _check_cells(w: "Warp", cta: "Cta", columns: Any, verb: str) -> None:
    """Check that a single allocation holds all the columns."""
    try:
        cta.tensor.check_cells(columns, verb)
    except TensorMemoryMisuse as finding:
        w.launch.report(finding.at(w.where(w.line())))


@runtime
def tensor_mma(
    w: "Warp",
    kind: str,
    group: int,
    scale_vector: str | None,
    ws: bool,
    ashift: bool,
    d: Any,
    a: Any,
    from_tensor: bool,
    b: Any,
    descriptor: Any,
    enable: Any,
    scales_a: Any,
    scales_b: Any,
    disabled: tuple[Any, ...],
    last: Any,
    collector: str,
    mask: "Mask",
    line: int,
) -> None:
    for lane in w.active(mask):
        held = _collect(w, collector, pick(b if ws else a, lane))
        instruction = decode_instruction(
            pick(descriptor, lane),
            kind,
            cta_group=group,
            weight_stationary=ws,
            scale_vector=scale_vector,
        )
        zeros = None
        if ws and pick(last, lane):
            zeros = decode_column_mask(
                pick(last, lane), instruction.m, instruction.n, instruction.max_shift
            )
        mma = Mma(
            instruction,
            split_address(pick(d, lane)),
            split_address(pick(a, lane))
            if from_tensor
            else decode_shared_descriptor(pick(a, lane)),
            decode_shared_descriptor(pick(b, lane)),
            bool(pick(enable, lane)),
            None if scales_a is None else split_scale_address(pick(scales_a, lane)),
            None if scales_b is None else split_scale_address(pick(scales_b, lane)),
            tuple(pick(x, lane) for x in disabled),
            0 if ws else pick(last, lane),
            zeros,
            ashift,
            collector or None,
        )
        _check_proven(w, mma, line)
        _issue_mma(w, mma, _ctas(w, group), lane, line)
        counted = (kind, instruction.m, instruction.n, instruction.k, group)
        w.launch.counters.multiplies[counted] += 1
        near = from_tensor or (held and not ws)  # A comes from the tensor core itself
        w.note("mma", line, detail=(*counted, instruction.scales, near))


def _check_proven(w: "Warp", mma: Mma, line: int) -> None:
    """Report forms of a block-scaled MMA that the strict modes of ``Gpu`` refuse."""
    gpu = w.launch.gpu
    for side, scales in (("A", mma.scales_a), ("B", mma.scales_b)):
        if gpu.strict_scale_columns and scales is not None and scales.column % 2:
            w.launch.report(
                UnprovenForm(
                    f"scales of {side} at column {scales.column}, accepted even columns",
                    w.where(line),
                )
            )
    keeps = mma.collector is not None and not mma.collector.endswith("::discard")
    if gpu.strict_collectors and mma.scales_a is not None and keeps:
        w.launch.report(
            UnprovenForm(f".collector::{mma.collector} of a block-scaled MMA", w.where(line))
        )


def _collect(w: "Warp", collector: str, operand: int) -> bool:
    """Track the collector buffers; return whether this MMA reads its operand from a buffer.

    An operand read from a buffer must be the operand that filled the buffer (PTX ISA 9.7.16.10.9).
    ``collector``: modifier, such as ``a::fill``; ``operand``: descriptor or address of the operand.
    """
    buffer, _, action = collector.partition("::")
    held = w.tensor.collected
    if action in ("use", "lastuse"):
        if held.get(buffer) != operand:
            came = "nothing" if buffer not in held else f"the operand at {held[buffer]:#x}"
            raise IllegalInstruction(
                f".collector::{collector} for the operand at {operand:#x}: buffer {buffer} holds "
                f"{came}; fill it with the same operand first"
            )
        if action == "lastuse":
            del held[buffer]
        return True
    if action == "fill":
        held[buffer] = operand
    else:
        # Without a fill, the operand passes through the buffer and is not kept.
        held.pop(buffer or "a", None)
    return False


def _issue_mma(w: "Warp", mma: Mma, ctas: list["Cta"], lane: int, line: int) -> None:
    before = w.actor.snapshot()
    unit = w.tensor
    shared_reads = unit.operand_access(before, line, "tcgen05.mma read of an operand", lane)
    tensor_reads = unit.pipe_access(before, line, "tcgen05.mma read")
    tensor_writes = unit.pipe_access(before, line, "tcgen05.mma write")
    clock = unit.pipe_clock

    def run() -> None:
        _touch(w, ctas, clock, "tcgen05.mma", line)
        instruction = mma.instruction
        shift = mma.column_mask.shift if mma.column_mask else 0
        operands = [chunks_of(mma.b, b_shape(instruction, shift))]
        if isinstance(mma.a, SharedDescriptor):
            operands.append(chunks_of(mma.a, a_shape(instruction)))
        touched = footprint(mma)
        for cta in ctas:
            for chunks in operands:
                cta.shared.read_chunks(chunks, shared_reads)
            for lanes, columns in touched.tensor_reads:
                _check_cells(w, cta, columns, "tcgen05.mma read")
                cta.tensor.shadow.read((lanes, columns), tensor_reads)
            for block in touched.tensor_writes:
                _check_cells(w, cta, block.columns, "tcgen05.mma write")
                cta.tensor.shadow.write((block.lanes, block.columns), tensor_writes)
        execute(mma, [CtaMemory(cta.shared.whole, cta.tensor.cells) for cta in ctas])

    w.issue("tensor", unit.queue, run, line)


@runtime
def tensor_cp(
    w: "Warp",
    what: tensor_copy.Copy,
    group: int,
    target: Any,
    descriptor: Any,
    mask: "Mask",
    line: int,
) -> None:
    for lane in w.active(mask):
        _issue_cp(w, what, group, pick(target, lane), pick(descriptor, lane), lane, line)


def _issue_cp(
    w: "Warp",
    what: tensor_copy.Copy,
    group: int,
    target: int,
    descriptor: int,
    lane: int,
    line: int,
) -> None:
    source = decode_shared_descriptor(descriptor)
    address = split_address(target)
    before = w.actor.snapshot()
    reads = w.tensor.operand_access(before, line, "tcgen05.cp read", lane)
    writes = w.tensor.copy_access(before, line)
    ctas = _ctas(w, group)
    w.note("tensor_copy", line, amount=16 * what.rows * what.columns // 4, detail=group)
    clock = w.tensor.pipe_clock

    def run() -> None:
        _touch(w, ctas, clock, "tcgen05.cp", line)
        chunks = chunks_of(source, tensor_copy.source_shape(what))
        columns = slice(address.column, address.column + what.columns)
        for cta in ctas:
            cta.shared.read_chunks(chunks, reads)
            _check_cells(w, cta, columns, "tcgen05.cp write")
            for lanes, _ in tensor_copy.destination_lanes(what, address.lane):
                cta.tensor.shadow.write((lanes, columns), writes)
            words = tensor_copy.source_words(cta.shared.whole, what, source)
            tensor_copy.write_words(cta.tensor.cells, what, address, words)
            w.launch.counters.nbytes["copy shared to tensor"] += words.nbytes

    w.issue("tensor", w.tensor.queue, run, line)


@runtime
def tensor_shift(w: "Warp", group: int, target: Any, mask: "Mask", line: int) -> None:
    for lane in w.active(mask):
        _issue_shift(w, group, pick(target, lane), line)


def _issue_shift(w: "Warp", group: int, target: int, line: int) -> None:
    address = split_address(target)
    access = w.tensor.pipe_access(w.actor.snapshot(), line, "tcgen05.shift write")
    ctas = _ctas(w, group)
    w.note("tensor_copy", line, amount=32 * 32, detail=group)  # 32 lanes of 32 bytes
    clock = w.tensor.pipe_clock

    def run() -> None:
        _touch(w, ctas, clock, "tcgen05.shift", line)
        place = (
            slice(address.lane, address.lane + 32),
            slice(address.column, address.column + 8),
        )
        for cta in ctas:
            cta.tensor.shadow.read(place, access)
            cta.tensor.shadow.write(place, access)
            shift_down(cta.tensor.cells, address)

    w.issue("tensor", w.tensor.queue, run, line)


def _reachable(w: "Warp", part: Fragment, address: int) -> TensorAddress:
    """Check the address of a load or store; report and replace lanes outside the quarter."""
    place = split_address(address)
    try:
        check_access(part, place, w.index)
    except LaneReach as finding:
        w.launch.report(finding.at(w.where(w.line())))
        place = TensorAddress(w.index % 4 * 32 + place.lane % 32, place.column)
    return place


@runtime
def tensor_ld(w: "Warp", part: Fragment, address: Any, line: int) -> np.ndarray:
    place = _reachable(w, part, pick(address, 0))
    tensor = w.cta.tensor
    columns = slice(place.column, place.column + part.width)
    _check_cells(w, w.cta, columns, "tcgen05.ld read")
    cells = (slice(place.lane, place.lane + part.rows), columns)
    tensor.shadow.read(cells, w.tensor.load_access(line))
    w.launch.counters.nbytes["tensor to registers"] += 128 * part.registers
    w.note("tensor_load", line, amount=part.registers, detail=part.shape)
    return load(tensor.cells, part, place)


@runtime
def tensor_st(
    w: "Warp", part: Fragment, address: Any, values: tuple[np.ndarray, ...], line: int
) -> None:
    place = _reachable(w, part, pick(address, 0))
    tensor = w.cta.tensor
    columns = slice(place.column, place.column + part.width)
    _check_cells(w, w.cta, columns, "tcgen05.st write")
    cells = (slice(place.lane, place.lane + part.rows), columns)
    tensor.shadow.write(cells, w.tensor.store_access(line))
    w.launch.counters.nbytes["registers to tensor"] += 128 * part.registers
    w.note("tensor_store", line, amount=part.registers, detail=part.shape)
    store(tensor.cells, part, place, np.stack(values))


@runtime
def tensor_commit(w: "Warp", group: int, address: Any, ranks: Any, mask: "Mask", line: int) -> None:
    """Arrive on an mbarrier once the warp's mma, cp and shift issued so far are complete.

    ``ranks``: mask of the CTAs whose mbarriers get the arrival; None: the CTA of ``address``.
    """
    for lane in w.active(mask):
        chosen = None if ranks is None else pick(ranks, lane)
        _issue_commit(w, group, pick(address, lane), chosen, mask, line)


def _issue_commit(
    w: "Warp", group: int, address: int, ranks: int | None, mask: "Mask", line: int
) -> None:
    place = address & 0xFFFFFFFF
    _ctas(w, group)
    if ranks is None:
        targets = [barrier_at(w, place)]
    else:
        chosen = ranks
        if chosen >> len(w.cta.cluster.ctas):
            raise OutOfBounds(
                f"tcgen05.commit to CTA mask {chosen:#x} in a cluster of {len(w.cta.cluster.ctas)}"
            )
        inside = place & 0xFFFFFF
        targets = [
            barrier_at(w, rank << 24 | inside)
            for rank in range(len(w.cta.cluster.ctas))
            if chosen >> rank & 1
        ]
    for cta, barrier in targets:
        check_visible(w, barrier, cta, True)
    w.note("commit", line, detail=tuple(barrier.key for _, barrier in targets))
    clock = w.tensor.commit()
    handed = w.actor.snapshot().copy()
    for view in (handed.generic, handed.proxy):
        view[w.tensor.pipe] = clock
    # PTX ISA, tcgen05 memory consistency: commit is a fence::before_thread_sync too.
    handed.fenced = {**handed.tensor, w.tensor.pipe: clock}
    w.hand_over(mask, handed)

    def run() -> None:
        _touch(w, [cta for cta, _ in targets], clock, "tcgen05.commit's arrival", line)
        join(handed.generic, w.tensor.phases)
        for _, barrier in targets:
            # Commits arrive in order: a later commit implies the arrival of this commit.
            over = w.tensor.pipe, clock + 1
            phase = barrier.arrive(handed, sender=sender(w, barrier), over=over)
            w.tensor.phases[barrier.component] = phase

    w.issue("tensor", w.tensor.queue, run, line)
