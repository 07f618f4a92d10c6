"""Element and scale formats of the tensor core, decoded to float32 by table."""

from enum import Enum
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[Any]


class Element(Enum):
    """An element format: PTX name and width in bits."""

    F16 = ("f16", 16)
    BF16 = ("bf16", 16)
    TF32 = ("tf32", 32)
    E4M3 = ("e4m3", 8)
    E5M2 = ("e5m2", 8)
    E2M3 = ("e2m3", 6)
    E3M2 = ("e3m2", 6)
    E2M1 = ("e2m1", 4)
    U8 = ("u8", 8)
    S8 = ("s8", 8)
    F32 = ("f32", 32)
    S32 = ("s32", 32)

    def __init__(self, ptx_name: str, bits: int) -> None:
        self.ptx_name = ptx_name
        self.bits = bits


class ScaleFormat(Enum):
    """A block scale's format; the value is the instruction descriptor's code."""

    UE4M3 = 0
    UE8M0 = 1


def _table(dtype: Any, codes: int) -> npt.NDArray[np.float32]:
    with np.errstate(invalid="ignore"):
        return np.arange(codes, dtype=np.uint8).view(dtype).astype(np.float32)


def _pairs(table: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Values of each pair of adjacent codes, packed in 8 bytes so that one gather decodes both."""
    low = np.tile(table, len(table))
    high = np.repeat(table, len(table))
    return np.stack([low, high], axis=1).view(np.float64)[:, 0]


_E2M1 = _table(ml_dtypes.float4_e2m1fn, 16)
_SIX_BITS = {
    Element.E2M3: _table(ml_dtypes.float6_e2m3fn, 64),
    Element.E3M2: _table(ml_dtypes.float6_e3m2fn, 64),
}
_EIGHT_BITS = {
    Element.E4M3: _table(ml_dtypes.float8_e4m3fn, 256),
    Element.E5M2: _table(ml_dtypes.float8_e5m2, 256),
    Element.U8: np.arange(256, dtype=np.float32),
    Element.S8: np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32),
}
_E2M1_PAIRS = _pairs(_E2M1)
_SIX_BIT_PAIRS = {element: _pairs(table) for element, table in _SIX_BITS.items()}

_HOLDERS = np.arange(256)
# Tensor memory holds narrow elements of f8f6f4 in the middle of a byte: 00xxxx00 and 0xxxxxx0
# (CUTLASS: examples/python/CuTeDSL/experimental/primitives/tcgen05/cp_narrow_a_to_tmem_mma.py).
HOLDER_SHIFT = {4: 2, 6: 1}
_CONTAINERS = _EIGHT_BITS | {
    Element.E2M1: _E2M1[_HOLDERS >> HOLDER_SHIFT[4] & 15],
    **{element: table[_HOLDERS >> HOLDER_SHIFT[6] & 63] for element, table in _SIX_BITS.items()},
}

_SCALES = {
    # The sign bit is not part of UE4M3; the reader of scales refuses a set sign.
    ScaleFormat.UE4M3: _table(ml_dtypes.float8_e4m3fn, 256),
    # 0xFF is NaN, 0 is 2^-127 (OCP microscaling formats 1.0).
    ScaleFormat.UE8M0: _table(ml_dtypes.float8_e8m0fnu, 256),
}


def decode(raw: Bytes, element: Element) -> npt.NDArray[np.float32]:
    """Contiguously packed elements, uint8 [lines, bytes], as float32 [lines, elements].

    TF32 drops the low 13 bits of its float32 container.
    """
    lines = raw.shape[0]
    match element:
        case Element.E2M1:
            return _E2M1_PAIRS.take(raw).view(np.float32)
        case Element.E4M3 | Element.E5M2 | Element.U8 | Element.S8:
            return _EIGHT_BITS[element].take(raw)
        case Element.E2M3 | Element.E3M2:
            triples = raw.reshape(-1, 3).astype(np.uint16)
            codes = np.empty((len(triples), 2), dtype=np.intp)
            codes[:, 0] = triples[:, 0] | (triples[:, 1] & 15) << 8
            codes[:, 1] = triples[:, 1] >> 4 | triples[:, 2] << 4
            return _SIX_BIT_PAIRS[element].take(codes).view(np.float32).reshape(lines, -1)
        case Element.F16:
            return raw.view(np.float16).astype(np.float32)
        case Element.BF16:
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        case Element.TF32:
            return (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    raise ValueError(f"{element.ptx_name} is no operand format")


def decode_containers(raw: Bytes, element: Element) -> npt.NDArray[np.float32]:
    """8-, 6- or 4-bit elements in byte containers, as tensor memory holds A of kind f8f6f4."""
    return _CONTAINERS[element].take(raw)


def decode_scales(raw: Bytes, scale: ScaleFormat) -> npt.NDArray[np.float32]:
    """Block scales, uint8 of any shape, as float32."""
    return _SCALES[scale].take(raw)
