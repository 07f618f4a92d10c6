"""Shared memory descriptors of MMAs and ``tcgen05.cp``, and swizzles by row width."""

from cutlass import Array, Int32, Int64
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMapSwizzle

TENSOR_MAP_SWIZZLES = {
    128: TensorMapSwizzle.s128b,
    64: TensorMapSwizzle.s64b,
    32: TensorMapSwizzle.s32b,
}
DESCRIPTOR_SWIZZLES = {
    128: ptx.Tcgen05SmemSwizzle.SWIZZLE_128B,
    64: ptx.Tcgen05SmemSwizzle.SWIZZLE_64B,
    32: ptx.Tcgen05SmemSwizzle.SWIZZLE_32B,
}


def row_descriptor(data: Array, width: int) -> Int64:
    """Descriptor of swizzled rows of ``width`` bytes, in groups of eight (PTX ISA, tcgen05)."""
    return ptx.Tcgen05SmemDesc.build(data, 16, 8 * width, layout=DESCRIPTOR_SWIZZLES[width])


def scale_descriptor(scales: Array) -> Int64:
    """Descriptor of an atom of scales: 32 rows of 16 bytes, in groups of eight."""
    return ptx.Tcgen05SmemDesc.build(scales, 16, 8 * 16)


def advance(descriptor: Int64, units: Int32 | int) -> Int64:
    """Descriptor advanced by ``units`` of 16 bytes, without a carry into its high word.

    Only the low word changes: the high word has strides, the version and the swizzle. The
    assemblers of CUDA 12 and 13.0 are not trusted with a 64-bit addition here; inline PTX keeps
    LLVM from replacing the 32-bit addition by a 64-bit one.
    """
    if isinstance(units, int) and units == 0:
        return descriptor
    return ptx.inline_ptx(
        "{ .reg .b32 low, high; mov.b64 {low, high}, {$r0}; add.s32 low, low, {$r1}; "
        "mov.b64 {$w0}, {low, high}; }",
        write_only_types=[Int64],
        read_only_args=[descriptor, Int32(units)],
    )
