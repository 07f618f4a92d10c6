"""Kernel tables of ``silu_mul_quantize``, one per kind of scale of the result."""

from nvfp4_kernels.dispatch import KernelTable

_MODULE = "nvfp4_kernels.quantize.silu_mul"
_OP = "silu_mul_quantize"


def _table(op: str) -> KernelTable:
    return KernelTable(
        op,
        {
            ("cpu", "w4a4", "w4a8"): ("reference", f"{_MODULE}.reference:{_OP}"),
            ("sm_90", "w4a8"): ("SiluMulQuantizeFp8Sm90", f"{_MODULE}.sm90:{_OP}"),
            ("sm_100", "w4a4"): ("SiluMulQuantizeSm100", f"{_MODULE}.sm100:{_OP}"),
        },
    )


KERNELS, PER_TOKEN_KERNELS = _table(_OP), _table(f"{_OP}_per_token")
