"""Lane-wise instructions: the semantics of :mod:`tests.emulator.isa`, emitted as generated code."""

from typing import TYPE_CHECKING

import numpy as np

from tests.emulator.instructions.registry import family, runtime
from tests.emulator.isa.lanewise import FAMILIES, Lanewise, lookup
from tests.emulator.isa.semantics import compiled
from tests.emulator.ptx.syntax import (
    TYPE_BITS,
    Immediate,
    Instruction,
    Operand,
    Pair,
    Register,
    Sink,
    Symbol,
    Vector,
)
from tests.emulator.storage import code_of
from tests.emulator.windows import (
    LOCAL_WINDOW,
    PARAMETER_WINDOW,
    SHARED_WINDOW,
    WINDOW_SHIFT,
)

if TYPE_CHECKING:
    from tests.emulator.codegen import Emitter


@runtime
def scalar_f4(bits: int) -> np.floating:
    return np.uint32(bits).view(np.float32)


@runtime
def scalar_f8(bits: int) -> np.floating:
    return np.uint64(bits).view(np.float64)


@runtime
def scalar_f2(bits: int) -> np.floating:
    return np.uint16(bits).view(np.float16)


@runtime
def full_b128(value: int) -> np.ndarray:
    return np.frombuffer(value.to_bytes(16, "little"), "V16").repeat(32)


def _call(e: "Emitter", semantics: Lanewise, opcode: str, arguments: list[str]) -> str:
    if isinstance(semantics.vector, str):
        return semantics.vector.format(*arguments)
    function = e.constant(semantics.vector, ("lanewise", opcode, len(arguments)))
    return f"{function}({', '.join(arguments)})"


def _scalar_call(e: "Emitter", semantics: Lanewise, opcode: str) -> str:
    """Name of a function of Python ints that evaluates the vector form.

    The function broadcasts each int to an array of 32 lanes and returns the first lane's result.
    """
    codes = [np.dtype(code_of(kind)) for kind in semantics.sources]
    body = semantics.vector
    vector = compiled(body, len(codes)) if isinstance(body, str) else body

    def single(*values: int) -> "int | bool | tuple[int, ...]":
        arrays = []
        for value, code in zip(values, codes, strict=True):
            if code.kind == "b":
                arrays.append(np.full(32, value, bool))
            else:
                arrays.append(np.full(32, value, f"u{code.itemsize}").view(code))
        found = vector(*arrays)
        many = found if isinstance(found, tuple) else (found,)
        plain = [
            bool(item[0])
            if item.dtype.kind == "b"
            else int(item.view(f"u{item.dtype.itemsize}")[0])
            for item in many
        ]
        return tuple(plain) if len(plain) > 1 else plain[0]

    return e.constant(single, ("single", opcode, len(codes)))


@family(*sorted(FAMILIES - {"mov"}))
def lanewise(e: "Emitter", i: Instruction) -> None:
    first = i.operands[0]
    targets: list[Operand] = [first.first, first.second] if isinstance(first, Pair) else [first]
    sources = [
        item
        for operand in i.operands[1:]
        for item in (operand.items if isinstance(operand, Vector) else (operand,))
    ]
    semantics = lookup(i.opcode, len(sources), len(targets))
    if semantics is None:
        raise e.unknown(i)
    if semantics.carry_in or semantics.carry_out:
        _with_carry(e, i, semantics, targets[0], sources)
        return
    if isinstance(targets[0], Vector):
        targets = list(targets[0].items)
    kinds = semantics.sources
    uniform = all(
        isinstance(t, Sink) or (isinstance(t, Register) and e.storage(t.name).uniform)
        for t in targets
    )
    if uniform:
        arguments = [_unsigned(e, s, kind) for s, kind in zip(sources, kinds, strict=True)]
        if semantics.scalar is not None:
            value = semantics.scalar.format(*arguments)
        else:
            value = f"{_scalar_call(e, semantics, i.opcode)}({', '.join(arguments)})"
    else:
        arguments = [e.value(s, kind) for s, kind in zip(sources, kinds, strict=True)]
        if all(e.is_uniform(s) for s in sources):
            arguments[0] = e.lanes(sources[0], kinds[0])
        value = _call(e, semantics, i.opcode, arguments)
    _give(e, targets, semantics.results, value, uniform)


