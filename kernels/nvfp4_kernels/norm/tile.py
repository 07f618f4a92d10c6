"""Limits of the thread layout of ``add_rms_norm``. Imports no CuTe."""

from nvfp4_kernels.device.row_vectors.tile import MAX_THREADS, VECTOR

MAX_STEPS = 4  # 32 float32 sums stay in a thread's registers
MAX_K = MAX_THREADS * MAX_STEPS * VECTOR
