"""Kernel tables of ``quantize``, one per kind of scale of the result."""

from nvfp4_kernels.dispatch import KernelTable


def _table(op: str) -> KernelTable:
    return KernelTable(
        op,
        {
            ("cpu", "w4a4", "w4a8"): ("reference", "nvfp4_kernels.quantize.reference:quantize"),
            ("sm_90", "w4a8"): ("QuantizeFp8Sm90", "nvfp4_kernels.quantize.sm90:quantize"),
            ("sm_100", "w4a4"): ("QuantizeSm100", "nvfp4_kernels.quantize.sm100:quantize"),
        },
    )


KERNELS, PER_TOKEN_KERNELS = _table("quantize"), _table("quantize_per_token")
