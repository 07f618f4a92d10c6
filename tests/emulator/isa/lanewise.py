"""Lookup of an opcode's semantics: the single entry point of the lane-wise instructions."""

from collections.abc import Callable, Mapping
from functools import cache

from tests.emulator.isa import approximate, bits, compare, convert, floating, half, integer, moves
from tests.emulator.isa.opcode import Opcode
from tests.emulator.isa.semantics import DTYPES, Lanewise

__all__ = ["DTYPES", "FAMILIES", "Lanewise", "lookup"]

_Builder = Callable[[Opcode, int | None, int | None], Lanewise]
_BY_FAMILY: dict[str, _Builder] = {
    **bits.FAMILIES,
    **compare.FAMILIES,
    **convert.FAMILIES,
    **moves.FAMILIES,
    **approximate.FAMILIES,
}
# Arithmetic families are distinguished by type.
_BY_TYPE: tuple[Mapping[str, _Builder], ...] = (integer.FAMILIES, floating.FAMILIES, half.FAMILIES)
FAMILIES = frozenset(_BY_FAMILY).union(*_BY_TYPE)


def _arithmetic(op: Opcode) -> Mapping[str, _Builder]:
    kind = op.parts[-1] if op.parts else ""
    if "f32" in op.parts[:-1] and kind in ("f16", "bf16"):
        return floating.MIXED
    if kind in half.TYPES:
        return half.FAMILIES
    return floating.FAMILIES if kind.startswith("f") else integer.FAMILIES


@cache
def lookup(opcode: str, sources: int | None = None, results: int | None = None) -> Lanewise | None:
    """Semantics of a lane-wise instruction; None if the opcode belongs to no lane-wise family.

    Args:
        opcode: opcode with its modifiers, ``"setp.lt.and.s32"``.
        sources: number of source operands, for families whose forms differ by it (three-operand
            ``max.f32``); each item of a vector operand counts. None: the usual form.
        results: number of destinations; 2 for ``p|q``. None: the usual form.

    Raises:
        UnknownInstruction: a modifier or type that the family lacks or that is not modelled.
        IllegalInstruction: a number of operands that the form does not have.
    """
    op = Opcode(opcode)
    if op.family not in FAMILIES:
        return None
    builder = _BY_FAMILY.get(op.family)
    if builder is None:
        families = _arithmetic(op)
        if op.family not in families:
            # An unknown type such as fma.s32: the known family reports its types.
            families = next(known for known in _BY_TYPE if op.family in known)
        builder = families[op.family]
    return builder(op, sources, results)
