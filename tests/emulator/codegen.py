"""Translation of PTX to one Python generator function per kernel and block shape.

Each basic block becomes a branch of a dispatch tree; registers are local variables: uniform
registers are plain integers, the others 32-lane arrays that are never modified in place. The
generator yields where the warp waits or may be preempted. Where lanes diverge, ``m`` masks the
running lanes and ``stack`` holds the other lanes with the block at which the lanes reconverge (the
immediate post-dominator).
"""

import linecache
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tests.emulator.findings import (
    EmulatorError,
    IllegalInstruction,
    LaunchError,
    UnknownInstruction,
    Where,
)
from tests.emulator.memory.linear import LinearMemory
from tests.emulator.ptx.flow import analyse, read, written
from tests.emulator.ptx.lint import unwaited_loads
from tests.emulator.ptx.register_tuples import register_tuples
from tests.emulator.ptx.shared_arrays import (
    end_of,
    granules_between,
    guard_bytes,
    guard_of,
    laid_out,
)
from tests.emulator.ptx.syntax import (
    Address,
    Immediate,
    Instruction,
    Kernel,
    Module,
    Not,
    Operand,
    Register,
    SharedArray,
    Sink,
    Symbol,
    Variable,
)
from tests.emulator.ptx.targets import missing_target
from tests.emulator.ptx.uniformity import analyse_uniformity
from tests.emulator.storage import Storage, assign_storage, code_of
from tests.emulator.windows import LOCAL_WINDOW, PARAMETER_WINDOW

if TYPE_CHECKING:
    from tests.emulator.instructions.registry import Emit
    from tests.emulator.machine.warp import Program as WarpProgram
    from tests.emulator.machine.warp import Warp

Dimensions = tuple[int, int, int]


