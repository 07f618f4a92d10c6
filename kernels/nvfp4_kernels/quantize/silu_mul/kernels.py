"""Kernels of ``silu_mul_quantize`` and its per-token form."""

from nvfp4_kernels.dispatch import KernelTable

_MODULE = "nvfp4_kernels.quantize.silu_mul"
_OP = "silu_mul_quantize"
_PER_TOKEN = "silu_mul_quantize_per_token"

KERNELS = KernelTable(
    _OP,
    {
        ("cpu", "w4a4"): ("reference", f"{_MODULE}.reference:{_OP}"),
        ("sm_100", "w4a4"): ("SiluMulQuantizeSm100", f"{_MODULE}.sm100:{_OP}"),
    },
)
PER_TOKEN_KERNELS = KernelTable(
    _PER_TOKEN,
    {
        ("cpu", "w4a4"): ("reference", f"{_MODULE}.reference:{_PER_TOKEN}"),
        ("sm_100", "w4a4"): ("SiluMulQuantizeSm100", f"{_MODULE}.sm100:{_PER_TOKEN}"),
    },
)
