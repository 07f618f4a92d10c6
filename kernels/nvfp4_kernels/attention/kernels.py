"""Kernel tables of the attention ops, and the supported head sizes."""

from nvfp4_kernels.dispatch import Entries, KernelTable, Mode
from nvfp4_kernels.heads import MAX_HEAD_DIM

MAX_ROTARY_ROWS = 128  # query rows of a KV head in one CTA, which also stores the tokens' keys
KEY_MULTIPLE = 128  # granularity of the longest length: launches with the same multiple are alike

ATTENTION_KERNELS = KernelTable(
    "attention",
    {
        ("cpu", "float"): ("reference", "nvfp4_kernels.attention.reference:attention"),
        ("sm_100", "float"): ("FmhaSm100", "nvfp4_kernels.attention.sm100.launch:attention"),
    },
)
_PAGED: Entries = {
    ("cpu", "float", "fp8_kv"): (
        "reference",
        "nvfp4_kernels.attention.reference:paged_attention",
    ),
    ("sm_100", "float", "fp8_kv"): (
        "FmhaSm100",
        "nvfp4_kernels.attention.sm100.launch:paged_attention",
    ),
}
_ROTARY: Entries = {
    ("cpu", "float", "fp8_kv"): (
        "reference",
        "nvfp4_kernels.attention.rotary_reference:rotary_attention",
    ),
    ("sm_100", "float", "fp8_kv"): (
        "FmhaSm100",
        "nvfp4_kernels.attention.sm100.launch_rotary:rotary_attention",
    ),
}
# These kernels take ``batch_invariant``.
PAGED_KERNELS = KernelTable("paged_attention", _PAGED, _PAGED)
ROTARY_KERNELS = KernelTable("rotary_attention", _ROTARY, _ROTARY)
SPARSE_KERNELS = KernelTable(
    "sparse_attention",
    {
        ("cpu", "float", "fp8_kv"): (
            "reference",
            "nvfp4_kernels.attention.sparse_reference:sparse_attention",
        ),
        ("sm_100", "float", "fp8_kv"): (
            "FmhaSm100",
            "nvfp4_kernels.attention.sm100.launch_sparse:sparse_attention",
        ),
    },
)

# Head sizes D that each kernel supports, a subset of the ops'.
_MULTIPLES_OF_16 = tuple(range(16, MAX_HEAD_DIM + 1, 16))
HEAD_DIMS: dict[tuple[str, Mode], tuple[int, ...]] = {
    ("cpu", "float"): _MULTIPLES_OF_16,
    ("cpu", "fp8_kv"): _MULTIPLES_OF_16,
    ("sm_100", "float"): _MULTIPLES_OF_16,
    # One MMA multiplies 32 E4M3 elements of D.
    ("sm_100", "fp8_kv"): tuple(range(32, MAX_HEAD_DIM + 1, 32)),
}
