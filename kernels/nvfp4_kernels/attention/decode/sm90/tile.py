"""Tile of decode attention with its shared memory layout, and kernel variants. Imports no CuTe.

A cluster processes one KV head of one sequence. Every warp runs its own main loop with its own
ring, 16 or 32 keys and values at a time; the warps' partial results are merged at the end.
"""

import math
from dataclasses import dataclass

from nvfp4_kernels.sm90.limits import (
    BARRIER_BYTES,
    CTA_RESERVED_BYTES,
    ROW_BYTES,
    SM_SHARED_BYTES,
    ActDtype,
)

KEYS = 16  # of a TMA box: the smallest page, and the K of the values' mma.sync
WARPS = 4  # of a CTA
THREADS = 32 * WARPS
MMA_HEADS = 8  # heads of the values' mma.sync: its N
MAX_SPLITS = 8  # larger clusters are not portable
MIN_STAGES = 3  # of each warp's ring where an SM has two CTAs
MAX_STAGES = 4
HEAD_DIMS = (64, 96, 128, 192, 256)
VECTOR_BYTES = 16  # of a lane's load and of a row of ldmatrix


@dataclass(frozen=True)
class DecodeTile:
    """Shape of a CTA's work.

    Attributes:
        head_dim: D.
        group: number of query heads per KV head, up to 16.
        splits: number of CTAs per cluster, which split the keys of a sequence.
        keys: number of keys per step of a warp: 16, or 32, which hides more latency.
        max_stages: maximum depth of a warp's ring; shared memory may allow less.
        fp8: whether keys and values are E4M3 rather than 16-bit.
    """

    head_dim: int
    group: int
    splits: int = 1
    keys: int = KEYS
    max_stages: int = MAX_STAGES
    fp8: bool = False

    def __post_init__(self) -> None:
        assert self.head_dim in HEAD_DIMS, self.head_dim
        assert 1 <= self.group <= 2 * MMA_HEADS, self.group
        assert self.splits in (1, 2, 4, MAX_SPLITS), self.splits
        assert self.keys in (KEYS, 2 * KEYS), self.keys
        assert self.stages >= 2, "a warp loads while it computes"
        assert self.part_bytes <= self.stages * self.stage_bytes, (
            "a partial result fits its warp's ring"
        )

    @property
    def head_tiles(self) -> int:
        """Number of MMA tiles of 8 heads."""
        return math.ceil(self.group / MMA_HEADS)

    @property
    def steps(self) -> int:
        """Number of MMA steps along D, of 16 elements each."""
        return self.head_dim // 16

    @property
    def warps(self) -> int:
        """Number of warps in the cluster."""
        return WARPS * self.splits

    @property
    def boxes(self) -> int:
        """Number of TMA boxes that a warp loads per step over the keys."""
        return self.keys // KEYS

    @property
    def step_stride(self) -> int:
        """Stride of a warp's steps, in boxes: one step of each warp of the cluster."""
        return self.warps * self.boxes

    # --- shared memory ------------------------------------------------------------------------

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of a key or value."""
        return 1 if self.fp8 else 2

    @property
    def vectors(self) -> int:
        """Number of 16-byte vectors of a key; those of its value follow."""
        return self.head_dim * self.element_bytes // VECTOR_BYTES

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk, a row under a swizzle: 128, the widest, or 64 of E4M3 with D = 96."""
        pair = 2 * self.vectors * VECTOR_BYTES
        return ROW_BYTES if pair % ROW_BYTES == 0 else ROW_BYTES // 2

    @property
    def chunks(self) -> int:
        """Number of chunks of a key and its value together."""
        return 2 * self.vectors * VECTOR_BYTES // self.chunk_bytes

    @property
    def box_bytes(self) -> int:
        """Bytes of a TMA box: 16 keys and their values."""
        return KEYS * self.chunks * self.chunk_bytes

    @property
    def stage_bytes(self) -> int:
        """Bytes of a step's keys and values."""
        return self.boxes * self.box_bytes

    @property
    def ctas_per_sm(self) -> int:
        """Number of resident CTAs per SM."""
        return 2 if self._stages(2) >= MIN_STAGES else 1

    @property
    def stages(self) -> int:
        """Number of stages of each warp's ring."""
        return min(self._stages(self.ctas_per_sm), self.max_stages)

    def _stages(self, ctas_per_sm: int) -> int:
        """Number of stages per ring that fit in shared memory with ``ctas_per_sm`` CTAs per SM."""
        left = SM_SHARED_BYTES // ctas_per_sm - CTA_RESERVED_BYTES - BARRIER_BYTES
        return left // (WARPS * self.stage_bytes)

    # --- partial result of a warp, float32, in its ring's memory --------------------------------

    @property
    def o_stride(self) -> int:
        """Stride between heads of O, in words; padded, so that heads start in different banks."""
        return self.head_dim + 4

    @property
    def state_offset(self) -> int:
        """Offset in words of row_max and row_sum of all heads, which follow O."""
        return MMA_HEADS * self.head_tiles * self.o_stride

    @property
    def part_bytes(self) -> int:
        """Bytes of a warp's partial result."""
        return 4 * (self.state_offset + 2 * MMA_HEADS * self.head_tiles)

    @property
    def split_vectors(self) -> int:
        """Maximum number of 4-element output vectors that a CTA of the cluster writes."""
        return math.ceil(self.group * self.head_dim // 4 / self.splits)


@dataclass(frozen=True)
class Variant:
    """Variant of the kernel.

    Attributes:
        dtype: dtype of queries, new keys and values, and result; unless the cache is E4M3, also of
            cached keys and values.
        page_size: keys per page, a power of two.
        window: whether a token sees only a window of the last keys.
        soft_cap: whether logits are capped.
        sinks: whether heads have attention sinks.
    """

    dtype: ActDtype
    page_size: int
    window: bool = False
    soft_cap: bool = False
    sinks: bool = False

    def __post_init__(self) -> None:
        assert self.page_size >= KEYS
        assert self.page_size & (self.page_size - 1) == 0