def _unsigned(e: "Emitter", operand: Operand, kind: str) -> str:
    """Expression of a uniform operand as an unsigned bit pattern."""
    if kind == "pred":
        return e.value(operand, kind)
    value = e.value(operand, f"u{TYPE_BITS[kind]}")
    # %tid.x >> 5: the source differs between lanes, the result does not.
    return value if e.is_uniform(operand) else f"int({value}[0])"


def _give(
    e: "Emitter", targets: list[Operand], kinds: tuple[str, ...], value: str, uniform: bool
) -> None:
    if len(kinds) == 1:
        e.assign(targets[0], value, kinds[0], uniform)
        return
    names = [e.temporary() for _ in kinds]
    e.write(f"{', '.join(names)} = {value}")
    for target, name, kind in zip(targets, names, kinds, strict=True):
        if not isinstance(target, Sink):
            e.assign(target, name, kind, uniform)


def _with_carry(
    e: "Emitter",
    i: Instruction,
    semantics: Lanewise,
    target: Operand,
    sources: list[Operand],
) -> None:
    """Emit add.cc or another carry instruction; variable ``carry`` holds the flag CC.CF."""
    own = semantics.sources[: len(sources)]
    arguments = [e.lanes(s, kind) for s, kind in zip(sources, own, strict=True)]
    if semantics.carry_in:
        arguments.append("carry")
    value = _call(e, semantics, i.opcode, arguments)
    if semantics.carry_out:
        name = e.temporary()
        e.write(f"{name}, carry = {value}")
        value = name
    kind = semantics.results[0]
    if isinstance(target, Register) and e.storage(target.name).uniform:
        bits = TYPE_BITS[kind]
        whole = f"int(({value}).view({e.dtype(f'u{bits // 8}')})[0])"
        e.assign(target, whole, f"u{bits}", uniform=True)
    else:
        e.assign(target, value, kind)


@family("mov")
def move(e: "Emitter", i: Instruction) -> None:
    kind = i.parts[1]
    target, source = i.operands
    if isinstance(source, Vector):
        _pack(e, kind, target, source)
    elif isinstance(target, Vector):
        _unpack(e, kind, target, source)
    else:
        _plain_move(e, target, source, kind)


def _plain_move(e: "Emitter", target: Operand, source: Operand, kind: str) -> None:
    if not isinstance(target, Register):
        raise e.unknown(Instruction("mov", ("mov",), (), None, False, 0))
    form = e.storage(target.name)
    if e.is_uniform(source) or isinstance(source, Immediate | Symbol):
        plain = "pred" if kind == "pred" else f"u{TYPE_BITS[kind]}"
        if isinstance(source, Immediate) and not form.uniform and kind != "pred":
            bits = TYPE_BITS[kind]
            pattern = source.value
            if source.bits and source.bits != bits:
                pattern = int(e.value(source, plain))
            array = np.full(32, pattern & (1 << bits) - 1, f"u{bits // 8}")
            if form.bits == bits:
                name = e.constant(array.view(form.code), ("full", pattern, form.code))
                e.assign(target, name, _kind_of(form.code))
            else:
                e.assign(target, e.constant(array, ("full", pattern, bits)), plain)
            return
        value = e.value(source, plain)
        if plain == "pred" and isinstance(source, Register) and not e.is_uniform(source):
            e.assign(target, value, "pred")
        else:
            e.assign(target, value, plain, uniform=True)
        return
    assert isinstance(source, Register)
    if source.name in e.program.storage:
        own = e.storage(source.name)
        e.assign(target, own.name, _kind_of(own.code))
    else:
        e.assign(target, e.value(source, "u32"), "u32")


def _kind_of(code: str) -> str:
    if code == "?":
        return "pred"
    return (
        {"f": "f", "u": "u", "i": "s"}[code[0]] + str(int(code[1:]) * 8)
        if code != "V16"
        else "b128"
    )


