"""Kernels of ``rms_norm_quantize`` and its three siblings."""

from nvfp4_kernels.dispatch import KernelTable

_MODULE = "nvfp4_kernels.quantize.rms_norm"

KERNELS = {
    op: KernelTable(
        op,
        {
            ("cpu", "w4a4"): ("reference", f"{_MODULE}.reference:{op}"),
            ("sm_100", "w4a4"): ("RmsNormQuantizeSm100", f"{_MODULE}.sm100:{op}"),
        },
        {
            # torch adds up each row by itself.
            ("cpu", "w4a4"): ("reference", f"{_MODULE}.reference:{op}"),
            ("sm_100", "w4a4"): ("RmsNormQuantizeSm100", f"{_MODULE}.sm100:{op}_batch_invariant"),
        },
    )
    for op in (
        "rms_norm_quantize",
        "rms_norm_quantize_per_token",
        "add_rms_norm_quantize",
        "add_rms_norm_quantize_per_token",
    )
}
