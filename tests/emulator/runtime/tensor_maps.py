"""Arguments of ``cuTensorMapEncodeTiled``, read from the host code's memory."""

import ctypes

from tests.emulator.findings import LaunchError
from tests.emulator.tma.element_type import BY_DRIVER
from tests.emulator.tma.swizzle import Swizzle
from tests.emulator.tma.tensor_map import Interleave, TensorMap, encode


def encode_tiled(
    element_type: int,
    rank: int,
    address: int,
    dims: int,
    strides: int,
    box: int,
    element_strides: int,
    interleave: int,
    swizzle: int,
    promotion: int,
    fill: int,
    *,
    capability: int,
) -> bytes:
    """The 128-byte tensor map, encoded from the driver call's arguments.

    Args:
        element_type: CUtensorMapDataType.
        rank: number of dimensions, 1 to 5.
        address: address of the tensor.
        dims: address of ``rank`` 64-bit extents, innermost first.
        strides: address of ``rank - 1`` 64-bit strides in bytes, of all dimensions but the
            innermost.
        box: address of ``rank`` 32-bit extents of the box.
        element_strides: address of ``rank`` 32-bit steps between elements.
        interleave: CUtensorMapInterleave.
        swizzle: CUtensorMapSwizzle.
        promotion: CUtensorMapL2promotion.
        fill: CUtensorMapFloatOOBfill.
        capability: compute capability of the device; 100 for sm_100a.

    Raises:
        LaunchError: an enumeration value is unknown to the driver.
        IllegalInstruction: the driver refuses the arguments.
    """
    if element_type not in BY_DRIVER:
        raise LaunchError(f"tensor map data type {element_type}, accepted are {sorted(BY_DRIVER)}")
    if not 1 <= rank <= 5:
        raise LaunchError(f"tensor map rank {rank}, accepted are 1 to 5")
    for name, value, count in (
        ("interleave", interleave, len(Interleave)),
        ("swizzle", swizzle, len(Swizzle)),
        ("L2 promotion", promotion, 4),
        ("out-of-bounds fill", fill, 2),
    ):
        if value >= count:
            raise LaunchError(f"tensor map {name} {value}, accepted are 0 to {count - 1}")
    tensor_map = TensorMap(
        address=address,
        element_type=BY_DRIVER[element_type],
        dims=_read(ctypes.c_uint64, dims, rank),
        strides=_read(ctypes.c_uint64, strides, rank - 1),
        box=_read(ctypes.c_uint32, box, rank),
        element_strides=_read(ctypes.c_uint32, element_strides, rank),
        interleave=Interleave(interleave),
        swizzle=Swizzle(swizzle),
        l2_promotion=promotion,
        nan_fill=bool(fill),
    )
    return encode(tensor_map, capability)


def _read(
    kind: "type[ctypes.c_uint32] | type[ctypes.c_uint64]", address: int, count: int
) -> tuple[int, ...]:
    return tuple((kind * count).from_address(address)) if count else ()
