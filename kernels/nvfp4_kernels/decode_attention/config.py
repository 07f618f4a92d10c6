"""Kernels of ``decode_attention``."""

from nvfp4_kernels.dispatch import KernelTable

DECODE_KERNELS = KernelTable(
    "decode_attention",
    {
        ("cpu", "float"): (
            "reference",
            "nvfp4_kernels.decode_attention.reference:decode_attention",
        ),
        ("sm_90", "float"): (
            "DecodeAttentionSm90",
            "nvfp4_kernels.decode_attention.sm90:decode_attention",
        ),
    },
)
