"""Limits of an SM of Blackwell's data-centre GPUs, and tensor core sizes. Imports no CuTe."""

from nvfp4_kernels.devices import SM_COUNTS

SMS = SM_COUNTS["sm_100"]  # of a B200
CTA_ROWS = 128  # of an MMA's M side per CTA: one per lane of tensor memory
WARP_ROWS = 32  # lanes of tensor memory that one warp reaches
TENSOR_COLUMNS = 512  # of tensor memory, 32 bits each
MMA_BYTES = 32  # of K, the reduced dimension, that one MMA multiplies, in every format
MMA_K = 64  # E2M1 elements of K per MMA, and per 512-byte atom of scales
BLOCK = 16  # elements that share an NVFP4 scale
K_STEP = 32  # elements of K: rows of packed data are then multiples of 16 bytes, as TMA wants
ATOM_ROWS = 128
ATOM_BYTES = 512
ATOM_COLUMNS = 4  # of tensor memory per atom of scales
# 228 KB per SM; each resident CTA reserves 1 KB and can have at most 227 KB.
SM_SHARED_BYTES = 228 * 1024
CTA_RESERVED_BYTES = 1024
MAX_SHARED_BYTES = SM_SHARED_BYTES - CTA_RESERVED_BYTES


def widest_swizzle(row_bytes: int) -> int:
    """Width in bytes of the widest swizzle that divides a row of ``row_bytes`` bytes."""
    return next(width for width in (128, 64, 32) if row_bytes % width == 0)
