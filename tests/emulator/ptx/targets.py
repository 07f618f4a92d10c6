"""Instructions available on some targets only (PTX ISA, "Target ISA Notes" of each)."""

import re

from tests.emulator.ptx.syntax import Instruction

_BLACKWELL = frozenset(["tcgen05", "clusterlaunchcontrol"])
_NARROW = frozenset(["e2m1x2", "e2m3x2", "e3m2x2", "ue8m0x2", "b6x16_p32", "b4x16_p64"])


def missing_target(target: str, instruction: Instruction) -> str:
    """Target that the instruction requires, if it is not the module's target; else "".

    Args:
        target: target of the module, such as ``sm_90a``.
        instruction: any instruction.
    """
    number = re.match(r"sm_(\d+)", target)
    if number is None:
        return ""
    parts = instruction.parts
    if parts[0] == "wgmma":
        return "" if target == "sm_90a" else "sm_90a"
    needs = (
        parts[0] in _BLACKWELL
        or any(part in _NARROW or part.startswith("cta_group::") for part in parts)
        or "f32x2" in parts
    )
    return "sm_100a" if needs and int(number[1]) < 100 else ""
