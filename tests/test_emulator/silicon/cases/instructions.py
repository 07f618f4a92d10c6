"""Many lane-wise instructions in one module: each thread loads operands and stores results."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from string import Template

import numpy as np

from tests.test_emulator.silicon.case import Case, Tolerance
from tests.test_emulator.silicon.cases.banks import bank
from tests.test_emulator.silicon.ptx_text import module

_WIDTH = {"u16": 16, "f16": 16, "bf16": 16, "all": 16, "u64": 64, "f64": 64, "few64": 64}
_DTYPE = {16: "u2", 32: "u4", 64: "u8"}
_THREADS = 256


@dataclass(frozen=True)
class Op:
    """One instruction, or a short sequence, applied lane by lane.

    Attributes:
        opcode: opcode with all modifiers; for a sequence, a name.
        results: widths in bits of the destinations (16, 32, 64) or ``p`` for a predicate.
        operands: banks of the sources, from columns 0, 1, 2 in turn; ``p`` is a predicate, the low
            bit of a ``u32`` column; ``=x`` is the literal x; ``name:k`` is column k.
        text: PTX to emit instead of ``opcode results, operands;``: ``$d0``, ``$a0`` ...
        tolerance: tolerance of the results.
    """

    opcode: str
    results: str
    operands: str
    text: str = ""
    tolerance: Tolerance | None = None

    def sources(self) -> list[tuple[str, int]]:
        """Pairs (bank, column), one for each operand; literals have column -1."""
        pairs = []
        for position, operand in enumerate(self.operands.split()):
            name, _, column = operand.partition(":")
            literal = operand.startswith("=")
            pairs.append((operand[1:], -1) if literal else (name, int(column or position % 3)))
        return pairs


def _registers(prefix: str, width: int | str) -> str:
    return f".reg .pred {prefix};" if width == "p" else f".reg .b{width} {prefix};"


class _Writer:
    """Writer that collects the loads and instructions of one module."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.lines: list[str] = []
        self.loaded: dict[tuple[str, int], str] = {}
        self.inputs: dict[str, np.ndarray] = {}
        self.rows: dict[int, list[str]] = {16: [], 32: [], 64: []}
        self.tolerance: dict[int, dict[int, Tolerance]] = {16: {}, 32: {}, 64: {}}

    def source(self, name: str, column: int) -> str:
        if column < 0:
            return name
        if (name, column) not in self.loaded:
            register = f"%v_{name}_{column}"
            stored = "u32" if name == "p" else name
            width = _WIDTH.get(stored, 32)
            array = f"{stored}_{column}"
            self.inputs.setdefault(array, bank(stored, column, self.lanes))
            target = "%bit" if name == "p" else register
            if name == "p":
                self.lines.append(f".reg .pred {register};")
            else:
                self.lines.append(f".reg .b{width} {register};")
            self.lines.append(f"mad.wide.u32 %address, %index, {width // 8}, %{array};")
            self.lines.append(f"ld.global.b{width} {target}, [%address];")
            if name == "p":
                self.lines.append("and.b32 %bit, %bit, 1;")
                self.lines.append(f"setp.ne.u32 {register}, %bit, 0;")
            self.loaded[name, column] = register
        return self.loaded[name, column]

    def add(self, op: Op) -> None:
        sources = [self.source(*pair) for pair in op.sources()]
        kinds = [kind if kind == "p" else int(kind) for kind in op.results.split("|")]
        targets = [f"%d{i}" for i in range(len(kinds))]
        declared = " ".join(_registers(t, k) for t, k in zip(targets, kinds, strict=True))
        self.lines.append("{ " + declared)
        if op.text:
            places = {f"d{i}": t for i, t in enumerate(targets)}
            places |= {f"a{i}": s for i, s in enumerate(sources)}
            self.lines.append(Template(op.text).substitute(places))
        else:
            self.lines.append(f"{op.opcode} {', '.join(['|'.join(targets), *sources])};")
        for position, (target, kind) in enumerate(zip(targets, kinds, strict=True)):
            value, width = (target, kind) if isinstance(kind, int) else ("%bit", 32)
            if kind == "p":
                self.lines.append(f"selp.b32 %bit, 1, 0, {target};")
            row = len(self.rows[width])
            label = " ".join([op.opcode, *(s for s in op.operands.split() if s[0] == "=")])
            self.rows[width].append(f"{label} [{position}]" if len(targets) > 1 else label)
            if op.tolerance is not None:
                self.tolerance[width][row] = op.tolerance
            offset = row * self.lanes * width // 8
            self.lines.append(f"st.global.b{width} [%to{width}+{offset}], {value};")
        self.lines.append("}")


def group(name: str, ops: Iterable[Op], lanes: int, *, scratch: bool = False) -> Case:
    """Case that applies every op to the same ``lanes`` lanes.

    The outputs are ``out16``, ``out32`` and ``out64``, one row for each result of that width.

    Args:
        name: name of the case.
        ops: ops to apply.
        lanes: number of threads in the grid.
        scratch: whether every thread gets 16 bytes of shared memory at ``%shared`` and of global
            memory at ``%global``; only results that the op reads back from these bytes count.
    """
    writer = _Writer(lanes)
    ops = tuple(ops)
    for op in ops:
        writer.add(op)
    widths = [width for width, rows in writer.rows.items() if rows]
    outputs = {
        f"out{width}": np.zeros((len(writer.rows[width]), lanes), _DTYPE[width]) for width in widths
    }
    head = [
        ".reg .b32 %index, %bit; .reg .b64 %address, %to16, %to32, %to64;",
        "mov.u32 %index, %ctaid.x;",
        "mov.u32 %bit, %ntid.x;",
        "mul.lo.u32 %index, %index, %bit;",
        "mov.u32 %bit, %tid.x;",
        "add.u32 %index, %index, %bit;",
        *(f"mad.wide.u32 %to{width}, %index, {width // 8}, %out{width};" for width in widths),
    ]
    threads = min(_THREADS, lanes)
    declarations = ""
    if scratch:
        outputs["scratch"] = np.zeros((lanes, 16), "u1")
        declarations = f".shared .align 16 .b8 own[{16 * threads}];"
        head += [
            ".reg .b32 %shared; .reg .b64 %global;",
            "mov.u32 %bit, %tid.x; mov.u32 %shared, own; mad.lo.u32 %shared, %bit, 16, %shared;",
            "mad.wide.u32 %global, %index, 16, %scratch;",
        ]
    return Case(
        name,
        module([*writer.inputs, *outputs], [*head, *writer.lines], declarations=declarations),
        writer.inputs,
        outputs,
        grid=(lanes // threads, 1, 1),
        block=(threads, 1, 1),
        rows={f"out{width}": writer.rows[width] for width in widths},
        tolerance={f"out{width}": writer.tolerance[width] for width in widths},
        ops=ops,
    )


def groups(
    name: str, ops: Iterable[Op], lanes: int, size: int = 60, *, scratch: bool = False
) -> Iterator[Case]:
    """Cases made by :func:`group` from pieces of ``size`` ops."""
    every = list(ops)
    for start in range(0, len(every), size):
        piece = every[start : start + size]
        yield group(f"{name}_{start // size}", piece, lanes, scratch=scratch)
