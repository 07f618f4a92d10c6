"""mma.sync: small dense matrix multiplications by one warp (PTX ISA, Matrix Fragments for mma)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tests.emulator.findings import IllegalInstruction
from tests.emulator.instructions.registry import family, runtime
from tests.emulator.isa.flush import canonical_f16, canonical_f32
from tests.emulator.ptx.syntax import Instruction, Operand, Vector

if TYPE_CHECKING:
    from tests.emulator.codegen import Emitter

Lanes = npt.NDArray[np.uint32]

_DTYPES: dict[str, Any] = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
    "u8": np.uint8,
    "f32": np.float32,
    "s32": np.int32,
}
# Operand type -> extents along K, all with M = 16 and N = 8.
_DEPTHS = {
    "f16": (8, 16),
    "bf16": (8, 16),
    "tf32": (4, 8),
    **dict.fromkeys(("e4m3", "e5m2", "s8", "u8"), (16, 32)),
}
_ACCUMULATORS = {
    "f16": ("f16", "f32"),
    "s8": ("s32",),
    "u8": ("s32",),
    "e4m3": ("f16", "f32"),
    "e5m2": ("f16", "f32"),
}
_CLASSES = ({"f16"}, {"bf16"}, {"tf32"}, {"e4m3", "e5m2"}, {"s8", "u8"})


@dataclass(frozen=True)
class _Form:
    """Types of D, A, B and C, extent along K, and whether sums are clamped."""

    d: str
    a: str
    b: str
    c: str
    depth: int
    clamped: bool

    def registers(self) -> tuple[int, int, int, int]:
        """Number of 32-bit registers of D, A, B and C."""
        width = np.dtype(_DTYPES[self.a]).itemsize
        a = 16 * self.depth * width // 128
        return 2 if self.d == "f16" else 4, a, a // 2, 2 if self.c == "f16" else 4


def _form(e: "Emitter", i: Instruction) -> _Form:
    parts = list(i.parts[1:])
    clamped = "satfinite" in parts
    if clamped:
        parts.remove("satfinite")
    if len(parts) != 9 or parts[:2] != ["sync", "aligned"] or parts[3:5] != ["row", "col"]:
        raise e.unknown(i, "only dense .row.col forms are")
    shape, (d, a, b, c) = parts[2], parts[5:]
    depth = int(shape.removeprefix("m16n8k")) if shape.startswith("m16n8k") else 0
    same = any({a, b} <= kinds for kinds in _CLASSES)
    sums = _ACCUMULATORS.get(a, ("f32",))
    if not same or depth not in _DEPTHS[a] or d not in sums or c != d:
        raise e.unknown(i)
    if clamped and d != "s32":
        raise e.unknown(i, ".satfinite")
    return _Form(d, a, b, c, depth, clamped)


@family("mma")
def multiply(e: "Emitter", i: Instruction) -> None:
    form = _form(e, i)
    operands = [_items(operand) for operand in i.operands]
    came = tuple(len(items) for items in operands)
    if came != form.registers():
        raise IllegalInstruction(f"{i.opcode} with {came} registers, accepted {form.registers()}")
    target, *sources = operands
    e.write(f"w.require_all({e.mask}, {i.opcode!r})")
    names = [e.temporary() for _ in target]
    groups = (f"({', '.join(e.lanes(item, 'u32') for item in items)},)" for items in sources)
    e.write(f"{', '.join(names)} = mma({e.constant(form, form)}, {', '.join(groups)})")
    for item, name in zip(target, names, strict=True):
        e.assign(item, name, "u32")


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


def _rows(registers: tuple[Lanes, ...], kind: str, halves: int) -> npt.NDArray[Any]:
    """A fragment as a matrix: A with two halves of eight rows, or the transpose of B with one half.

    Lane t holds row t / 4; with two halves, every second register holds row t / 4 + 8. The elements
    of a register are consecutive along K, and the four lanes of a row are consecutive too.
    """
    packed = np.stack(registers)
    if kind == "tf32":
        packed = packed & np.uint32(0xFFFFE000)  # the low 13 bits are ignored
    elements = packed.view(_DTYPES[kind]).reshape(len(registers) // halves, halves, 8, 4, -1)
    return elements.transpose(1, 2, 0, 3, 4).reshape(8 * halves, -1)


def _sums(registers: tuple[Lanes, ...], kind: str) -> npt.NDArray[Any]:
    """C as a matrix: lane t holds two columns from 2 (t % 4) on, in rows t / 4 and t / 4 + 8."""
    packed = np.stack(registers)
    if kind == "f16":
        return packed.view(np.float16).reshape(16, 8)
    return packed.view(_DTYPES[kind]).reshape(2, 2, 32).transpose(0, 2, 1).reshape(16, 8)


@runtime
def mma(
    form: _Form, a: tuple[Lanes, ...], b: tuple[Lanes, ...], c: tuple[Lanes, ...]
) -> list[Lanes]:
    """D = A B + C, rounded once: PTX leaves the order and precision of the sum open."""
    exact = np.int64 if form.d == "s32" else np.float64
    rows, columns = _rows(a, form.a, 2).astype(exact), _rows(b, form.b, 1).astype(exact)
    total = rows @ columns.T + _sums(c, form.c).astype(exact)
    if form.clamped:
        total = np.clip(total, -(2**31), 2**31 - 1)
    found = total.astype(_DTYPES[form.d])
    if form.d == "f16":
        return list(canonical_f16(found).view(np.uint32).reshape(2, 32))
    if form.d == "f32":
        found = canonical_f32(found)
    lanes = found.view(np.uint32).reshape(2, 32, 2).transpose(0, 2, 1)
    return list(np.ascontiguousarray(lanes).reshape(4, 32))
