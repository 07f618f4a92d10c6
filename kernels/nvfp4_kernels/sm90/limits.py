"""Limits of a Hopper SM, and sizes of its tensor core instructions. Imports no CuTe."""

from typing import Literal

from nvfp4_kernels.devices import SM_COUNTS

SMS = SM_COUNTS["sm_90"]  # of an H200
WARPGROUP = 128  # threads
ROW_BYTES = 128  # of a row in shared memory under the widest swizzle
REGISTERS = 65536  # of an SM
# 228 KB per SM; each resident CTA reserves 1 KB and can have at most 227 KB.
SM_SHARED_BYTES = 228 * 1024
CTA_RESERVED_BYTES = 1024
MAX_SHARED_BYTES = SM_SHARED_BYTES - CTA_RESERVED_BYTES
BARRIER_BYTES = 2048  # a CTA's mbarriers, and padding for alignment

# Dtypes of tensor core operands here.
ActDtype = Literal["bfloat16", "float16", "float8_e4m3fn"]
