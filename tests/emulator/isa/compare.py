"""Comparison and selection (PTX ISA, Comparison and Selection; Half Precision Comparison)."""

from typing import Any

import numpy as np

from tests.emulator.isa.flush import flush_f16, flush_f32
from tests.emulator.isa.opcode import Opcode
from tests.emulator.isa.rounding import from_bf16
from tests.emulator.isa.semantics import (
    DTYPES,
    Function,
    Lanes,
    Lanewise,
    check_count,
    coerced,
    compiled,
    spread,
)

_BITS = ("b16", "b32", "b64")
_UNSIGNED = ("u16", "u32", "u64")
_SIGNED = ("s16", "s32", "s64")
_FLOATS = ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
_EQUALITY = {"eq": "{0} == {1}", "ne": "{0} != {1}"}
_ORDER = {"lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}"}
_LOWER_HIGHER = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_FLOATING = {
    "eq": "{0} == {1}",
    "ne": "({0} < {1}) | ({0} > {1})",
    **_ORDER,
    "equ": "~(({0} < {1}) | ({0} > {1}))",
    "neu": "{0} != {1}",
    "ltu": "~({0} >= {1})",
    "leu": "~({0} > {1})",
    "gtu": "~({0} <= {1})",
    "geu": "~({0} < {1})",
    "num": "({0} == {0}) & ({1} == {1})",
    "nan": "({0} != {0}) | ({1} != {1})",
}
_COMBINE = {"and": "&", "or": "|", "xor": "^"}


def _comparison(op: Opcode, kind: str) -> tuple[str, str | None]:
    """Vector and scalar templates of the comparison an opcode names."""
    if kind in _FLOATS:
        return _FLOATING[op.choice(_FLOATING)], None
    accepted = dict(_EQUALITY)
    if kind not in _BITS:
        accepted |= _ORDER
    if kind in _UNSIGNED:
        accepted |= {name: _ORDER[same] for name, same in _LOWER_HIGHER.items()}
    template = accepted[op.choice(accepted)]
    if kind in _SIGNED and template not in _EQUALITY.values():
        top = f"{1 << (int(kind[1:]) - 1):#x}"
        return template, template.format(f"({{0}} ^ {top})", f"({{1}} ^ {top})")
    return template, template


def _flushes(op: Opcode, kind: str) -> bool:
    return kind in ("f32", "f16", "f16x2") and op.flag("ftz")


def _presented(kind: str) -> str:
    """Type in which the sources of a comparison of type ``kind`` are presented."""
    return {"bf16": "b16", "f16x2": "b32", "bf16x2": "b32"}.get(kind, kind)


def _opened(kind: str, flush: bool) -> Function | None:
    """Conversion of presented values to comparable values; None if no conversion is needed."""
    if kind in ("f16", "f16x2"):
        if kind == "f16":
            return flush_f16 if flush else None
        return lambda a: (flush_f16 if flush else np.asarray)(_halves(a).view(np.float16))
    if kind in ("bf16", "bf16x2"):
        return from_bf16 if kind == "bf16" else lambda a: from_bf16(_halves(a))
    return flush_f32 if flush else None


def _halves(a: Any) -> Lanes:
    return (a if isinstance(a, np.ndarray) else spread(int(a), np.uint32)).view(np.uint16)


def _true(kind: str, template: str, flush: bool) -> str | Function:
    """Template or function for a comparison, lane by lane (half by half for packed types)."""
    opened = _opened(kind, flush)
    if opened is None:
        return template
    compare = compiled(template, 2)
    return coerced(lambda a, b: compare(opened(a), opened(b)), (_presented(kind),) * 2)


