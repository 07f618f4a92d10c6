"""ldmatrix and stmatrix: 8x8 tiles between shared memory and the lanes of a warp."""

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.emulator.instructions.load_store import ld_lanes, st_lanes
from tests.emulator.instructions.registry import family, runtime
from tests.emulator.ptx.syntax import Instruction, Vector

if TYPE_CHECKING:
    from tests.emulator.codegen import Emitter
    from tests.emulator.machine.warp import Warp

_COUNT = {"x1": 1, "x2": 2, "x4": 4}


def _form(e: "Emitter", i: Instruction) -> tuple[int, bool, str]:
    count, transposed, kind, shape = 0, False, "", ""
    for part in i.parts[1:]:
        if part in _COUNT:
            count = _COUNT[part]
        elif part == "trans":
            transposed = True
        elif part in ("b16", "b8"):
            kind = part
        elif part in ("m8n8", "m16n8"):
            shape = part
        elif part not in ("sync", "aligned", "shared", "shared::cta"):
            raise e.unknown(i, f"modifier .{part}")
    if (kind, shape) not in (("b16", "m8n8"), ("b8", "m16n8")):
        raise e.unknown(i)
    return count, transposed, kind


@family("ldmatrix")
def load_matrix(e: "Emitter", i: Instruction) -> None:
    count, transposed, kind = _form(e, i)
    if kind != "b16":
        raise e.unknown(i)
    target, source = i.operands
    items = target.items if isinstance(target, Vector) else (target,)
    e.write(f"w.require_all({e.mask}, {i.opcode!r})")
    names = [e.temporary() for _ in items]
    address = e.address(source)
    if e.is_uniform(source):
        address = f"np.full(32, {address}, np.uint64)"
    e.write(
        f"{', '.join(names)}{',' if count == 1 else ''} = "
        f"ldmatrix(w, {address}, {count}, {transposed}, {i.line})"
    )
    for item, name in zip(items, names, strict=True):
        e.assign(item, name, "u32")


@family("stmatrix")
def store_matrix(e: "Emitter", i: Instruction) -> None:
    _, transposed, kind = _form(e, i)
    target, source = i.operands
    items = source.items if isinstance(source, Vector) else (source,)
    e.write(f"w.require_all({e.mask}, {i.opcode!r})")
    address = e.address(target)
    if e.is_uniform(target):
        address = f"np.full(32, {address}, np.uint64)"
    values = ", ".join(e.lanes(item, "u32") for item in items)
    e.write(f"stmatrix(w, {address}, ({values},), {transposed}, {kind == 'b8'}, {i.line})")


@runtime
def ldmatrix(
    w: "Warp", addresses: np.ndarray, count: int, transposed: bool, line: int
) -> list[np.ndarray]:
    """Lane 8 i + r names row r of tile i; lane t gets row t/4, columns 2 (t%4) and the next."""
    mask = np.arange(32) < 8 * count
    words = ld_lanes(w, "shared", addresses, 4, 4, mask, line, False, False)
    rows = np.stack(words, 1)[: 8 * count].view(np.uint16).reshape(count, 8, 8)
    if transposed:
        rows = rows.transpose(0, 2, 1)
    lanes = np.ascontiguousarray(rows).view(np.uint32).reshape(count, 32)
    return list(lanes)


@runtime
def stmatrix(
    w: "Warp",
    addresses: np.ndarray,
    values: tuple[np.ndarray, ...],
    transposed: bool,
    narrow: bool,
    line: int,
) -> None:
    count = len(values)
    tiles: Any = np.stack(values)
    if narrow:
        # Always transposed: lane t holds rows 4 (t%4).. of column t/4 (PTX ISA, stmatrix).
        rows = tiles.view(np.uint8).reshape(count, 8, 16).transpose(0, 2, 1)
        data = np.ascontiguousarray(rows).reshape(count * 16, 8).view(np.uint32)
        mask = np.arange(32) < 16 * count
        columns = [np.resize(data[:, n], 32) for n in range(2)]
    else:
        rows = tiles.view(np.uint16).reshape(count, 8, 8)
        if transposed:
            rows = rows.transpose(0, 2, 1)
        data = np.ascontiguousarray(rows).view(np.uint32).reshape(count * 8, 4)
        mask = np.arange(32) < 8 * count
        columns = [np.resize(data[:, n], 32) for n in range(4)]
    st_lanes(w, "shared", addresses, 4, tuple(columns), mask, line, False, False)
