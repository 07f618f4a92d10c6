"""Kernel table of ``decode_attention``."""

from nvfp4_kernels.attention.decode.sm90 import tile as sm90
from nvfp4_kernels.attention.kernels import HEAD_DIMS as PAGED_HEAD_DIMS
from nvfp4_kernels.dispatch import KernelTable, Mode

MAX_GROUP = 16  # query heads of a KV head

DECODE_KERNELS = KernelTable(
    "decode_attention",
    {
        ("cpu", "float", "fp8_kv"): (
            "reference",
            "nvfp4_kernels.attention.decode.reference:decode_attention",
        ),
        ("sm_90", "float", "fp8_kv"): (
            "DecodeAttentionSm90",
            "nvfp4_kernels.attention.decode.sm90.launch:decode_attention",
        ),
    },
)

# Head sizes D that each kernel supports, a subset of the op's.
HEAD_DIMS: dict[tuple[str, Mode], tuple[int, ...]] = {
    ("cpu", "float"): PAGED_HEAD_DIMS["cpu", "float"],
    ("cpu", "fp8_kv"): PAGED_HEAD_DIMS["cpu", "fp8_kv"],
    ("sm_90", "float"): sm90.HEAD_DIMS,
    ("sm_90", "fp8_kv"): sm90.HEAD_DIMS,
}
