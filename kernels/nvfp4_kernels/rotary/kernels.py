"""Kernel table of ``rotary_embedding``, and the supported dtypes."""

import torch

from nvfp4_kernels.dispatch import KernelTable

DTYPES = (torch.bfloat16, torch.float16)
KERNELS = KernelTable(
    "rotary_embedding",
    {
        ("cpu", "float"): (
            "reference",
            "nvfp4_kernels.rotary.reference:rotary_embedding",
        ),
        ("sm_90", "float"): (
            "RotaryEmbeddingSm90",
            "nvfp4_kernels.rotary.sm90:rotary_embedding",
        ),
    },
)
