"""Tensor memory: its addresses, and a thread's way to its own lane."""

import cutlass
from cutlass import Array, Float32, Int32
from cutlass.experimental import primitives as ptx

SHAPE = ptx.Tcgen05LdStShape.SHAPE_32X32B


def tensor_pointer(address: Int32) -> Array:
    """Tensor memory at lane << 16 | column."""
    return ptx.make_tmem_ptr(address, cutlass.Float32)


def load_columns(address: Int32, count: int) -> list[Float32]:
    """``count``, a power of two, columns of this thread's lane; to be waited for."""
    return list(ptx.tcgen05_ld(SHAPE, tensor_pointer(address), num=count).to_elements())
