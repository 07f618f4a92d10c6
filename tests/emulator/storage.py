"""Storage of virtual registers in the generated code, and their presentation as other types."""

from dataclasses import dataclass

from tests.emulator.findings import UnknownInstruction
from tests.emulator.ptx.flow import results
from tests.emulator.ptx.syntax import TYPE_BITS, Instruction, Kernel, Register
from tests.emulator.ptx.uniformity import Uniformity

# PTX operand type -> numpy type code of a 32-lane array that presents it.
CODES = {
    **{f"{kind}{bits}": f"u{bits // 8}" for kind in "ub" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"i{bits // 8}" for bits in (8, 16, 32, 64)},
    "f16": "f2",
    "bf16": "u2",
    "f16x2": "u4",
    "bf16x2": "u4",
    "f32": "f4",
    "f64": "f8",
    "pred": "?",
    "b128": "V16",
}


@dataclass(frozen=True, slots=True)
class Storage:
    """Representation of one register.

    Attributes:
        name: name of the Python variable.
        bits: width; 1 for a predicate.
        code: numpy type code of its 32 lanes, or "" for one Python int or bool for the whole warp.
    """

    name: str
    bits: int
    code: str

    @property
    def uniform(self) -> bool:
        return not self.code


def _float_votes(body: list[Instruction]) -> dict[str, int]:
    """Votes by register name: positive if used as f32 or f64 more often than as other types."""
    votes: dict[str, int] = {}
    for instruction in body:
        kinds = [part for part in instruction.parts[1:] if part in TYPE_BITS]
        if not kinds or instruction.parts[0] in ("mov", "ld", "st", "tcgen05", "selp", "shfl"):
            continue
        first = results(instruction)
        for index, operand in enumerate(instruction.operands):
            if isinstance(operand, Register):
                kind = kinds[0] if index < first else kinds[-1]
                if instruction.parts[0] in ("setp", "set"):
                    kind = kinds[-1]
                vote = 1 if kind in ("f32", "f64") else -1
                votes[operand.name] = votes.get(operand.name, 0) + vote
    return votes


def assign_storage(kernel: Kernel, uniformity: Uniformity) -> dict[str, Storage]:
    """Choose the representation of every register of ``kernel``."""
    votes = _float_votes(kernel.body)
    forms = {}
    for number, (name, kind) in enumerate(kernel.registers.items()):
        bits = TYPE_BITS[kind]
        python = f"{''.join(c for c in name if c.isalnum())}_{number}"
        code = ""
        if name in uniformity.divergent:
            if bits == 1:
                code = "?"
            elif bits == 128:
                code = "V16"
            elif bits in (32, 64) and (votes.get(name, 0) > 0 or kind in ("f32", "f64")):
                code = f"f{bits // 8}"
            else:
                code = f"u{bits // 8}"
        forms[name] = Storage(python, bits, code)
    return forms


def code_of(kind: str) -> str:
    """Numpy type code that presents PTX type ``kind``."""
    if kind not in CODES:
        raise UnknownInstruction(f"operand type .{kind}")
    return CODES[kind]
