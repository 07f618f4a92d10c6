"""Atomics and reductions on shared and global memory, with and without contention."""

from collections.abc import Iterator

import numpy as np

from tests.test_emulator.silicon.case import Case, Tolerance, random_array
from tests.test_emulator.silicon.cases.banks import FLOAT_LANES, LANES
from tests.test_emulator.silicon.cases.instructions import Op, groups
from tests.test_emulator.silicon.ptx_text import PROLOGUE, dump, fill, module, shared_array

_INTEGER = {
    "u32": ("add", "min", "max", "inc", "dec"),
    "s32": ("add", "min", "max"),
    "u64": ("add", "min", "max"),
    "s64": ("min", "max"),
    "b32": ("and", "or", "xor", "exch"),
    "b64": ("and", "or", "xor", "exch"),
}
_FLOATING = ("add.f32", "add.f64", "add.noftz.f16", "add.noftz.f16x2", "add.noftz.bf16",
             "add.noftz.bf16x2")  # fmt: skip
_WIDTH = {"f16": "16", "bf16": "16", "f64": "64"}


def _payload_free(kind: str) -> Tolerance | None:
    """Tolerance for NaN, whose payload PTX leaves open: Hopper gives 0x7fff.. or an operand's."""
    kind = kind.removesuffix("x2")
    return Tolerance(kind) if kind in ("f16", "bf16", "f32", "f64") else None


# atom.global.add.f32 flushes subnormals, also in vectors; atom.shared.add.f32 does not (PTX, atom).
def _alone(space: str, forms: list[tuple[str, str, str]]) -> Iterator[Op]:
    """Operations on one word per thread: initial value from column 0, operand from column 1."""
    for form, width, bank in forms:
        free = _payload_free(bank)
        before = f"st.{space}.b{width} [%{space}], $a0;"
        yield Op(
            f"atom.{space}.{form}",
            f"{width}|{width}",
            f"{bank}:0 {bank}:1",
            f"{before} atom.{space}.{form} $d0, [%{space}], $a1;"
            f" ld.{space}.b{width} $d1, [%{space}];",
            free,
        )
        if not form.startswith("exch"):
            yield Op(
                f"red.{space}.{form}",
                width,
                f"{bank}:0 {bank}:1",
                f"{before} red.relaxed.gpu.{space}.{form} [%{space}], $a1;"
                f" ld.{space}.b{width} $d0, [%{space}];",
                free,
            )


def _swaps(space: str) -> Iterator[Op]:
    """Compare-and-swap, for which half of the threads compare equal; 128-bit forms."""
    for width in ("16", "32", "64"):
        bank = f"u{width}"
        yield Op(
            f"atom.{space}.cas.b{width}",
            f"{width}|{width}",
            f"{bank}:0 {bank}:1 {bank}:2 p:0",
            f"{{ .reg .b{width} %with; mov.b{width} %with, $a2; @$a3 mov.b{width} %with, $a0;"
            f" st.{space}.b{width} [%{space}], $a0;"
            f" atom.{space}.cas.b{width} $d0, [%{space}], %with, $a1;"
            f" ld.{space}.b{width} $d1, [%{space}]; }}",
        )
    head = (
        "{ .reg .b128 %old, %new, %with; .reg .b64 %low; mov.b128 %new, {$a1, $a0};"
        f" st.{space}.v2.b64 [%{space}], {{$a0, $a1}};"
    )
    tail = f" mov.b128 {{$d0, $d1}}, %old; ld.{space}.v2.b64 {{$d2, $d3}}, [%{space}]; }}"
    yield Op(
        f"atom.{space}.exch.b128",
        "64|64|64|64",
        "u64:0 u64:1",
        f"{head} atom.{space}.exch.b128 %old, [%{space}], %new; {tail}",
    )
    yield Op(
        f"atom.{space}.cas.b128",
        "64|64|64|64",
        "u64:0 u64:1 u64:2 p:2",
        f"{head} selp.b64 %low, $a0, $a2, $a3; mov.b128 %with, {{%low, $a1}};"
        f" atom.{space}.cas.b128 %old, [%{space}], %with, %new; {tail}",
    )


