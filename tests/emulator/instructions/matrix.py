"""ldmatrix and stmatrix: copies of 8- or 16-row tiles between shared memory and a warp's lanes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tests.emulator.findings import IllegalInstruction
from tests.emulator.instructions.load_store import ld_lanes, st_lanes
from tests.emulator.instructions.registry import family, runtime
from tests.emulator.ptx.syntax import Instruction, Vector

if TYPE_CHECKING:
    from tests.emulator.codegen import Emitter
    from tests.emulator.machine.warp import Warp

_COUNT = {"x1": 1, "x2": 2, "x4": 4}
# Source format -> bits of an element; 16 packed elements begin at every 16-byte boundary.
_PACKED = {"b6x16_p32": 6, "b4x16_p64": 4}
# (shape, types) -> whether .trans is present: True, False or None for both (PTX ISA, ldmatrix).
_LOADS = {
    ("m8n8", "b16"): None,
    ("m16n16", "b8"): True,
    **{("m16n16", f"b8x16.{source}"): True for source in _PACKED},
    **{("m8n16", f"b8x16.{source}"): False for source in _PACKED},
}
_STORES = {("m8n8", "b16"): None, ("m16n8", "b8"): True}


@dataclass(frozen=True)
class _Form:
    """Modifiers of ldmatrix or stmatrix.

    Attributes:
        shape: m8n8, m16n16, m8n16 or m16n8.
        count: number of matrices.
        transposed: whether .trans is given.
        bits: bits of an element in shared memory.
        space: shared or generic.
    """

    shape: str
    count: int
    transposed: bool
    bits: int
    space: str

    @property
    def rows(self) -> int:
        """Number of row addresses that one matrix takes; each points to 16 bytes."""
        return 16 if self.shape == "m16n16" else 8

    @property
    def registers(self) -> int:
        return self.count * self.rows // 8


def _form(e: "Emitter", i: Instruction, accepted: dict[tuple[str, str], bool | None]) -> _Form:
    shape, count, transposed, space, types = "", 0, False, "generic", []
    if i.parts[1:3] != ("sync", "aligned"):
        raise e.unknown(i)
    for part in i.parts[3:]:
        if part in _COUNT:
            count = _COUNT[part]
        elif part == "trans":
            transposed = True
        elif part in ("b16", "b8", "b8x16", *_PACKED):
            types.append(part)
        elif part in ("shared", "shared::cta"):
            space = "shared"
        elif part[0] == "m" and not shape:
            shape = part
        else:
            raise e.unknown(i, f"modifier .{part}")
    key = (shape, ".".join(types))
    if key not in accepted or not count or (shape == "m16n16" and count == 4):
        raise e.unknown(i)
    if accepted[key] not in (None, transposed):
        raise IllegalInstruction(
            f"{i.opcode}: .{shape} {'needs' if accepted[key] else 'does not take'} .trans"
        )
    bits = _PACKED.get(types[-1], 16 if types[-1] == "b16" else 8)
    return _Form(shape, count, transposed, bits, space)


def _items(form: _Form, i: Instruction, place: int) -> tuple[Any, ...]:
    operand = i.operands[place]
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if len(items) != form.registers:
        raise IllegalInstruction(
            f"{i.opcode} with {len(items)} registers, accepted {form.registers}"
        )
    return items


@family("ldmatrix")
def load_matrix(e: "Emitter", i: Instruction) -> None:
    form = _form(e, i, _LOADS)
    items = _items(form, i, 0)
    e.write(f"w.require_all({e.mask}, {i.opcode!r})")
    names = [e.temporary() for _ in items]
    address = e.address(i.operands[1])
    if e.is_uniform(i.operands[1]):
        address = f"np.full(32, {address}, np.uint64)"
    e.write(
        f"{', '.join(names)}{',' if len(names) == 1 else ''} = "
        f"ldmatrix(w, {address}, {e.constant(form, form)}, {i.line})"
    )
    for item, name in zip(items, names, strict=True):
        e.assign(item, name, "u32")


@family("stmatrix")
def store_matrix(e: "Emitter", i: Instruction) -> None:
    form = _form(e, i, _STORES)
    items = _items(form, i, 1)
    e.write(f"w.require_all({e.mask}, {i.opcode!r})")
    address = e.address(i.operands[0])
    if e.is_uniform(i.operands[0]):
        address = f"np.full(32, {address}, np.uint64)"
    values = ", ".join(e.lanes(item, "u32") for item in items)
    e.write(f"stmatrix(w, {address}, ({values},), {e.constant(form, form)}, {i.line})")


@runtime
def ldmatrix(w: "Warp", addresses: np.ndarray, form: _Form, line: int) -> list[np.ndarray]:
    """Load the matrices of a warp; lane ``rows * i + r`` holds the address of row r of matrix i."""
    mask = np.arange(32) < form.rows * form.count
    words = ld_lanes(w, form.space, addresses, 4, 4, mask, line, False, False, 0)
    rows = np.stack(words, 1)[: form.rows * form.count].view(np.uint8)
    if form.bits < 8:
        rows = _unpacked(rows, form.bits)
    if form.shape == "m8n8":
        # Lane t gets columns 2 (t % 4) and the next of row t / 4.
        tiles: Any = rows.view(np.uint16).reshape(form.count, 8, 8)
        if form.transposed:
            tiles = tiles.transpose(0, 2, 1)
    elif form.shape == "m8n16":
        # Lane t holds columns from 4 (t % 4) of row t / 4: no rearrangement.
        tiles = rows
    else:
        # Likewise, for rows t / 4 and, in the next register, t / 4 + 8 of the transpose.
        tiles = rows.reshape(form.count, 16, 16).transpose(0, 2, 1)
    lanes = np.ascontiguousarray(tiles).reshape(-1).view(np.uint32)
    return list(lanes.reshape(form.registers, 32))


def _unpacked(rows: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Sixteen elements of each row, one per byte, in the low bits (.b8x16)."""
    found = np.unpackbits(rows[:, : 2 * bits], axis=1, bitorder="little").reshape(-1, 16, bits)
    return np.packbits(found, axis=2, bitorder="little")[:, :, 0]


@runtime
def stmatrix(
    w: "Warp", addresses: np.ndarray, values: tuple[np.ndarray, ...], form: _Form, line: int
) -> None:
    count = form.count
    tiles: Any = np.stack(values)
    if form.shape == "m16n8":
        # Lane t holds rows t / 4 and t / 4 + 8 of columns 2 (t % 4) and the next; a column of the
        # matrix is a row of shared memory.
        held = tiles.view(np.uint8).reshape(count, 8, 4, 2, 2)
        rows = held.transpose(0, 2, 4, 3, 1)
    else:
        rows = tiles.view(np.uint16).reshape(count, 8, 8)
        if form.transposed:
            rows = rows.transpose(0, 2, 1)
    data = np.ascontiguousarray(rows).reshape(-1).view(np.uint32).reshape(count * 8, 4)
    mask = np.arange(32) < 8 * count
    columns = [np.resize(data[:, n], 32) for n in range(4)]
    st_lanes(w, form.space, addresses, 4, tuple(columns), mask, line, False, False, 0, own=False)
