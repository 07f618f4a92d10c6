"""Kernel table of ``add_rms_norm``, and the supported dtypes."""

import torch

from nvfp4_kernels.dispatch import KernelTable

DTYPES = (torch.bfloat16, torch.float16)
KERNELS = KernelTable(
    "add_rms_norm",
    {
        ("cpu", "float"): ("reference", "nvfp4_kernels.norm.reference:add_rms_norm"),
        ("sm_90", "float"): ("AddRmsNormSm90", "nvfp4_kernels.norm.sm90:add_rms_norm"),
    },
)