def _vectors() -> Iterator[Op]:
    """Vector forms, which exist for global memory only."""
    halves = ("add.noftz", "min.noftz", "max.noftz")
    for kind, widest, operations in (
        ("f32", 4, ("add",)),
        ("f16", 8, halves),
        ("bf16", 8, halves),
        ("f16x2", 4, halves),
        ("bf16x2", 4, halves),
    ):
        width = _WIDTH.get(kind, "32")
        for count in (c for c in (2, 4, 8) if c <= widest):
            for operation in operations:
                yield from _vector(kind, width, count, operation)


def _vector(kind: str, width: str, count: int, operation: str) -> Iterator[Op]:
    opcode = f"global.{operation}.v{count}.{kind}"
    banks = " ".join(f"{kind}:{(0, 1, 2, 1)[i % 4]}" for i in range(count))
    operands = [f"$a{i}" for i in range(count)]
    loads = [f"ld.global.b{width} $d{{}}, [%global+{i * int(width) // 8}];" for i in range(count)]
    stores = "".join(
        f" st.global.b{width} [%global+{i * int(width) // 8}], {a};"
        for i, a in enumerate(operands[::-1])
    )
    packed = "{" + ", ".join(operands) + "}"
    olds = "{" + ", ".join(f"$d{i}" for i in range(count)) + "}"
    yield Op(
        f"atom.{opcode}",
        "|".join([width] * 2 * count),
        banks,
        f"{stores} atom.{opcode} {olds}, [%global], {packed};"
        + "".join(load.format(i + count) for i, load in enumerate(loads)),
        _payload_free(kind),
    )
    yield Op(
        f"red.{opcode}",
        "|".join([width] * count),
        banks,
        f"{stores} red.{opcode} [%global], {packed};"
        + "".join(load.format(i) for i, load in enumerate(loads)),
        _payload_free(kind),
    )


def _contended(space: str) -> Case:
    """Operations of 256 threads on four words each; the results do not depend on the order."""
    forms = ("add.u32", "min.u32", "max.u32", "min.s32", "max.s32", "inc.u32", "dec.u32", "and.b32",
             "or.b32", "xor.b32", "add.f32")  # fmt: skip
    size, threads = 1024, 256
    body = [
        PROLOGUE,
        fill(size, threads, 0),
        "bar.sync 0;",
        "mad.wide.u32 %d0, %tid_x, 4, %values; ld.global.b32 %r0, [%d0];",
        "and.b32 %r3, %r0, 255; cvt.rn.f32.u32 %r3, %r3;",
        "and.b32 %r1, %tid_x, 3; mad.lo.u32 %r2, %r1, 4, %base; mad.wide.u32 %d1, %r1, 4, %words;",
    ]
    place = "%r2" if space == "shared" else "%d1"
    for row, form in enumerate(forms):
        # inc and dec with one bound, and exact sums, do not depend on the order.
        value = {"add.f32": "%r3", "inc.u32": "37", "dec.u32": "37"}.get(form, "%r0")
        body.append(f"red.{space}.{form} [{place}+{row * 64}], {value};")
    body += ["bar.sync 0;", dump(size, threads, "%out")]
    return Case(
        f"contended_{space}",
        module(["values", "words", "out"], body, declarations=shared_array(size)),
        {"values": random_array("contended", (threads,), "u4")},
        {"words": np.zeros(256, "u4"), "out": np.zeros(256, "u4")},
        block=(threads, 1, 1),
    )


def cases() -> Iterator[Case]:
    integers = [
        (f"{name}.{kind}", kind[1:], f"u{kind[1:]}") for kind in _INTEGER for name in _INTEGER[kind]
    ]
    floats = [
        (form, _WIDTH.get(form.split(".")[-1], "32"), form.split(".")[-1]) for form in _FLOATING
    ]
    for space in ("shared", "global"):
        ops = [*_alone(space, integers), *_swaps(space)]
        yield from groups(f"integers_{space}", ops, LANES, scratch=True)
        yield from groups(f"floats_{space}", _alone(space, floats), FLOAT_LANES, scratch=True)
        yield _contended(space)
    yield from groups("vectors", _vectors(), LANES, scratch=True)
