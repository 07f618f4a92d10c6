"""tcgen05.ld, tcgen05.st and tcgen05.shift: mapping of tensor memory cells to registers.

PTX ISA 9.7.16.2.3.1 shows the fragments as figures; the layouts here are CUTLASS's
(include/cute/atom/copy_traits_sm100.hpp).
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tests.emulator.findings import IllegalInstruction, LaneReach, OutOfBounds
from tests.emulator.tcgen05.formats import Words
from tests.emulator.tcgen05.tensor_memory_layout import COLUMNS, SUBPARTITION, Address

_REGISTERS = {"32x32b": 1, "16x64b": 1, "16x32bx2": 1, "16x128b": 2, "16x256b": 4}
_MAX_REGISTERS = 128


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """Mapping of a warp's registers to tensor memory.

    Attributes:
        shape: shape as in PTX.
        registers: 32-bit registers per thread.
        rows: number of lanes touched, 16 or 32.
        packed: whether a register holds the low halves of two columns (``.pack::16b`` or
            ``.unpack::16b``).
        lanes: lane offset [registers, 32 threads].
        columns: column offset [registers, 32 threads]; if packed, of the first column.
        width: number of columns from the base address to the last touched column.
    """

    shape: str
    registers: int
    rows: int
    packed: bool
    lanes: npt.NDArray[np.intp]
    columns: npt.NDArray[np.intp]
    width: int


@lru_cache(maxsize=1024)
def fragment(
    shape: str, count: int, *, packed: bool = False, half_split: int | None = None
) -> Fragment:
    """The fragment of ``.shape.xcount``.

    Args:
        shape: ``32x32b``, ``16x64b``, ``16x128b``, ``16x256b`` or ``16x32bx2``.
        count: the repeat factor ``.num``.
        packed: whether a load has ``.pack::16b``, or a store ``.unpack::16b``.
        half_split: immHalfSplitoff, columns to the second half of ``16x32bx2``.

    Raises:
        IllegalInstruction: PTX ISA 9.7.16.8.3 does not list the shape, count or half_split.
    """
    if shape not in _REGISTERS:
        raise IllegalInstruction(
            f"tcgen05.ld/st shape .{shape}: accepted are {', '.join(_REGISTERS)}"
            " (PTX ISA 9.7.16.2.3)"
        )
    registers = _REGISTERS[shape] * count
    if count not in (1, 2, 4, 8, 16, 32, 64, 128) or registers > _MAX_REGISTERS:
        raise IllegalInstruction(
            f"tcgen05.ld/st .{shape}.x{count}: accepted are powers of two up to"
            f" x{_MAX_REGISTERS // _REGISTERS[shape]} (PTX ISA 9.7.16.8.3, Table 49)"
        )
    if (half_split is None) == (shape == "16x32bx2"):
        raise IllegalInstruction(
            f"tcgen05.ld/st .{shape} with{'out' if half_split is None else ''} immHalfSplitoff:"
            " only .16x32bx2 takes it, and must (PTX ISA 9.7.16.8.3)"
        )
    register = np.arange(registers, dtype=np.intp)[:, None]
    thread = np.arange(32, dtype=np.intp)
    rows = 16
    split = 0
    match shape:
        case "32x32b":
            rows = 32
            lane, column = thread, register
        case "16x32bx2":
            lane, column = thread % 16, register
            split = half_split or 0
        case "16x64b":
            lane, column = thread // 4 + 8 * (thread & 1), 2 * register + (thread >> 1 & 1)
        case "16x128b":
            lane, column = thread // 4 + 8 * (register & 1), 4 * (register >> 1) + thread % 4
        case _:
            lane = thread // 4 + 8 * (register >> 1 & 1)
            column = 8 * (register >> 2) + 2 * (thread % 4) + (register & 1)
    # Packing doubles the columns; the split counts columns of tensor memory either way (CUTLASS).
    column = column * 2 if packed else column
    columns = column + split * (thread // 16)
    lanes, columns = (
        np.ascontiguousarray(np.broadcast_to(x, (registers, 32))) for x in (lane, columns)
    )
    for array in (lanes, columns):
        array.setflags(write=False)
    width = int(columns.max()) + 1 + packed
    return Fragment(shape, registers, rows, packed, lanes, columns, width)


def check_access(part: Fragment, address: Address, warp: int) -> None:
    """Refuse access to cells that do not exist or that the warp cannot reach.

    Args:
        part: fragment to load or store.
        address: the instruction's taddr.
        warp: index of the warp in its CTA.

    Raises:
        LaneReach: the lanes are not in the warp's quarter (PTX ISA 9.7.16.8.1).
        IllegalInstruction: the shape may not begin at the lane (assumed).
        OutOfBounds: the columns end beyond the last column of tensor memory.
    """
    lane, column = address
    quarter = warp % 4
    if lane // SUBPARTITION != quarter:
        first = quarter * SUBPARTITION
        raise LaneReach(
            f"tcgen05.ld/st by warp {warp} at lane {lane}: it reaches lanes {first} to {first + 31}"
            " only, those of its index modulo 4 (PTX ISA 9.7.16.8.1)"
        )
    if lane % part.rows:
        raise IllegalInstruction(
            f"tcgen05.ld/st .{part.shape} at lane {lane}: accepted are multiples of {part.rows}"
        )
    if column + part.width > COLUMNS:
        raise OutOfBounds(
            f"tcgen05.ld/st .{part.shape} takes columns {column} to {column + part.width - 1} of"
            f" tensor memory, which has {COLUMNS} (PTX ISA 9.7.16.1)"
        )


def cells(part: Fragment, address: Address) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Lanes and columns of every cell touched, [registers, 32], or [2, registers, 32] if packed."""
    lanes, columns = part.lanes + address.lane, part.columns + address.column
    if part.packed:
        return np.stack([lanes, lanes]), np.stack([columns, columns + 1])
    return lanes, columns


