"""What a CTA of decode attention computes, and where it keeps it. No CuTe in here.

A cluster has one KV head of one sequence. Every warp of it decodes on its own, with a ring of its
own: it takes 16 or 32 keys and their values at a time, and what it has in the end is merged with
what the others have.
"""

import math
from dataclasses import dataclass

from nvfp4_kernels.gemm.sm90.tile import BARRIER_BYTES
from nvfp4_kernels.sm90.limits import CTA_RESERVED_BYTES, ROW_BYTES, SM_SHARED_BYTES, ActDtype

KEYS = 16  # of a box, brought at once: the smallest page, the K of an mma.sync with the values
WARPS = 4  # of a CTA
THREADS = 32 * WARPS
EIGHT = 8  # heads of an mma.sync with the values: its N
MAX_SPLITS = 8  # larger clusters are not portable
MIN_STAGES = 3  # of each warp, where an SM has two CTAs
MAX_STAGES = 4
HEAD_DIMS = (64, 128, 256)
ROW_WORDS = ROW_BYTES // 4  # of a chunk
CHUNK = ROW_BYTES // 2  # elements


@dataclass(frozen=True)
class DecodeTile:
    """How the work is cut.

    Attributes:
        head_dim: D.
        group: query heads of a KV head, up to 16.
        splits: CTAs of a cluster, which share the keys of a sequence.
        keys: of a warp's step: 16, or 32, which hide more of each other's latency.
        max_stages: bound on the depth of a warp's ring, which otherwise takes the memory left.
    """

    head_dim: int
    group: int
    splits: int = 1
    keys: int = KEYS
    max_stages: int = MAX_STAGES

    def __post_init__(self) -> None:
        assert self.head_dim in HEAD_DIMS, self.head_dim
        assert 1 <= self.group <= 2 * EIGHT, self.group
        assert self.splits in (1, 2, 4, MAX_SPLITS), self.splits
        assert self.keys in (KEYS, 2 * KEYS), self.keys
        assert self.stages >= 2, "a warp loads while it computes"
        assert self.part_bytes <= self.stages * self.stage_bytes, "a part lies in its warp's ring"

    @property
    def eights(self) -> int:
        """Tiles of 8 heads."""
        return math.ceil(self.group / EIGHT)

    @property
    def steps(self) -> int:
        """Of 16 elements of D each."""
        return self.head_dim // 16

    @property
    def warps(self) -> int:
        """Of the cluster."""
        return WARPS * self.splits

    @property
    def boxes(self) -> int:
        """Of a step."""
        return self.keys // KEYS

    @property
    def round(self) -> int:
        """Boxes that the cluster takes at once: from a warp's step to its next."""
        return self.warps * self.boxes

    # --- shared memory ------------------------------------------------------------------------

    @property
    def chunks(self) -> int:
        """Of a key and its value, each as wide as the widest swizzle."""
        return 4 * self.head_dim // ROW_BYTES

    @property
    def box_bytes(self) -> int:
        """Of 16 keys and their values."""
        return KEYS * self.chunks * ROW_BYTES

    @property
    def stage_bytes(self) -> int:
        """Of a step."""
        return self.boxes * self.box_bytes

    @property
    def resident(self) -> int:
        """CTAs of an SM."""
        return 2 if self._stages(2) >= MIN_STAGES else 1

    @property
    def stages(self) -> int:
        """Of each warp's ring."""
        return min(self._stages(self.resident), self.max_stages)

    def _stages(self, resident: int) -> int:
        """For which there is memory."""
        left = SM_SHARED_BYTES // resident - CTA_RESERVED_BYTES - BARRIER_BYTES
        return left // (WARPS * self.stage_bytes)

    # --- what a warp has in the end, as float32 in the place of its ring ------------------------

    @property
    def pitch(self) -> int:
        """From a head's sums to the next one's: a fragment's heads start in different banks."""
        return self.head_dim + 4

    @property
    def sums_at(self) -> int:
        """Where, after O, peak and weight of each head lie."""
        return EIGHT * self.eights * self.pitch

    @property
    def part_bytes(self) -> int:
        return 4 * (self.sums_at + 2 * EIGHT * self.eights)

    @property
    def share(self) -> int:
        """Groups of 4 elements of the result that each CTA of the cluster finishes."""
        return math.ceil(self.group * self.head_dim // 4 / self.splits)


@dataclass(frozen=True)
class Variant:
    """What is compiled in.

    Attributes:
        dtype: of queries, keys, values and result.
        page_size: keys of a page, a power of two.
        window: whether tokens see some keys only.
        soft_cap: whether logits are capped.
        sinks: whether heads have sinks.
    """

    dtype: ActDtype
    page_size: int
    window: bool = False
    soft_cap: bool = False
    sinks: bool = False

    def __post_init__(self) -> None:
        assert self.page_size >= KEYS
        assert self.page_size & (self.page_size - 1) == 0
