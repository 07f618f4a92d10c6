"""Kernels of the attention ops, and what they compute of a query and a key."""

from dataclasses import dataclass

from nvfp4_kernels.dispatch import KernelTable, Mode

MAX_HEAD_DIM = 256

ATTENTION_KERNELS = KernelTable(
    "attention",
    {
        ("cpu", "float"): ("reference", "nvfp4_kernels.attention.reference:attention"),
        ("sm_100", "float"): ("FmhaSm100", "nvfp4_kernels.attention.sm100:attention"),
    },
)
PAGED_KERNELS = KernelTable(
    "paged_attention",
    {
        ("cpu", "float"): ("reference", "nvfp4_kernels.attention.reference:paged_attention"),
        ("cpu", "fp8_kv"): ("reference", "nvfp4_kernels.attention.reference:paged_attention"),
        ("sm_100", "float"): ("FmhaSm100", "nvfp4_kernels.attention.sm100:paged_attention"),
        ("sm_100", "fp8_kv"): ("FmhaSm100", "nvfp4_kernels.attention.sm100:paged_attention"),
    },
)
SPARSE_KERNELS = KernelTable(
    "sparse_attention",
    {
        ("cpu", "float"): (
            "reference",
            "nvfp4_kernels.attention.sparse_reference:sparse_attention",
        ),
        ("cpu", "fp8_kv"): (
            "reference",
            "nvfp4_kernels.attention.sparse_reference:sparse_attention",
        ),
        ("sm_100", "float"): ("FmhaSm100", "nvfp4_kernels.attention.sparse_sm100:sparse_attention"),
        ("sm_100", "fp8_kv"): (
            "FmhaSm100",
            "nvfp4_kernels.attention.sparse_sm100:sparse_attention",
        ),
    },
)

# The D that each takes of those that the ops accept.
_MULTIPLES_OF_16 = tuple(range(16, MAX_HEAD_DIM + 1, 16))
HEAD_DIMS: dict[tuple[str, Mode], tuple[int, ...]] = {
    ("cpu", "float"): _MULTIPLES_OF_16,
    ("cpu", "fp8_kv"): _MULTIPLES_OF_16,
    ("sm_100", "float"): _MULTIPLES_OF_16,
    ("sm_100", "fp8_kv"): _MULTIPLES_OF_16[
        1::2
    ],  # its tensor core takes 32 E4M3 elements at a time
}


@dataclass(frozen=True)
class Scoring:
    """From ``q · k`` to a logit, and which keys a query sees.

    Attributes:
        scale: factor of ``q · k``.
        causal: no key after the query's position.
        window: keys that a query sees, its own included; None: all.
        soft_cap: ``c`` of ``c · tanh(logit / c)``, applied to the scaled product; None: no cap.
    """

    scale: float
    causal: bool
    window: int | None = None
    soft_cap: float | None = None

    @property
    def window_keys(self) -> int:
        """The window as kernels take it, 0 for none: an int32, which no sequence is longer than."""
        return min(self.window or 0, 2**31 - 1)
