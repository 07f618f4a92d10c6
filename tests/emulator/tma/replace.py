"""tensormap.replace: replacement of one field of a descriptor (PTX ISA 9.7.9.28)."""

from tests.emulator.findings import IllegalInstruction
from tests.emulator.tma.element_type import REPLACE_ELEMENT_TYPES
from tests.emulator.tma.tensor_map import NBYTES

# field -> (number of ordinals, lowest and highest value); ordinals 0: the field takes none.
_FIELDS = {
    "global_address": (0, 0, (1 << 64) - 1),
    "rank": (0, 0, 4),
    "box_dim": (5, 1, 256),
    "global_dim": (5, 0, (1 << 32) - 1),
    "global_stride": (4, 0, (1 << 40) - 16),
    "element_stride": (5, 1, 8),
    "elemtype": (0, 0, 15),
    "interleave_layout": (0, 0, 2),
    "swizzle_mode": (0, 0, 3),
    "swizzle_atomicity": (0, 0, 3),
    "fill_mode": (0, 0, 1),
}


def replace_field(descriptor: bytes, field: str, value: int, ordinal: int | None = None) -> bytes:
    """Copy of ``descriptor`` with ``field`` set to ``value``, encoded as for tensormap.replace.

    As in PTX, the value of the rank is the number of dimensions minus one, and an element type is
    its number in the instruction's table; other values are plain. The copy may not be a legal
    tensor map until further fields are replaced.

    Args:
        descriptor: 128 bytes.
        field: name as in the instruction, without its dot.
        value: ``new_val``.
        ordinal: ``ord``, for the fields that exist once per dimension.

    Raises:
        IllegalInstruction: the field is unknown, or the value or ordinal is out of range.
    """
    if field not in _FIELDS:
        raise IllegalInstruction(f"tensormap.replace .{field}, accepted {sorted(_FIELDS)}")
    if len(descriptor) != NBYTES:
        raise IllegalInstruction(f"tensormap.replace of {len(descriptor)} bytes, accepted {NBYTES}")
    ordinals, lowest, highest = _FIELDS[field]
    if (ordinal is not None) != bool(ordinals) or not 0 <= (ordinal or 0) < max(ordinals, 1):
        accepted = f"0 to {ordinals - 1}" if ordinals else "none"
        raise IllegalInstruction(
            f"tensormap.replace .{field} with ord {ordinal}, accepted {accepted}"
        )
    if not lowest <= value <= highest or (field == "global_stride" and value % 16):
        multiples = ", multiples of 16" if field == "global_stride" else ""
        raise IllegalInstruction(
            f"tensormap.replace .{field} with {value}, accepted {lowest} to {highest}{multiples} "
            "(PTX ISA 9.7.9.28)"
        )
    words = int.from_bytes(descriptor, "little")
    for bit, width, part in _parts(field, value, ordinal or 0):
        mask = (1 << width) - 1
        words = words & ~(mask << bit) | (part & mask) << bit
    return words.to_bytes(NBYTES, "little")


def _parts(field: str, value: int, ordinal: int) -> list[tuple[int, int, int]]:
    """Parts of the descriptor that the field occupies, each as (first bit, width, content)."""
    flags = 64
    if field == "global_address":
        return [(0, 64, value)]
    if field == "box_dim":
        return [(448 + 8 * (ordinal - 1) if ordinal else 440, 8, value - 1)]
    if field == "global_dim":
        return [(256 + 32 * ordinal, 32, value - 1)]
    if field == "global_stride":
        return [(96 + 32 * ordinal, 32, value >> 4), (224 + 4 * ordinal, 4, value >> 36)]
    if field == "element_stride":
        return [(416 + 3 * ordinal, 3, value - 1)]
    if field == "elemtype":
        kind = REPLACE_ELEMENT_TYPES[value]
        return [(flags + 7, 4, kind.code), (flags + 16, 1, kind.rounds)]
    bit, width = {
        "rank": (4, 3),
        "interleave_layout": (11, 2),
        "swizzle_mode": (13, 2),
        "swizzle_atomicity": (19, 3),
        "fill_mode": (15, 1),
    }[field]
    return [(flags + bit, width, value)]
