"""Kernels of ``silu_mul_quantize`` and its per-token form."""

from nvfp4_kernels.dispatch import KernelTable

_OP = "silu_mul_quantize"
_PER_TOKEN = "silu_mul_quantize_per_token"

KERNELS = KernelTable(
    _OP,
    {
        ("cpu", "w4a4"): ("reference", f"nvfp4_kernels.{_OP}.reference:{_OP}"),
        ("sm_100", "w4a4"): ("SiluMulQuantizeSm100", f"nvfp4_kernels.{_OP}.sm100:{_OP}"),
    },
)
PER_TOKEN_KERNELS = KernelTable(
    _PER_TOKEN,
    {
        ("cpu", "w4a4"): ("reference", f"nvfp4_kernels.{_OP}.reference:{_PER_TOKEN}"),
        ("sm_100", "w4a4"): ("SiluMulQuantizeSm100", f"nvfp4_kernels.{_OP}.sm100:{_PER_TOKEN}"),
    },
)
