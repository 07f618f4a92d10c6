"""Data model of PTX text: modules, kernels, instructions and their operands."""

from dataclasses import dataclass, field

TYPE_BITS = {
    **{f"{kind}{bits}": bits for kind in "bus" for bits in (8, 16, 32, 64, 128)},
    "f16": 16,
    "bf16": 16,
    "f32": 32,
    "f64": 64,
    "f16x2": 32,
    "bf16x2": 32,
    "pred": 1,
}


@dataclass(frozen=True, slots=True)
class Register:
    """A virtual register, such as ``%r1``, or a special register, such as ``%tid.x``."""

    name: str


@dataclass(frozen=True, slots=True)
class Not:
    """A negated predicate operand, ``!%p1``."""

    register: Register


@dataclass(frozen=True, slots=True)
class Immediate:
    """A literal; ``bits`` is 32 or 64 where ``value`` is the pattern of a float, else 0."""

    value: int
    bits: int = 0


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable, parameter or label, plus ``offset`` bytes."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Vector:
    """Vector operand: ``{a, b, ...}``."""

    items: tuple["Operand", ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two destinations ``d|p``."""

    first: "Operand"
    second: "Operand"


@dataclass(frozen=True, slots=True)
class Address:
    """``[start + offset]``, with the tensor coordinates (and offsets) of ``[start, {c0, c1}]``."""

    start: "Register | Symbol | Immediate"
    offset: int = 0
    coordinates: tuple["Operand", ...] = ()


@dataclass(frozen=True, slots=True)
class Sink:
    """``_``: a discarded result."""


Operand = Register | Not | Immediate | Symbol | Vector | Pair | Address | Sink


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction statement.

    Attributes:
        opcode: opcode with all modifiers, ``ld.shared.v4.b32``.
        parts: ``opcode`` split at its dots.
        operands: operands in textual order, destinations first.
        guard: predicate register of ``@%p``, or None.
        guard_negated: whether the guard is ``@!%p``.
        line: 1-based line in the PTX text.
        source: index into ``Kernel.sources`` of the ``.loc`` in force, -1 for none.
    """

    opcode: str
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: str | None
    guard_negated: bool
    line: int
    source: int = -1

    def has(self, modifier: str) -> bool:
        return modifier in self.parts


@dataclass(frozen=True, slots=True)
class Variable:
    """A ``.shared``, ``.local``, ``.const`` or ``.global`` variable, or a parameter.

    Attributes:
        nbytes: size in bytes; 0 for an ``extern`` array.
        align: alignment in bytes.
        initial: initial bytes if the text gives them, else None.
    """

    name: str
    space: str
    nbytes: int
    align: int
    initial: bytes | None = None


@dataclass
class Kernel:
    """One kernel: an ``.entry``.

    Attributes:
        parameters: parameters in order.
        registers: PTX type, without its dot, of each virtual register.
        labels: index into ``body`` of the instruction after each label.
        required_block: ``.reqntid``, or None.
        max_block: product of ``.maxntid``, or None.
        required_cluster: ``.reqnctapercluster``, or None.
        max_registers: ``.maxnreg``, or None.
        min_ctas: ``.minnctapersm``, 1 by default.
        variables: shared and local variables declared inside of the entry.
        sources: places in the kernel's source, as (file number, line).
        shared_arrays: arrays in dynamic shared memory by offset; empty if the PTX lists none.
    """

    name: str
    parameters: list[Variable] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    body: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    required_block: tuple[int, int, int] | None = None
    max_block: int | None = None
    required_cluster: tuple[int, int, int] | None = None
    max_registers: int | None = None
    min_ctas: int = 1
    variables: list[Variable] = field(default_factory=list)
    sources: list[tuple[int, int]] = field(default_factory=list)
    shared_arrays: list["SharedArray"] = field(default_factory=list)


@dataclass
class SharedArray:
    """An array in dynamic shared memory, as listed by a comment in the PTX.

    Attributes:
        offset: offset in dynamic shared memory.
        nbytes: size in bytes without the guard.
        guard: number of guard bytes behind the array.
        align: alignment of the first byte.
        source: ``file:line`` of the allocation, or empty.
    """

    offset: int
    nbytes: int
    guard: int
    align: int
    source: str = ""


@dataclass
class Module:
    """A PTX text.

    Attributes:
        target: target architecture, such as ``sm_100a``.
        kernels: kernels by entry name.
        variables: module-scope variables by name.
        lines: lines of the text, for reports.
        files: names by number; the text may give them last.
    """

    target: str
    kernels: dict[str, Kernel]
    variables: dict[str, Variable]
    lines: list[str]
    files: dict[int, str]
