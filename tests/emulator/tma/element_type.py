"""Element types of a tensor map, with their encodings."""

from enum import Enum


class ElementType(Enum):
    """Type of a tensor map's elements.

    Attributes:
        driver: number in the driver's argument list (CUtensorMapDataType).
        code: number in the descriptor.
        rounds: whether the descriptor requests TF32 rounding on loads.
        bits: width in global memory.
        kind: element type of reductions, "" if there are none.
    """

    U8 = (0, 0, False, 8, "")
    U16 = (1, 1, False, 16, "")
    U32 = (2, 2, False, 32, "u32")
    S32 = (3, 3, False, 32, "s32")
    U64 = (4, 4, False, 64, "u64")
    S64 = (5, 5, False, 64, "s64")
    F16 = (6, 6, False, 16, "f16")
    F32 = (7, 7, False, 32, "f32")
    F64 = (8, 9, False, 64, "f64")
    BF16 = (9, 10, False, 16, "bf16")
    F32_FTZ = (10, 8, False, 32, "f32")
    TF32 = (11, 7, True, 32, "f32")
    TF32_FTZ = (12, 8, True, 32, "f32")
    U4_ALIGN8B = (13, 11, False, 4, "")
    U4_ALIGN16B = (14, 12, False, 4, "")
    U6_ALIGN16B = (15, 13, False, 6, "")

    def __init__(self, driver: int, code: int, rounds: bool, bits: int, kind: str) -> None:
        self.driver = driver
        self.code = code
        self.rounds = rounds
        self.bits = bits
        self.kind = kind

    @property
    def floating(self) -> bool:
        return self.kind in ("f16", "bf16", "f32", "f64")

    @property
    def flushes(self) -> bool:
        """Whether reductions flush subnormals."""
        return self.code == 8

    @property
    def sub_byte(self) -> bool:
        return self.bits < 8

    @property
    def padded(self) -> bool:
        """Whether 16 elements take 16 bytes of shared memory, but fewer in global memory."""
        return self.sub_byte and self.code != 11


# Index: number in tensormap.replace (PTX ISA 9.7.9.28, table of new_val).
REPLACE_ELEMENT_TYPES = (
    ElementType.U8,
    ElementType.U16,
    ElementType.U32,
    ElementType.S32,
    ElementType.U64,
    ElementType.S64,
    ElementType.F16,
    ElementType.F32,
    ElementType.F32_FTZ,
    ElementType.F64,
    ElementType.BF16,
    ElementType.TF32,
    ElementType.TF32_FTZ,
    ElementType.U4_ALIGN8B,
    ElementType.U4_ALIGN16B,
    ElementType.U6_ALIGN16B,
)
BY_DRIVER = {kind.driver: kind for kind in ElementType}
BY_CODE = {(kind.code, kind.rounds): kind for kind in ElementType}
