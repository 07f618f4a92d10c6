"""What a CTA of the attention kernel computes at a time, and where it keeps it. No CuTe in here.

The rows of the M side are (token, query head of the group) pairs of one KV head: row ``r`` is head
``r % group`` of token ``r // group``, so that grouped queries of one token share every key.
"""

from dataclasses import dataclass
from typing import Literal

from nvfp4_kernels.sm100.limits import (
    CTA_RESERVED_BYTES,
    MMA_BYTES,
    SM_SHARED_BYTES,
    TENSOR_COLUMNS,
    WARP_ROWS,
    widest_swizzle,
)

ROWS = 128  # of a query tile: one per lane of tensor memory
KEYS = 128  # of a key tile
WARPS = 4  # that share a query tile
MAX_STAGES = 8
# Of a thread: 12 warps start with 168, as many as fit; the sum stays the same.
SOFTMAX_REGISTERS = 216
OTHER_REGISTERS = 72
BARRIER_BYTES = 2048  # mbarriers, the tensor memory's address, and what alignment costs

Dtype = Literal["bfloat16", "float16"]
Layout = Literal["dense", "varlen", "paged", "indexed"]


@dataclass(frozen=True)
class AttentionTile:
    """How the work is cut.

    Attributes:
        head_dim: D, a multiple of 16.
        query_tiles: of 128 rows, 1 or 2: with two, one's softmax runs under the other's MMAs.
        fp8: whether keys, values, quantised queries and probabilities are E4M3.
        max_stages: bound on the depth of the ring of key and value tiles.
        polynomial: of 16 exponentials, how many the FMA units compute instead of MUFU.
        resident: CTAs that share an SM, 1 or 2: with two, one's softmax runs under the other's.
        spread: whether a CTA has no more than 32 rows, of which each softmax warp has a copy: it
            weighs a quarter of every key tile, and what the four have added up is put together at
            the end. A softmax then takes a quarter of the time, and the MMAs what they took.
    """

    head_dim: int
    query_tiles: int = 1
    fp8: bool = False
    max_stages: int = MAX_STAGES
    polynomial: int = 0
    resident: int = 1
    spread: bool = False

    def __post_init__(self) -> None:
        assert self.head_dim % 16 == 0
        assert 16 <= self.head_dim <= 256
        assert self.row_bytes % MMA_BYTES == 0, "QK reduces over 32 bytes at a time"
        assert self.query_tiles in (1, 2)
        assert 0 <= self.polynomial <= 16
        assert self.resident in (1, 2)
        assert self.query_tiles == 1 or not self.spread
        assert self.tensor_columns <= TENSOR_COLUMNS // self.resident, "tensor memory"
        assert self.stages >= 2, "shared memory"

    @property
    def element_bytes(self) -> int:
        """Of keys, values and queries in shared memory."""
        return 1 if self.fp8 else 2

    @property
    def row_bytes(self) -> int:
        return self.head_dim * self.element_bytes

    @property
    def tile_rows(self) -> int:
        """Rows of a query tile that differ."""
        return WARP_ROWS if self.spread else ROWS

    @property
    def rows(self) -> int:
        """Rows of a CTA's queries."""
        return self.tile_rows * self.query_tiles

    @property
    def warp_keys(self) -> int:
        """Keys of a tile that one softmax warp weighs."""
        return KEYS // WARPS if self.spread else KEYS

    @property
    def threads(self) -> int:
        """Softmax warps, then the MMA and the load warp; two of a pair's warps only lend registers.

        Registers move between groups of four warps (PTX ISA, setmaxnreg).
        """
        return 32 * (WARPS * self.query_tiles + (4 if self.moves_registers else 2))

    @property
    def moves_registers(self) -> bool:
        """Whether softmax warps need more registers than an equal share."""
        return self.query_tiles == 2

    # --- shared memory: rows are cut into chunks as wide as a swizzle --------------------------

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a row side by side: the widest swizzle that divides it."""
        return widest_swizzle(self.row_bytes)

    @property
    def chunks(self) -> int:
        return self.row_bytes // self.chunk_bytes

    @property
    def chunk_elements(self) -> int:
        return self.chunk_bytes // self.element_bytes

    @property
    def stage_bytes(self) -> int:
        """Of one tile of keys or of values."""
        return KEYS * self.row_bytes

    @property
    def query_bytes(self) -> int:
        """Of one query tile."""
        return ROWS * self.row_bytes

    @property
    def stages(self) -> int:
        """Depth of the ring that key and value tiles share."""
        limit = SM_SHARED_BYTES // self.resident - CTA_RESERVED_BYTES
        left = limit - BARRIER_BYTES - self.query_tiles * self.query_bytes
        return min(left // self.stage_bytes, self.max_stages)

    # --- tensor memory: S of every query tile, then P where it has its own, then O -------------

    @property
    def probability_columns(self) -> int:
        """32-bit columns of P."""
        return KEYS * self.element_bytes // 4

    @property
    def score_buffers(self) -> int:
        """Tiles of S per query tile; a second one where nothing else runs under the softmax."""
        return 2 if self.query_tiles == self.resident == 1 else 1

    @property
    def own_probabilities(self) -> bool:
        """Whether P has columns of its own rather than S's: the next QK need not wait for PV."""
        columns = KEYS + self.probability_columns + self.head_dim
        return self.query_tiles == 2 and 2 * columns <= TENSOR_COLUMNS

    @property
    def early(self) -> bool:
        """Whether QK of the next tile goes before PV of this one."""
        return self.own_probabilities or self.score_buffers == 2

    def score_column(self, tile: int, buffer: int = 0) -> int:
        return (tile * self.score_buffers + buffer) * KEYS

    @property
    def _scores_end(self) -> int:
        return self.query_tiles * self.score_buffers * KEYS

    def probability_column(self, tile: int, buffer: int = 0) -> int:
        if self.own_probabilities:
            return self._scores_end + tile * self.probability_columns
        return self.score_column(tile, buffer)

    def output_column(self, tile: int) -> int:
        own = self.query_tiles * self.probability_columns if self.own_probabilities else 0
        return self._scores_end + own + tile * self.head_dim

    @property
    def columns_used(self) -> int:
        return self.output_column(self.query_tiles)

    @property
    def tensor_columns(self) -> int:
        """Columns to allocate: a power of two, at least 32."""
        return max(32, 1 << (self.columns_used - 1).bit_length())

    # --- numbers --------------------------------------------------------------------------------

    @property
    def slack(self) -> int:
        """O is rescaled only when a row's maximum has grown by more than this power of two."""
        return 4 if self.fp8 else 8

    @property
    def probability_shift(self) -> int:
        """P is stored times this power of two: with the slack, E4M3 reaches 256 of its 448."""
        return 4 if self.fp8 else 0


@dataclass(frozen=True)
class Variant:
    """What is computed; see ``attention``, ``paged_attention`` and ``sparse_attention``.

    Attributes:
        dtype: of queries and result.
        layout: of keys and values; indexed: every token is a sequence of its own, whose keys are on
            a list and in pages.
        page_size: keys of a page; 0 unless paged or indexed.
        causal, window, soft_cap, sinks: whether there is one.
        split: whether the keys are shared out over CTAs, whose float32 results are merged later.
    """

    dtype: Dtype = "bfloat16"
    layout: Layout = "dense"
    page_size: int = 0
    causal: bool = False
    window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    split: bool = False

    def __post_init__(self) -> None:
        assert (self.page_size > 0) == (self.layout in ("paged", "indexed"))
        assert self.layout != "paged" or self.page_size & (self.page_size - 1) == 0
        assert not (self.causal and self.layout == "indexed"), "a list is the only mask"
        assert self.causal or not self.window

    @property
    def box_rows(self) -> int:
        """Keys of one copy."""
        return min(self.page_size, KEYS) if self.page_size else KEYS

    @property
    def boxes(self) -> int:
        """Copies along a key tile."""
        return KEYS // self.box_rows