@lru_cache(maxsize=1024)
def _flat(part: Fragment) -> npt.NDArray[np.intp]:
    return part.lanes * COLUMNS + part.columns


def load(tensor: Words, part: Fragment, address: Address) -> Words:
    """Registers uint32 [registers, 32 threads] of a tcgen05.ld."""
    lane, column = address
    if part.shape == "32x32b" and not part.packed:
        return tensor[lane : lane + 32, column : column + part.registers].T.copy()
    cell = _flat(part) + (lane * COLUMNS + column)
    flat = tensor.reshape(-1)
    if not part.packed:
        return flat.take(cell)
    return flat.take(cell) & np.uint32(0xFFFF) | flat.take(cell + 1) << np.uint32(16)


def store(tensor: Words, part: Fragment, address: Address, registers: Words) -> None:
    """Write a tcgen05.st's registers, uint32 [registers, 32 threads].

    ``.unpack::16b`` writes zeros to the upper half of each word (assumed).
    """
    lane, column = address
    if part.shape == "32x32b" and not part.packed:
        tensor[lane : lane + 32, column : column + part.registers] = registers.T
        return
    cell = _flat(part) + (lane * COLUMNS + column)
    flat = tensor.reshape(-1)
    if part.packed:
        flat[cell] = registers & np.uint32(0xFFFF)
        flat[cell + 1] = registers >> np.uint32(16)
    else:
        flat[cell] = registers


def reduce_columns(
    registers: Words, operation: str, kind: str, *, absolute: bool = False, nan: bool = False
) -> Words:
    """The redval of tcgen05.ld.red, uint32 [32], over the loaded registers.

    Args:
        registers: [registers, 32], loaded by a ``.32x32b`` or ``.16x32bx2`` load of at least x2.
        operation: ``min`` or ``max``.
        kind: ``f32``, ``u32`` or ``s32``.
        absolute: ``.abs``: whether to reduce magnitudes (f32 only).
        nan: ``.NaN``: whether a NaN makes the result NaN instead of being ignored (f32 only).

    Raises:
        IllegalInstruction: qualifiers that PTX ISA 9.7.16.8.3 does not have.
    """
    types = {"f32": np.float32, "u32": np.uint32, "s32": np.int32}
    if operation not in ("min", "max") or kind not in types:
        raise IllegalInstruction(
            f"tcgen05.ld.red .{operation}.{kind}: accepted are min and max of f32, u32 and s32"
            " (PTX ISA 9.7.16.8.3)"
        )
    if (absolute or nan) and kind != "f32":
        raise IllegalInstruction(
            f"tcgen05.ld.red .{operation} with .abs or .NaN of {kind}: only f32 takes them"
            " (PTX ISA 9.7.16.8.3)"
        )
    if len(registers) < 2:
        raise IllegalInstruction("tcgen05.ld.red of x1: at least x2 (PTX ISA 9.7.16.8.3)")
    values = registers.view(types[kind])
    if absolute:
        values = np.abs(values)
    quiet, loud = (np.fmin, np.minimum) if operation == "min" else (np.fmax, np.maximum)
    reduced = (loud if nan or kind != "f32" else quiet).reduce(values, axis=0)
    return np.ascontiguousarray(reduced).view(np.uint32)


def shift_down(tensor: Words, address: Address) -> None:
    """tcgen05.shift.down: lane i takes the 32 bytes of lane i + 1; the last of 32 lanes stays.

    PTX ISA 9.7.16.9.3 has the shape 31x256b; the direction is CUTLASS's (tcgen05_mma, a_shift).
    Only the subpartition that ``address`` names is shifted (assumed).

    Raises:
        IllegalInstruction: the lane is not a multiple of 32.
        OutOfBounds: the columns end beyond the last column of tensor memory.
    """
    lane, column = address
    if lane % SUBPARTITION or lane >= 4 * SUBPARTITION:
        raise IllegalInstruction(
            f"tcgen05.shift at lane {lane}: accepted are 0, 32, 64 and 96 (PTX ISA 9.7.16.9.3)"
        )
    if column + 8 > COLUMNS:
        raise OutOfBounds(
            f"tcgen05.shift takes columns {column} to {column + 7} of tensor memory, which has"
            f" {COLUMNS} (PTX ISA 9.7.16.1)"
        )
    part = tensor[lane : lane + SUBPARTITION, column : column + 8]
    part[:-1] = part[1:].copy()
