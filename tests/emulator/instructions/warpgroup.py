"""wgmma.* (PTX ISA, Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions)."""

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.emulator.findings import IllegalInstruction, UninitialisedRead
from tests.emulator.instructions.registry import family, runtime
from tests.emulator.machine.warpgroup import Form, Multiply
from tests.emulator.ptx.flow import registers_of
from tests.emulator.ptx.syntax import Immediate, Instruction, Operand, Vector
from tests.emulator.tcgen05.formats import Element
from tests.emulator.wgmma.descriptor import decode_descriptor
from tests.emulator.wgmma.fragments import ROWS, depth

if TYPE_CHECKING:
    from tests.emulator.codegen import Emitter
    from tests.emulator.machine.warp import Warp

_ELEMENTS = {"f16": Element.F16, "bf16": Element.BF16, "e4m3": Element.E4M3}
_A_REGISTERS = 4


@family("wgmma")
def wgmma(e: "Emitter", i: Instruction) -> None:
    if not i.has("sync") or not i.has("aligned"):
        raise e.unknown(i, ".sync.aligned is missing")
    e.specials.add("wgmma_part = w.part")
    e.write(f"w.require_all({e.mask}, {i.opcode!r})")
    if i.parts[1] == "mma_async":
        _multiply(e, i)
        return
    e.write(f"wgmma_part.warpgroup.step(w, {i.line})")
    if i.parts[1] == "fence":
        e.write("wgmma_part.fence()")
    elif i.parts[1] == "commit_group":
        e.write("wgmma_part.commit()")
        e.write(f"if traced: w.note('warpgroup_commit', {i.line})")
    elif i.parts[1] == "wait_group":
        _wait(e, i)
    else:
        raise e.unknown(i)


def _form(e: "Emitter", i: Instruction, signs: tuple[int, int], turns: tuple[int, ...]) -> Form:
    shape, types = i.parts[4:5], i.parts[5:]
    known = len(types) == 3 and types[0] == "f32" and types[1] == types[2] in _ELEMENTS
    edges = shape[0].removeprefix(f"m{ROWS}n").split("k") if shape else []
    expected = str(depth(_ELEMENTS[types[1]])) if known else ""
    if not known or len(edges) != 2 or not edges[0].isdigit() or edges[1] != expected:
        raise e.unknown(i, f"only m{ROWS}nNk16.f32 of f16 or bf16, or k32 of e4m3, is")
    n = int(edges[0])
    if n % 8 or not 8 <= n <= 256:
        raise IllegalInstruction(f"{i.opcode}: N is {n}, accepted are multiples of 8 up to 256")
    for name, value in zip(("imm-scale-a", "imm-scale-b"), signs, strict=True):
        if value not in (1, -1):
            raise IllegalInstruction(f"{i.opcode}: {name} is {value}, accepted are 1 and -1")
    for turn in turns:
        if turn not in (0, 1):
            raise IllegalInstruction(f"{i.opcode}: imm-trans is {turn}, accepted are 0 and 1")
    a_turned, b_turned = (0, 0, *turns)[-2:]
    return Form(n, _ELEMENTS[types[1]], signs[0] != signs[1], bool(a_turned), bool(b_turned))


def _immediates(i: Instruction, operands: tuple[Operand, ...]) -> list[int]:
    values = []
    for operand in operands:
        if not isinstance(operand, Immediate):
            raise IllegalInstruction(f"{i.opcode}: {operand} where an immediate belongs")
        value = int(operand.value)
        values.append(value - (1 << 32) if value >= 1 << 31 else value)
    return values


def _multiply(e: "Emitter", i: Instruction) -> None:
    d, a, b, *rest = i.operands
    from_registers = isinstance(a, Vector)
    transposable = 0 if i.has("e4m3") else 1 if from_registers else 2
    if len(rest) != 3 + transposable or not isinstance(d, Vector):
        raise IllegalInstruction(
            f"{i.opcode} with {len(i.operands)} operands; accepted are D, A, B's descriptor, "
            "scale-d, imm-scale-a, imm-scale-b and, of 16-bit elements, imm-trans-a where A is a "
            "descriptor, imm-trans-b"
        )
    scale_a, scale_b, *turns = _immediates(i, tuple(rest[1:]))
    form = _form(e, i, (scale_a, scale_b), tuple(turns))
    accumulators = tuple(registers_of(d))
    if len(set(accumulators)) != form.n // 2:
        raise IllegalInstruction(
            f"{i.opcode} with {len(set(accumulators))} registers for D, accepted {form.n // 2}"
        )
    tuples = e.program.tuples
    accumulator, a_tuple = tuples.number[accumulators], "None"
    fragments, a_descriptor = "None", "None"
    if isinstance(a, Vector):
        if len(a.items) != _A_REGISTERS:
            raise IllegalInstruction(
                f"{i.opcode} with {len(a.items)} registers for A, accepted {_A_REGISTERS}"
            )
        a_tuple = str(tuples.number[tuple(registers_of(a))])
        fragments = f"({', '.join(e.lanes(item, 'b32') for item in a.items)})"
    else:
        a_descriptor = e.value(a, "u64")
    adds, held = e.temporary(), e.temporary()
    e.write(f"{adds} = wgmma_adds({e.value(rest[0], 'pred')}, {i.line}, w)")
    e.write(f"{held} = None")
    if isinstance(a, Vector):
        _check_written(e, i, tuple(registers_of(a)), "takes as A what")
    with e.indented(f"if {adds} and {accumulator} not in wgmma_part.flying:"):
        _check_written(e, i, accumulators, "adds to an accumulator that")
        e.write(f"{held} = ({', '.join(e.lanes(item, 'f32') for item in d.items)})")
    e.write(
        f"wgmma_issue(w, {e.constant(form, form)}, {accumulator}, {held}, {a_tuple}, {fragments}, "
        f"{a_descriptor}, {e.value(b, 'u64')}, {adds}, {i.line})"
    )
    detail = (form.n, depth(form.element), from_registers)
    e.write(f"if traced: w.note('warpgroup_mma', {i.line}, detail={detail!r})")
    e.write("if w.jitter: yield")


