"""Compile-time variants of the scoring kernel: contiguous or paged keys. Imports no CuTe."""

from dataclasses import dataclass

from nvfp4_kernels.indexer.sm100.tile import KEYS


@dataclass(frozen=True)
class Variant:
    """Compile-time variant of the scoring kernel.

    Attributes:
        page_size: number of keys per page, a power of two of at least 16; 0: contiguous keys.
        query_factors: whether FP8 queries' scales multiply the weights.
    """

    page_size: int = 0
    query_factors: bool = False

    def __post_init__(self) -> None:
        assert self.page_size == 0 or self.page_size >= 16
        assert self.page_size & (self.page_size - 1) == 0

    @property
    def paged(self) -> bool:
        """Whether keys are in pages of a cache."""
        return self.page_size > 0

    @property
    def box_rows(self) -> int:
        """Number of keys per TMA box."""
        return min(self.page_size, KEYS) if self.paged else KEYS

    @property
    def boxes(self) -> int:
        """Number of TMA boxes along the keys of a key tile."""
        return KEYS // self.box_rows
