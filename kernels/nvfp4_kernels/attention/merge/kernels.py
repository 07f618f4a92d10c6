"""Kernel table of ``merge_segments``."""

from nvfp4_kernels.dispatch import KernelTable

KERNELS = KernelTable(
    "merge_segments",
    {
        ("cpu", "float"): ("reference", "nvfp4_kernels.attention.merge.reference:merge_segments"),
        ("sm_100", "float"): (
            "MergeSegmentsSm100",
            "nvfp4_kernels.attention.merge.sm100:merge_segments",
        ),
    },
)
