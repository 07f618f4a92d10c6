"""Tensor memory: addresses, and loads of a thread's lane."""

import cutlass
from cutlass import Array, Float32, Int32
from cutlass.experimental import primitives as ptx

SHAPE = ptx.Tcgen05LdStShape.SHAPE_32X32B


def tensor_pointer(address: Int32) -> Array:
    """Pointer to tensor memory at ``address``, lane << 16 | column."""
    return ptx.make_tmem_ptr(address, cutlass.Float32)


def load_columns(address: Int32, count: int) -> list[Float32]:
    """Load ``count`` columns (a power of two) of this thread's lane; the caller must wait."""
    return list(ptx.tcgen05_ld(SHAPE, tensor_pointer(address), num=count).to_elements())
