"""Tensor maps: the 128-byte descriptors of tile copies, and the limits set by the driver.

Only tile mode is modelled; im2col descriptors are refused.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from math import prod

from tests.emulator.findings import IllegalInstruction
from tests.emulator.tma.element_type import BY_CODE, ElementType
from tests.emulator.tma.swizzle import Swizzle

NBYTES = 128
# Box bytes beyond the shared memory of a CTA are refused; 256 KiB were, on an H200.
_LARGEST_BOX = 227 * 1024
_RESERVED_WORD_1 = 0xFFC0_000D  # some encoders set bits 1 and 21, without effect


class Interleave(IntEnum):
    """Interleave modes, numbered as in the driver (CUtensorMapInterleave)."""

    NONE = 0
    B16 = 1
    B32 = 2


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box moved by one copy; innermost dimension first.

    Attributes:
        element_type: type of the tensor's elements.
        address: address of the first element.
        dims: elements along each of 1 to 5 dimensions.
        strides: bytes between elements of each dimension but the first.
        box: elements a copy spans along each dimension.
        element_strides: step between moved elements of each dimension; the first is ignored.
        interleave: channel-interleaved layout.
        swizzle: swizzle of the box in shared memory.
        l2_promotion: 0 to 3, a hint.
        nan_fill: whether out-of-bounds elements read as NaN rather than 0.
    """

    element_type: ElementType
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: Interleave = Interleave.NONE
    swizzle: Swizzle = Swizzle.NONE
    l2_promotion: int = 0
    nan_fill: bool = False

    @property
    def rank(self) -> int:
        return len(self.dims)


def _alignment(tensor_map: TensorMap) -> int:
    wide = tensor_map.element_type.padded or tensor_map.interleave == Interleave.B32
    return 32 if wide else 16


def _shape_objection(tensor_map: TensorMap) -> str | None:
    kind, rank, alignment = tensor_map.element_type, tensor_map.rank, _alignment(tensor_map)
    if not 1 <= rank <= 5:
        return f"rank {rank}, accepted 1 to 5"
    lengths = (len(tensor_map.strides) + 1, len(tensor_map.box), len(tensor_map.element_strides))
    if lengths != (rank, rank, rank):
        return f"strides, box and element strides for {lengths} dimensions, the tensor has {rank}"
    if tensor_map.interleave and rank < 3:
        return f"rank {rank} with an interleaved layout, accepted 3 to 5"
    if tensor_map.address % alignment or not 0 <= tensor_map.address < 1 << 57:
        return f"address {tensor_map.address:#x}, accepted multiples of {alignment} below 2^57"
    if any(not 1 <= extent <= 1 << 32 for extent in tensor_map.dims):
        return f"dimensions {tensor_map.dims}, accepted 1 to 2^32"
    whole = 128 if kind.padded else 2 if kind.sub_byte else 1
    if tensor_map.dims[0] % whole:
        return f"first dimension {tensor_map.dims[0]} of {kind.name}, accepted multiples of {whole}"
    if any(stride % alignment or not 0 <= stride < 1 << 40 for stride in tensor_map.strides):
        return f"strides {tensor_map.strides}, accepted multiples of {alignment} below 2^40"
    return None


