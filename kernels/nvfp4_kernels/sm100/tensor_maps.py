"""Tensor maps, encoded by the driver and corrected where the driver is defective."""

from collections.abc import Sequence

import cutlass
from cutlass import Array, Int32, Int64, Uint64
from cutlass.experimental.cuda import (
    TensorMap,
    TensorMapL2Promotion,
    TensorMapSwizzle,
    create_tensor_map_tiled,
)

STRIDE_BYTES = 16  # unit of a tensor map's strides
DEFECT_BIT = 21  # of a tensor map's second 64-bit word


def tensor_map(
    address: Int64,
    dtype: type[cutlass.Numeric],
    dims: Sequence[Int32 | int],
    strides: Sequence[Int64 | int],
    box: Sequence[int],
    defective_below: Int32,
    swizzle: TensorMapSwizzle = TensorMapSwizzle.none,
    promotion: TensorMapL2Promotion = TensorMapL2Promotion.none,
) -> TensorMap:
    """Tensor map of a tensor in global memory, innermost dimension first; in host code.

    Args:
        address: address of the tensor.
        dtype: dtype of the elements.
        dims: size of each dimension, in elements.
        strides: strides of all dimensions but the first, in units of 16 bytes.
        box: size of a copied box along each dimension, in elements.
        defective_below: size in bytes, see ``nvfp4_kernels.devices.defective_map_bytes``; in maps
            of smaller tensors, the bit that defective drivers set is cleared.
        swizzle: swizzle of the box in shared memory.
        promotion: number of bytes that L2 fetches together; a hint.
    """
    made = create_tensor_map_tiled(
        address, dtype, dims, strides, box, swizzle=swizzle, l2_promotion=promotion
    )
    nbytes = Int64(dims[0]) * dtype.width // 8
    for count, stride in zip(dims[1:], strides, strict=True):
        nbytes += (Int64(count) - 1) * Int64(stride) * STRIDE_BYTES
    defective = cutlass.select_(nbytes < Int64(defective_below), Int64(1), Int64(0))
    words = Array(made.get_ptr().ir_value(), dtype=Uint64)
    words[1] = words[1] & ~(Uint64(defective) << DEFECT_BIT)
    return made