def _setp(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    kind = op.type((*_BITS, *_UNSIGNED, *_SIGNED, *_FLOATS))
    packed = kind.endswith("x2")
    flush = _flushes(op, kind)
    combine = op.choice((*_COMBINE, "none"), "none")
    template, scalar = _comparison(op, kind)
    op.finish()
    boolean = combine != "none"
    check_count(op.text, count, (3,) if boolean else (2,), "source")
    dual = check_count(op.text, results, (2,) if packed else (1, 2), "destination") == 2
    name = _presented(kind)
    sources = (name, name, "pred") if boolean else (name, name)
    true = _true(kind, template, flush)
    join = f" {_COMBINE[combine]} {{2}}" if boolean else ""
    if isinstance(true, str) and not dual:
        vector = f"({true}){join}" if boolean else true
        return Lanewise(sources, ("pred",), vector, f"({scalar}){join}" if scalar else None)
    holds = compiled(true, 2) if isinstance(true, str) else true
    combined = compiled(f"{{0}}{join.replace('{2}', '{1}')}", 2)

    def run(a: Any, b: Any, other: Any = False) -> Any:
        found = holds(a, b)
        if packed:
            return combined(found[0::2], other), combined(found[1::2], other)
        return (combined(found, other), combined(~found, other)) if dual else combined(found, other)

    both = f"(({scalar}){join}, (not ({scalar})){join})" if scalar else None
    return Lanewise(sources, ("pred", "pred") if dual else ("pred",), coerced(run, sources), both)


# Value that set writes where the comparison holds (PTX ISA, set), by destination type.
_TRUE: dict[str, Any] = {
    "u32": np.uint32(0xFFFFFFFF),
    "s32": np.uint32(0xFFFFFFFF),
    "u16": np.uint16(0xFFFF),
    "s16": np.uint16(0xFFFF),
    "f32": np.float32(1),
    "f16": np.float16(1),
    "bf16": np.uint16(0x3F80),
    "f16x2": np.uint16(0x3C00),
    "bf16x2": np.uint16(0x3F80),
}


def _set(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    kind = op.type((*_BITS, *_UNSIGNED, *_SIGNED, *_FLOATS))
    packed = kind.endswith("x2")
    if packed:
        targets = ["u32", "s32", kind]
    elif kind in ("f16", "bf16"):
        targets = ["u16", "s16", "u32", "s32", "bf16", *(["f16"] if kind == "f16" else [])]
    else:
        targets = ["u32", "s32", "f32", "f16", "bf16"]
    target = op.type(targets)
    flush = _flushes(op, kind)
    combine = op.choice((*_COMBINE, "none"), "none")
    template, _ = _comparison(op, kind)
    op.finish()
    boolean = combine != "none"
    check_count(op.text, count, (3,) if boolean else (2,), "source")
    name = _presented(kind)
    sources = (name, name, "pred") if boolean else (name, name)
    true = _true(kind, template, flush)
    holds = compiled(true, 2) if isinstance(true, str) else true
    join = f" {_COMBINE[combine]} {{1}}" if boolean else ""
    combined = compiled(f"{{0}}{join}", 2)
    value = _TRUE["u16"] if packed and target in ("u32", "s32") else _TRUE[target]

    def run(a: Any, b: Any, other: Any = False) -> Lanes:
        found = holds(a, b)
        if packed and np.size(other) > 1:
            other = np.repeat(other, 2)
        found = np.where(combined(found, other), value, value.dtype.type(0))
        return found.view(np.uint32) if packed else found

    result = {"s32": "u32", "s16": "u16", "bf16": "b16", "f16x2": "b32", "bf16x2": "b32"}
    return Lanewise(sources, (result.get(target, target),), coerced(run, sources))


def _selection(kind: str) -> str:
    return "f" + kind[1:] if kind[0] == "f" else f"b{kind[1:]}"


def _selp(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (3,), "source")
    kind = op.type((*_BITS, *_UNSIGNED, *_SIGNED, "f32", "f64"))
    op.finish()
    name = _selection(kind)
    if name[0] == "f":
        return Lanewise((name, name, "pred"), (name,), "np.where({2}, {0}, {1})")
    dtype = DTYPES[name]

    def select(a: Any, b: Any, choice: Any) -> Any:
        if a.__class__ is int and b.__class__ is int:  # np.where would make these int64
            a = dtype(a)
        return np.where(choice, a, b)

    return Lanewise((name, name, "pred"), (name,), select, "({0} if {2} else {1})")


def _slct(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (3,), "source")
    by = op.type(("s32", "f32"))
    kind = op.type((*_BITS, *_UNSIGNED, *_SIGNED, "f32", "f64"))
    flush = by == "f32" and op.flag("ftz")
    op.finish()
    name = _selection(kind)
    sources = (name, name, by)

    def select(a: Any, b: Any, choice: Any) -> Lanes:
        return np.where((flush_f32(choice) if flush else choice) >= 0, a, b)

    return Lanewise(sources, (name,), coerced(select, sources))


FAMILIES = {"setp": _setp, "set": _set, "selp": _selp, "slct": _slct}