def _check_written(e: "Emitter", i: Instruction, names: tuple[str, ...], how: str) -> None:
    """Emit code that reports registers of a wgmma that no instruction has written yet."""
    never = sorted(e.program.tuples.unwritten.intersection(names))
    if never:
        e.write(f"wgmma_report_unwritten(w, {never[0]!r}, {how!r}, {i.line})")
        return
    # A register that no instruction has written yet is still its initial array.
    forms = [(name, e.storage(name)) for name in names if name in e.uniformity.merged]
    for code in sorted({form.code for _, form in forms}):
        zeros = e.constant(np.zeros(32, code), ("zeros", code))
        values = ", ".join(f"({name!r}, {form.name})" for name, form in forms if form.code == code)
        e.write(f"wgmma_check_written(w, {zeros}, ({values},), {how!r}, {i.line})")


def _wait(e: "Emitter", i: Instruction) -> None:
    (pending,) = _immediates(i, i.operands)
    if pending < 0:
        raise IllegalInstruction(f"{i.opcode} {pending}, accepted are 0 and more")
    until, landed = e.temporary(), e.temporary()
    e.write(f"if traced: w.note('warpgroup_wait', {i.line}, amount={pending})")
    e.write(f"{until} = wgmma_part.until({pending})")
    with e.indented(f"while not wgmma_part.done({until}):"):
        e.write(f"wgmma_sleep(w, {until})")
        e.write("yield")
    e.write(f"{landed} = wgmma_part.land({until})")
    tuples = e.program.tuples
    with e.indented(f"if {landed}:"):
        for number in sorted(tuples.accumulators):
            with e.indented(f"if {number} in {landed}:"):
                for place, name in enumerate(tuples.registers[number]):
                    form = e.storage(name)
                    value = e.present(f"{landed}[{number}][{place}]", "f4", f"u{form.bits}")
                    if form.code == "f4":
                        value = f"{landed}[{number}][{place}]"
                    e.write(f"{form.name} = {value}")
                for other in tuples.overlaps[number]:
                    e.write(f"wgmma_part.touched[{other}] = {i.line}")
        e.write("pass")


# Functions called by generated code


def _same(value: Any, what: str, line: int, w: "Warp") -> Any:
    """Scalar of an operand; reports an operand that differs between lanes of the warp."""
    if not isinstance(value, np.ndarray):
        return value
    if (value != value[0]).any():
        w.launch.report(
            IllegalInstruction(
                f"{what} of a wgmma differs between lanes of the warp", w.where(line)
            )
        )
    return value[0].item()


@runtime
def wgmma_adds(scale_d: Any, line: int, w: "Warp") -> bool:
    return bool(_same(scale_d, "scale-d", line, w))


@runtime
def wgmma_check_written(
    w: "Warp", zeros: np.ndarray, values: tuple[tuple[str, Any], ...], how: str, line: int
) -> None:
    for name, value in values:
        if value is zeros:
            wgmma_report_unwritten(w, name, how, line)


@runtime
def wgmma_report_unwritten(w: "Warp", name: str, how: str, line: int) -> None:
    w.launch.report(UninitialisedRead(f"a wgmma {how} nothing has written: {name}", w.where(line)))


@runtime
def wgmma_issue(
    w: "Warp",
    form: Form,
    accumulator: int,
    held: tuple[np.ndarray, ...] | None,
    a_tuple: int | None,
    fragments: tuple[np.ndarray, ...] | None,
    a_descriptor: Any,
    b_descriptor: Any,
    adds: bool,
    line: int,
) -> None:
    part = w.part
    part.require_whole(line)
    a_word = None if a_descriptor is None else _same(a_descriptor, "A's descriptor", line, w)
    b_word = _same(b_descriptor, "B's descriptor", line, w)
    group, own = part.warpgroup, w.index % 4
    group.step(w, line, (a_word, b_word, adds))
    part.take(accumulator, a_tuple, line)
    a = None if a_word is None else decode_descriptor(a_word)
    multiply = group.arrive(
        part.issued,
        Multiply(form, accumulator, adds, a, decode_descriptor(b_word), part.group, line),
    )
    if fragments is not None:
        multiply.fragments[own] = np.stack(fragments)
    if held is not None:
        multiply.sums[own] = np.stack(held)
    multiply.before[own] = w.actor.snapshot()
    group.issue(w, part.issued)
    part.issued += 1


@runtime
def wgmma_sleep(w: "Warp", until: int) -> None:
    part = w.part
    w.launch.counters.waits["wgmma"] += 1
    w.blocked(part.warpgroup.waiters, lambda: f"wgmma group {until} of {part.warpgroup.name}")


@runtime
def wgmma_touch(w: "Warp", touched: tuple[tuple[int, str, str], ...], line: int) -> None:
    """Report registers used by an ordinary instruction while a wgmma is in flight."""
    for number, verb, register in touched:
        w.part.touch(number, verb, register, line)