class Program:
    """A kernel ready to run with one block shape.

    Attributes:
        kernel: parsed kernel.
        granule: bytes per shadow entry: 1 if a store or atomic writes 1 or 2 bytes, else 4.
        block_count: number of basic blocks.
        block_families: number of instructions of each family, per block.
        lints: mistakes found statically.
        tuples: registers that wgmma uses asynchronously.
        shared_arrays: layout of shared memory by offset: static symbols, then dynamic arrays.
        guard_bytes: bytes that the guards behind the arrays add to shared memory.
        text: the generated Python.
    """

    def __init__(self, module: Module, kernel: Kernel, block: Dimensions) -> None:
        self.module = module
        self.kernel = kernel
        self.block = block
        self.flow = analyse(kernel)
        self.whole_warps = block[0] * block[1] * block[2] % 32 == 0
        self.uniformity = analyse_uniformity(self.flow, block[0], partial=not self.whole_warps)
        self.storage = assign_storage(kernel, self.uniformity)
        self.granule = 1 if any(_is_narrow(i) for i in kernel.body) else 4
        self.block_count = len(self.flow.blocks)
        self.block_families = [
            Counter(family_of(i) for i in kernel.body[b.first : b.last]) for b in self.flow.blocks
        ]
        self.lints = unwaited_loads(self.flow)
        self.tuples = register_tuples(kernel)
        self._places: dict[int, Where] = {}
        self._lay_out_variables()
        emitter = Emitter(self)
        self.text = emitter.generate()
        self._ptx_lines = emitter.ptx_lines
        filename = f"<{kernel.name}>"
        linecache.cache[filename] = (len(self.text), None, self.text.splitlines(True), filename)
        namespace: dict[str, Any] = dict(emitter.namespace)
        exec(compile(self.text, filename, "exec"), namespace)
        self._start = namespace["start"]
        self.code = self._start.__code__

    def start(self, warp: "Warp") -> "WarpProgram":
        program: WarpProgram = self._start(warp)
        return program

    def line_of(self, python_line: int) -> int:
        """Number of the PTX line from which a line of the generated code comes."""
        return self._ptx_lines[min(python_line, len(self._ptx_lines)) - 1]

    def register_of(self, variable: str) -> str | None:
        """PTX register that a variable of the generated code holds; None for other variables."""
        if variable == "carry":
            return "CC"
        for register, form in self.storage.items():
            if form.name == variable:
                return register
        return None

    def where(self, line: int, cta: Dimensions | None = None, warp: int | None = None) -> Where:
        place = self._places.get(line)
        if place is None:
            place = self._places[line] = self._place(line)
        return Where(place.kernel, line, place.text, place.source, cta, warp)

    def _place(self, line: int) -> Where:
        lines = self.module.lines
        source = ""
        for instruction in self.kernel.body:
            if instruction.line >= line:
                if instruction.source >= 0:
                    number, at = self.kernel.sources[instruction.source]
                    source = f"{self.module.files.get(number, number)}:{at}"
                break
        text = lines[line - 1] if 0 < line <= len(lines) else ""
        return Where(self.kernel.name, line, text, source)

    # Memory layout

    def _lay_out_variables(self) -> None:
        self.local_offsets: dict[str, int] = {}
        self._dynamic: Variable | None = None
        local = 0
        module_shared = [v for v in self.module.variables.values() if v.space == "shared"]
        statics: list[SharedArray] = []
        for variable in [*module_shared, *self.kernel.variables]:
            if variable.space == "shared" and variable.nbytes:
                n, align = variable.nbytes, variable.align
                statics.append(SharedArray(0, n, guard_of(n), align, variable.name))
            elif variable.space == "local":
                local = -(-local // variable.align) * variable.align
                self.local_offsets[variable.name] = local
                local += variable.nbytes
        statics = laid_out(statics)
        self.shared_offsets = {each.source: each.offset for each in statics}
        self._static_bytes = shared = end_of(statics)
        self.local_bytes = local
        for variable in module_shared:
            if not variable.nbytes:
                align = max(variable.align, 16)
                self.shared_offsets[variable.name] = -(-shared // align) * align
                self._dynamic = variable
        dynamic = self.kernel.shared_arrays
        start = self.shared_offsets[self._dynamic.name] if self._dynamic else 0
        moved = [replace(each, offset=start + each.offset) for each in dynamic]
        self.shared_arrays = [*statics, *moved]
        self.guard_bytes = guard_bytes(statics) + guard_bytes(dynamic)
        offset = 0
        self.parameter_offsets: dict[str, int] = {}
        for variable in self.kernel.parameters:
            offset = -(-offset // variable.align) * variable.align
            self.parameter_offsets[variable.name] = offset
            offset += variable.nbytes
        self.parameter_bytes = offset

    @cached_property
    def guards(self) -> npt.NDArray[np.intp]:
        """Indices of the granules of shared memory that lie between arrays."""
        return granules_between(self.shared_arrays, self.granule)

    def static_shared(self, dynamic: int) -> int:
        """Bytes of shared memory per CTA, for ``dynamic`` bytes requested at launch."""
        if self._dynamic is None:
            return self._static_bytes + dynamic
        return self.shared_offsets[self._dynamic.name] + dynamic

    def lay_out_parameters(self, values: list[bytes]) -> bytes:
        data = bytearray(self.parameter_bytes)
        for variable, value in zip(self.kernel.parameters, values, strict=True):
            offset = self.parameter_offsets[variable.name]
            data[offset : offset + len(value)] = value
        return bytes(data)

    def new_local_memory(self, warp: "Warp") -> list[LinearMemory]:
        """One local memory per lane, none if the kernel declares no local variables."""
        if not self.local_bytes:
            return []
        return [
            LinearMemory(
                f"local memory of lane {lane}",
                LOCAL_WINDOW,
                np.zeros(self.local_bytes, np.uint8),
                self.granule,
            )
            for lane in range(32)
        ]


def family_of(instruction: Instruction) -> str:
    """Family under which an instruction is counted: ``ld.shared``, ``tcgen05.mma``, ``fma`` ..."""
    parts = instruction.parts
    if parts[0] in ("tcgen05", "mbarrier", "fence", "barrier", "clusterlaunchcontrol", "wgmma"):
        return ".".join(parts[:2])
    if parts[0] == "cp":
        return ".".join(p for p in parts[:5] if p in ("cp", "async", "bulk", "tensor", "reduce"))
    if parts[0] in ("ld", "st", "atom", "red"):
        space = next((p for p in parts[1:] if p.split("::")[0] in _SPACES), "generic")
        return f"{parts[0]}.{space.split('::')[0]}"
    return parts[0]


_SPACES = frozenset(["global", "shared", "local", "param", "const"])


_NARROW_BYTES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2}
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}


def _is_narrow(instruction: Instruction) -> bool:
    """Whether a store or atomic writes 1 or 2 bytes; ``st.v2.b8`` does."""
    parts = instruction.parts
    if parts[0] not in ("st", "atom", "red") or parts[-1] not in _NARROW_BYTES:
        return False
    return _NARROW_BYTES[parts[-1]] * max(_VECTORS.get(part, 1) for part in parts) < 4


class Emitter:
    """Writer of the generated function; the instruction families append lines through it."""

    def __init__(self, program: Program) -> None:
        from tests.emulator.instructions import FAMILIES, RUNTIME

        self.program = program
        self.kernel = program.kernel
        self.flow = program.flow
        self.uniformity = program.uniformity
        self._families = FAMILIES
        self.namespace: dict[str, object] = dict(RUNTIME)
        self.namespace["np"] = np
        self.ptx_lines: list[int] = []
        self._lines: list[str] = []
        self._indent = 0
        self._line = 0
        self._names = 0
        self._constants: dict[object, str] = {}
        self.block = -1  # number of the current block
        self.masked = False  # whether the current block runs under ``m``
        self.guard = ""  # variable with the lanes of the current instruction, if fewer than ``m``
        self.specials: set[str] = set()

    # Writing

    def write(self, line: str) -> None:
        self._lines.append("    " * self._indent + line)
        self.ptx_lines.append(self._line)

    @contextmanager
    def indented(self, line: str) -> Iterator[None]:
        self.write(line)
        self._indent += 1
        yield
        self._indent -= 1

    def temporary(self) -> str:
        self._names += 1
        return f"t{self._names}"

    def constant(self, value: object, key: object) -> str:
        """Name of ``value`` in the generated code's globals, to which ``value`` is added once."""
        name = self._constants.get(key)
        if name is None:
            name = self._constants[key] = f"K{len(self._constants)}"
            self.namespace[name] = value
        return name

    def unknown(self, instruction: Instruction, why: str = "") -> UnknownInstruction:
        return UnknownInstruction(
            f"{instruction.opcode} is not modelled" + (f": {why}" if why else ""),
            self.program.where(instruction.line),
        )

    # Operands

    @property
    def mask(self) -> str:
        """Expression of the mask of lanes that run the current instruction; "None" for all."""
        if self.guard:
            return self.guard
        return "m" if self.masked else "None"

    def storage(self, name: str) -> Storage:
        return self.program.storage[name]

    def is_uniform(self, operand: Operand) -> bool:
        if isinstance(operand, Register):
            if operand.name in self.program.storage:
                return self.storage(operand.name).uniform
            return self._special(operand.name)[1] == ""
        if isinstance(operand, Not):
            return self.is_uniform(operand.register)
        if isinstance(operand, Address):
            return self.is_uniform(operand.start)
        return True

    def _special(self, name: str) -> tuple[str, str]:
        from tests.emulator.instructions.special import special

        return special(self, name)

    def value(self, operand: Operand, kind: str) -> str:
        """Expression of ``operand`` as PTX type ``kind``: an array, or a Python scalar if uniform.

        A uniform integer is unsigned for every kind except ``s..``; a uniform float becomes a numpy
        scalar.
        """
        if isinstance(operand, Not):
            inner = self.value(operand.register, "pred")
            return f"(not {inner})" if self.is_uniform(operand.register) else f"~{inner}"
        if isinstance(operand, Immediate):
            return self._literal(operand, kind)
        if isinstance(operand, Symbol):
            return str(self.address_of(operand))
        if not isinstance(operand, Register):
            raise UnknownInstruction(f"operand {operand} where a register or literal belongs")
        if operand.name in self.program.storage:
            form = self.storage(operand.name)
            name, code, bits = form.name, form.code, form.bits
        else:
            name, code = self._special(operand.name)
            bits = 32
        if not code:
            return self._present_scalar(name, bits, kind)
        return self.present(name, code, kind)

    def _literal(self, operand: Immediate, kind: str) -> str:
        value, bits = operand.value, operand.bits
        if kind == "pred":
            return str(bool(value))
        code = code_of(kind)
        width = int(code[1:]) * 8
        if code[0] == "f":
            if not bits:
                raise UnknownInstruction(f"integer literal {value} as .{kind}")
            source = np.array([value], f"u{bits // 8}").view(f"f{bits // 8}")
            return self.constant(source.astype(code)[0], ("float", value, bits, code))
        if bits and bits != width and kind not in ("b64", "u64"):
            source = np.array([value], f"u{bits // 8}").view(f"f{bits // 8}")
            value = int(source.astype("f4").view("u4")[0])
        value &= (1 << width) - 1
        if code[0] == "i" and value >> (width - 1):
            value -= 1 << width
        return f"({value})" if value < 0 else str(value)

    def _present_scalar(self, name: str, bits: int, kind: str) -> str:
        if kind in ("pred", "b128"):
            return name
        code = code_of(kind)
        width = int(code[1:]) * 8
        if width < bits:
            name = f"({name} & {(1 << width) - 1:#x})"
        if code[0] == "i":
            return f"(({name} ^ {1 << (width - 1):#x}) - {1 << (width - 1):#x})"
        if code[0] == "f":
            return f"scalar_{code}({name})"
        return name

    def present(self, expression: str, code: str, kind: str) -> str:
        """A 32-lane expression of numpy type ``code``, presented as PTX type ``kind``."""
        wanted = code_of(kind)
        if wanted == code:
            return expression
        if wanted[1:] == code[1:]:
            return f"{expression}.view({self.dtype(wanted)})"
        if code[0] == "f":
            expression = f"{expression}.view({self.dtype('u' + code[1:])})"
        narrowed = f"{expression}.astype({self.dtype('u' + wanted[1:])})"
        return narrowed if wanted[0] == "u" else f"{narrowed}.view({self.dtype(wanted)})"

    def dtype(self, code: str) -> str:
        return self.constant(np.dtype(code), ("dtype", code))

    def lanes(self, operand: Operand, kind: str) -> str:
        """Expression of ``operand`` as PTX type ``kind``, always a 32-lane array."""
        value = self.value(operand, kind)
        return self.full(value, kind) if self.is_uniform(operand) else value

    def full(self, value: str, kind: str) -> str:
        """Expression of an array whose 32 lanes all hold one unsigned scalar."""
        if kind == "b128":
            return f"full_b128({value})"
        return f"np.full(32, {value}, {self.dtype(code_of(kind))})"

    def address_of(self, symbol: Symbol) -> str:
        """Expression of the address of a variable or parameter in its state space."""
        program, name = self.program, symbol.name
        if name in program.shared_offsets:
            return f"(shared_base + {program.shared_offsets[name] + symbol.offset})"
        if name in program.parameter_offsets:
            return str(PARAMETER_WINDOW + program.parameter_offsets[name] + symbol.offset)
        if name in program.local_offsets:
            return str(LOCAL_WINDOW + program.local_offsets[name] + symbol.offset)
        if name in program.module.variables:
            return f"(w.gpu.address_of({name!r}, w.launch.program.module) + {symbol.offset})"
        raise LaunchError(f"symbol {name} is not declared")

    def address(self, operand: Operand, bits: int = 64) -> str:
        """Expression of an address operand: an int, or an array if lanes differ."""
        if not isinstance(operand, Address):
            raise UnknownInstruction(f"operand {operand} where an address belongs")
        if isinstance(operand.start, Symbol):
            return self.address_of(
                Symbol(operand.start.name, operand.start.offset + operand.offset)
            )
        if isinstance(operand.start, Immediate):
            return str(operand.start.value + operand.offset)
        width = self.program.storage[operand.start.name].bits
        value = self.value(operand.start, f"u{width}")
        if not operand.offset:
            return value
        if self.is_uniform(operand.start):
            return f"({value} + {operand.offset} & {(1 << width) - 1:#x})"
        offset = np.array(operand.offset).astype(f"u{width // 8}")[()]
        return f"({value} + {self.constant(offset, ('offset', operand.offset, width))})"

    # Results

    def assign(self, operand: Operand, expression: str, kind: str, uniform: bool = False) -> None:
        """Emit the write of a result of PTX type ``kind``: 32 lanes, or a scalar if ``uniform``."""
        if isinstance(operand, Sink):
            self.write(expression)
            return
        if not isinstance(operand, Register) or operand.name not in self.program.storage:
            raise UnknownInstruction(f"result operand {operand}")
        form = self.storage(operand.name)
        if form.uniform:
            assert uniform, f"{operand.name} is uniform, its value is not"
            self.write(f"{form.name} = {expression}")
            return
        if uniform:
            own = {1: "pred", 128: "b128"}.get(form.bits, f"u{form.bits}")
            expression, kind = self.full(expression, own), own
        code = code_of(kind)
        if code != form.code:
            if code[1:] == form.code[1:]:
                expression = f"({expression}).view({self.dtype(form.code)})"
            else:
                # A result narrower than its register is sign-extended if signed, else
                # zero-extended.
                if code[0] == "f":
                    expression, code = f"({expression}).view({self.dtype('u' + code[1:])})", "u"
                wide = ("i" if code[0] == "i" else "u") + form.code[1:]
                expression = f"({expression}).astype({self.dtype(wide)})"
                if wide != form.code:
                    expression += f".view({self.dtype(form.code)})"
        lanes = self.mask
        if lanes != "None" and operand.name in self.uniformity.merged:
            expression = f"np.where({lanes}, {expression}, {form.name})"
        self.write(f"{form.name} = {expression}")

    # The function

    def generate(self) -> str:
        body_lines = self._body()
        head = ["def start(w):"]
        setup = [
            "n = w.blocks_run",
            "shared_base = w.cta.shared.base",
            "stack = []",
            "m = w.live",
            "traced = w.trace is not None",
            "trace = w.trace.append if traced else None",
            *sorted(self.specials),
            "if 0: yield  # a kernel that never waits is a generator all the same",
        ]
        for name in sorted(self.uniformity.merged):
            form = self.program.storage.get(name)
            if form is not None and not form.uniform:
                zeros = self.constant(np.zeros(32, form.code), ("zeros", form.code))
                setup.append(f"{form.name} = {zeros}")
        for form in self._undefined():
            poison = 0xBAD0BAD0BAD0BAD0BAD0BAD0BAD0BAD0 & (1 << form.bits) - 1
            setup.append(f"{form.name} = {bool(poison) if form.bits == 1 else poison}")
        lines = head + ["    " + line for line in setup] + body_lines
        self.ptx_lines = [self.kernel.body[0].line if self.kernel.body else 0] * (
            1 + len(setup)
        ) + self.ptx_lines
        return "\n".join(lines) + "\n"

    def _undefined(self) -> list[Storage]:
        """Storage of registers read but never written, by which compilers pass unused values."""
        defined = {name for i in self.kernel.body for name in written(i)}
        used = {name for i in self.kernel.body for name in read(i)}
        return [self.storage(n) for n in sorted(used - defined) if n in self.program.storage]

    def _body(self) -> list[str]:
        self._indent = 1
        if not self.flow.blocks:
            self.write("return")
            self.write("yield")
            return self._lines
        self.write("pc = 0")
        with self.indented("while True:"):
            self._tree(0, len(self.flow.blocks))
        return self._lines

    def _tree(self, first: int, last: int) -> None:
        if last - first == 1:
            self._block(first)
            return
        middle = (first + last) // 2
        with self.indented(f"if pc < {middle}:"):
            self._tree(first, middle)
        with self.indented("else:"):
            self._tree(middle, last)

    def _block(self, number: int) -> None:
        block = self.flow.blocks[number]
        self.block = number
        self.masked = number in self.uniformity.masked
        body = self.kernel.body[block.first : block.last]
        self._line = body[0].line if body else self._line
        if number in self.uniformity.meeting:
            with self.indented("if stack:"):
                self.write(f"pc, m = meet(stack, w, {number}, m)")
                self.write(f"if pc != {number}: continue")
        self.write(f"n[{number}] += 1")
        self.write(f"if traced: trace({number})")
        for instruction in body:
            self._line = instruction.line
            try:
                self.instruction(instruction)
            except EmulatorError as error:
                raise error.at(self.program.where(instruction.line)) from None
        ender = body[-1].parts[0] if body else ""
        guarded = bool(body) and body[-1].guard is not None
        if ender not in ("bra", "brx") and (guarded or ender not in ("ret", "exit", "trap")):
            following = number + 1
            self.write(f"pc = {following}" if following < len(self.flow.blocks) else "return")

    def instruction(self, instruction: Instruction) -> None:
        family = self._families.get(instruction.parts[0])
        if family is None:
            raise self.unknown(instruction)
        needed = missing_target(self.program.module.target, instruction)
        if needed:
            raise IllegalInstruction(
                f"{instruction.opcode} needs .target {needed}, the module's is "
                f"{self.program.module.target}"
            )
        if instruction.parts[0] in ("bra", "brx", "ret", "exit"):
            family(self, instruction)
            return
        if instruction.guard is None:
            self._run(family, instruction)
            return
        form = self.storage(instruction.guard)
        if form.uniform:
            sense = "not " if instruction.guard_negated else ""
            with self.indented(f"if {sense}{form.name}:"):
                self._run(family, instruction)
            return
        lanes = self.temporary()
        sense = "~" if instruction.guard_negated else ""
        also = " & m" if self.masked else ("" if self.program.whole_warps else " & w.live")
        self.write(f"{lanes} = {sense}{form.name}{also}")
        self.guard = lanes
        with self.indented(f"if {lanes}.any():"):
            self._run(family, instruction)
        self.guard = ""

    def _run(self, family: "Emit", instruction: Instruction) -> None:
        """Emit an instruction, preceded by the checks of registers that wgmma may be using."""
        if self.program.tuples.of and instruction.parts[0] != "wgmma":
            touched = tuple(self.program.tuples.touched(instruction))
            if touched:
                self.specials.add("wgmma_part = w.part")
                name = self.constant(touched, ("touched", touched))
                self.write(f"if wgmma_part.flying: wgmma_touch(w, {name}, {instruction.line})")
            for number, _, _ in touched:
                self.write(f"wgmma_part.touched[{number}] = {instruction.line}")
        family(self, instruction)

    def block_number(self, label: str) -> int:
        start = self.kernel.labels[label]
        for number, block in enumerate(self.flow.blocks):
            if block.first == start:
                return number
        return -1  # a label at the very end