def _pack(e: "Emitter", kind: str, target: Operand, source: Vector) -> None:
    """Emit mov.b64 d, {a, b} or similar: the first item is the least significant."""
    items = source.items
    bits = TYPE_BITS[kind] // len(items)
    if isinstance(target, Register) and e.storage(target.name).uniform:
        terms = [
            e.value(item, f"u{bits}") + (f" << {bits * n}" if n else "")
            for n, item in enumerate(items)
        ]
        e.assign(target, " | ".join(terms), f"u{TYPE_BITS[kind]}", uniform=True)
        return
    name = e.temporary()
    e.write(f"{name} = np.empty((32, {len(items)}), {e.dtype(f'u{bits // 8}')})")
    for n, item in enumerate(items):
        if not isinstance(item, Sink):
            e.write(f"{name}[:, {n}] = {e.value(item, f'u{bits}')}")
    whole = "V16" if kind == "b128" else f"u{TYPE_BITS[kind] // 8}"
    e.assign(
        target,
        f"{name}.view({e.dtype(whole)})[:, 0]",
        kind if kind == "b128" else f"u{TYPE_BITS[kind]}",
    )


def _unpack(e: "Emitter", kind: str, target: Vector, source: Operand) -> None:
    items = target.items
    bits = TYPE_BITS[kind] // len(items)
    if e.is_uniform(source):
        value = e.value(source, f"u{TYPE_BITS[kind]}" if kind != "b128" else "b128")
        name = e.temporary()
        e.write(f"{name} = {value}")
        mask = (1 << bits) - 1
        for n, item in enumerate(items):
            if not isinstance(item, Sink):
                e.assign(item, f"({name} >> {bits * n}) & {mask:#x}", f"u{bits}", uniform=True)
        return
    name = e.temporary()
    present = e.value(source, "b128" if kind == "b128" else f"u{TYPE_BITS[kind]}")
    # Rows of a copy: the following code needs the lanes of a row side by side.
    e.write(
        f"{name} = np.ascontiguousarray(np.ascontiguousarray({present})"
        f".view({e.dtype(f'u{bits // 8}')}).reshape(32, {len(items)}).T)"
    )
    for n, item in enumerate(items):
        if not isinstance(item, Sink):
            e.assign(item, f"{name}[{n}]", f"u{bits}")


@family("cvta")
def convert_address(e: "Emitter", i: Instruction) -> None:
    """Convert addresses to or from generic addressing; see ``windows.py``."""
    target, source = i.operands
    bits = TYPE_BITS[i.parts[-1]]
    value = e.address_of(source) if isinstance(source, Symbol) else e.value(source, f"u{bits}")
    space = next(p for p in i.parts[1:] if p != "to").split("::")[0]
    if space == "shared":
        if i.has("to"):
            value = (
                f"({value} & 0xffffffff)"
                if e.is_uniform(source)
                else f"{value} & np.uint64(0xffffffff)"
            )
        else:
            value = (
                f"({value} | {SHARED_WINDOW})"
                if e.is_uniform(source)
                else f"{value} | np.uint64({SHARED_WINDOW})"
            )
    elif space not in ("global", "param", "const", "local"):
        raise e.unknown(i)
    e.assign(target, value, f"u{bits}", uniform=e.is_uniform(source))


@family("isspacep")
def is_in_space(e: "Emitter", i: Instruction) -> None:
    target, source = i.operands
    space = i.parts[1]
    windows = {
        "shared::cluster": SHARED_WINDOW,
        "param": PARAMETER_WINDOW,
        "local": LOCAL_WINDOW,
        "global": 0,
    }
    value = e.value(source, "u64")
    if space in ("shared", "shared::cta"):
        # The window of this CTA alone: the rank is above bit 24.
        text = f"({value} >> 24) == {SHARED_WINDOW >> 24} + w.cta.rank"
    elif space in windows:
        text = f"({value} >> {WINDOW_SHIFT}) == {windows[space] >> WINDOW_SHIFT}"
    else:
        raise e.unknown(i)
    e.assign(target, text, "pred", uniform=e.is_uniform(source))


@family("createpolicy")
def cache_policy(e: "Emitter", i: Instruction) -> None:
    """Emit createpolicy: cache policies are opaque, and have no effect on results."""
    e.assign(i.operands[0], "0", "u64", uniform=True)