def _moved_bytes(tensor_map: TensorMap) -> int:
    """Number of bytes in a box, as the driver counts: whole element strides of each dimension."""
    steps = zip(tensor_map.box, tensor_map.element_strides, strict=True)
    return prod(b // s for b, s in steps) * tensor_map.element_type.bits // 8


def _box_objection(tensor_map: TensorMap) -> str | None:
    kind, box, swizzle = tensor_map.element_type, tensor_map.box, tensor_map.swizzle
    if any(not 1 <= extent <= 256 for extent in box):
        return f"box {box}, accepted 1 to 256"
    if kind.padded and box[0] != 128:
        return f"box {box} of {kind.name}, the first accepted is 128"
    if box[0] * kind.bits % 128:
        return f"box rows of {box[0] * kind.bits / 8:g} bytes, accepted multiples of 16"
    if any(not 1 <= stride <= 8 for stride in tensor_map.element_strides):
        return f"element strides {tensor_map.element_strides}, accepted 1 to 8"
    row = 128 if kind.padded else box[0] * kind.bits // 8
    if swizzle and not tensor_map.interleave and row > swizzle.span:
        return f"box rows of {row} bytes, accepted up to {swizzle.span} with swizzle {swizzle.name}"
    if _moved_bytes(tensor_map) > _LARGEST_BOX:
        return f"box {box} of {_moved_bytes(tensor_map)} bytes, accepted up to {_LARGEST_BOX}"
    if tensor_map.nan_fill and not kind.floating:
        return f"NaN fill of {kind.name}, accepted for floating-point types"
    if kind.padded:
        accepted = [Swizzle.NONE, Swizzle.B128, Swizzle.B128_ATOM_32B]
        if kind == ElementType.U6_ALIGN16B:
            accepted.append(Swizzle.B128_ATOM_64B)
        if swizzle not in accepted:
            return f"swizzle {swizzle.name} of {kind.name}, accepted {[s.name for s in accepted]}"
        if tensor_map.interleave:
            return f"interleaved {kind.name}"
    return None


def check(tensor_map: TensorMap, capability: int = 100) -> None:
    """Raise IllegalInstruction if the driver for ``capability`` (90, 100) refuses the tensor map.

    The rules follow cuTensorMapEncodeTiled's documentation, except where an H200's driver was seen
    to accept more.
    """
    objection = _shape_objection(tensor_map) or _box_objection(tensor_map)
    if capability < 100 and tensor_map.element_type.sub_byte:
        objection = f"{tensor_map.element_type.name}, which needs compute capability 10.0"
    if capability < 100 and tensor_map.swizzle.atomicity:
        objection = f"swizzle {tensor_map.swizzle.name}, which needs compute capability 10.0"
    if objection:
        raise IllegalInstruction(f"tensor map with {objection} (cuTensorMapEncodeTiled)")


def encode(tensor_map: TensorMap, capability: int = 100) -> bytes:
    """The 128-byte descriptor, as the driver encodes it.

    Raises:
        IllegalInstruction: the driver refuses these arguments.
    """
    check(tensor_map, capability)
    kind, swizzle = tensor_map.element_type, tensor_map.swizzle
    missing = 5 - tensor_map.rank
    dims = [extent - 1 for extent in tensor_map.dims] + [0] * missing
    strides = [stride >> 4 for stride in tensor_map.strides] + [0] * missing
    box = [extent - 1 for extent in tensor_map.box] + [0] * missing
    steps = [stride - 1 for stride in tensor_map.element_strides] + [0] * missing
    word_1 = (
        (tensor_map.rank - 1) << 4
        | kind.code << 7
        | tensor_map.interleave << 11
        | swizzle.mode << 13
        | tensor_map.nan_fill << 15
        | kind.rounds << 16
        | tensor_map.l2_promotion << 17
        | swizzle.atomicity << 19
    )
    low = [stride & 0xFFFF_FFFF for stride in strides]
    high = sum((stride >> 32) << 4 * i for i, stride in enumerate(strides))
    word_6 = sum(step << 3 * i for i, step in enumerate(steps)) | box[0] << 24
    # Words 8 and 9 are redundant: bytes of a box, and the swizzle's period.
    notes = (_moved_bytes(tensor_map), 1024 if swizzle > Swizzle.B128 else swizzle.period)
    words = (tensor_map.address, word_1, *low, high, *dims, word_6)
    lanes = sum(extent << 8 * i for i, extent in enumerate(box[1:]))
    return struct.pack("<Q12I3Q48x", *words, lanes, *notes)


@lru_cache(maxsize=1024)
def decode(descriptor: bytes, capability: int = 100) -> TensorMap:
    """The tensor map in ``descriptor`` (128 bytes); the same object for the same bytes.

    Raises:
        IllegalInstruction: the bytes are not a tensor map in tile mode, or a copy with the map
            would be illegal.
    """
    if len(descriptor) != NBYTES:
        raise IllegalInstruction(f"tensor map of {len(descriptor)} bytes, accepted {NBYTES}")
    address, word_1, *rest = struct.unpack_from("<Q12IQ", descriptor)
    low, high, dims, word_6, lanes = rest[:4], rest[4], rest[5:10], rest[10], rest[11]
    rank = (word_1 >> 4 & 7) + 1
    kind = BY_CODE.get((word_1 >> 7 & 15, bool(word_1 >> 16 & 1)))
    interleave, mode, atomicity = word_1 >> 11 & 3, word_1 >> 13 & 3, word_1 >> 19 & 3
    if word_1 & _RESERVED_WORD_1 or high >> 16 or word_6 >> 15 & 0x1FF or lanes >> 32:
        raise IllegalInstruction(
            "not a tiled tensor map: reserved bits are set (im2col, or no map)"
        )
    if kind is None or rank > 5 or interleave > 2:
        raise IllegalInstruction(
            f"tensor map with rank {rank}, element type {word_1 >> 7 & 15} and interleave "
            f"{interleave}: accepted are ranks 1 to 5, types 0 to 13 and interleaves 0 to 2"
        )
    # PTX ISA 5.5.7, table of swizzle modes and atomicities.
    if atomicity and mode in (1, 2):
        raise IllegalInstruction(
            f"tensor map with swizzle mode {mode} and atomicity {atomicity}: "
            "modes 1 and 2 accept 0 (16 bytes)"
        )
    boxes = [word_6 >> 24] + [lanes >> 8 * i & 0xFF for i in range(4)]
    tensor_map = TensorMap(
        element_type=kind,
        address=address,
        dims=tuple(extent + 1 for extent in dims[:rank]),
        strides=tuple((low[i] | (high >> 4 * i & 15) << 32) << 4 for i in range(rank - 1)),
        box=tuple(extent + 1 for extent in boxes[:rank]),
        element_strides=tuple((word_6 >> 3 * i & 7) + 1 for i in range(rank)),
        interleave=Interleave(interleave),
        swizzle=Swizzle(mode + atomicity if mode == 3 else mode),
        l2_promotion=word_1 >> 17 & 3,
        nan_fill=bool(word_1 >> 15 & 1),
    )
    check(tensor_map, capability)
    return tensor_map
