"""mov between scalar registers; vectors are packed and unpacked by the code generator."""

from tests.emulator.isa.opcode import Opcode
from tests.emulator.isa.semantics import DTYPES, Lanewise, check_count


def _mov(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (1,), "source")
    kind = op.type([name for name in DTYPES if name[1:] != "8" and name != "f16"])
    op.finish()
    name = kind if kind[0] in "fp" else f"b{kind[1:]}"
    return Lanewise((name,), (name,), "{0}", None if kind[0] == "f" else "{0}")


FAMILIES = {"mov": _mov}
