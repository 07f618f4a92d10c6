"""Tile of the attention kernel, its shared and tensor memory, and variants. Imports no CuTe.

The rows of the M side are (token, query head of the group) pairs of one KV head: row ``r`` is head
``r % group`` of token ``r // group``. All query heads of the group thus share every loaded key.
"""

from dataclasses import dataclass
from typing import Literal

from nvfp4_kernels.attention.sm100.polynomials import EXP2
from nvfp4_kernels.rotary.store import tile as rotary_store
from nvfp4_kernels.rotary.store.tile import HeadTile
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
WARPS = 4  # softmax warps of a query tile
MAX_STAGES = 8
# Registers per thread: 12 warps start with 168, as many as fit; the sum stays the same. With fewer
# for the other warps, ptxas spills the MMA warp's descriptors.
SOFTMAX_REGISTERS = 200
OTHER_REGISTERS = 104
EARLY_KEYS = 96  # of a key tile whose P is handed to the MMA warp before the rest is computed
STAGING_BYTES = 128  # of a row, where query warps load the next queries meanwhile
BARRIER_BYTES = 2048  # mbarriers, the tensor memory's address, and what alignment costs

Dtype = Literal["bfloat16", "float16"]
Layout = Literal["dense", "varlen", "paged", "indexed"]


@dataclass(frozen=True)
class AttentionTile:
    """Shape of a CTA's work.

    Attributes:
        head_dim: D, a multiple of 16.
        query_tiles: query tiles of 128 rows, 1 or 2: with two, the softmax of each overlaps with
            MMAs of the other.
        fp8: whether keys, values, quantised queries and probabilities are E4M3.
        max_stages: upper bound on the stages of the ring of key and value tiles.
        emulated_exp2: number of exponentials of every 16 that FMA units emulate, to relieve the
            MUFU.
        ctas_per_sm: resident CTAs, 1 or 2: with two, the softmax of each overlaps with MMAs of the
            other.
        warp_split_kv: whether the four softmax warps split the keys. A CTA then has at most 32
            rows; each warp has a copy of these rows and a quarter of every key tile, and the
            epilogue combines the warps' results. The softmax takes a quarter of the time, and the
            MMAs take no longer.
        batch_invariant: whether row_max of a row depends on the row's logits alone. Else row_max is
            updated together with other rows of the warp, which is faster.
    """

    head_dim: int
    query_tiles: int = 1
    fp8: bool = False
    max_stages: int = MAX_STAGES
    emulated_exp2: int = 0
    ctas_per_sm: int = 1
    warp_split_kv: bool = False
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        assert self.head_dim % 16 == 0
        assert 16 <= self.head_dim <= 256
        assert self.row_bytes % MMA_BYTES == 0, "QK reduces over 32 bytes at a time"
        assert self.query_tiles in (1, 2)
        assert 0 <= self.emulated_exp2 <= 16
        assert self.ctas_per_sm in (1, 2)
        assert self.query_tiles == 1 or not self.warp_split_kv
        assert self.tensor_columns <= TENSOR_COLUMNS // self.ctas_per_sm, "tensor memory"
        assert self.stages >= 2, "shared memory"

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of Q, K and V in shared memory."""
        return 1 if self.fp8 else 2

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of Q, K or V in shared memory."""
        return self.head_dim * self.element_bytes

    @property
    def tile_rows(self) -> int:
        """Number of distinct rows per query tile."""
        return WARP_ROWS if self.warp_split_kv else ROWS

    @property
    def rows(self) -> int:
        """Number of query rows per CTA."""
        return self.tile_rows * self.query_tiles

    @property
    def warp_keys(self) -> int:
        """Number of keys of a key tile that one softmax warp processes."""
        return KEYS // WARPS if self.warp_split_kv else KEYS

    @property
    def part_keys(self) -> tuple[int, ...]:
        """Number of keys of each part of a key tile; P is passed to the MMA warp part by part.

        With two query tiles, a key tile has two parts, so that the tensor core need not wait for
        the last columns of P. It has one part with one query tile, or if QK of the next key tile
        can be issued before PV of the current tile. The parts are halves if QK has parts too: the
        softmax of each half then hides the other's MMAs.
        """
        if self.query_tiles == 1 or self.qk_before_pv:
            return (KEYS,)
        if self.split_s:
            return KEYS // 2, KEYS // 2
        return EARLY_KEYS, KEYS - EARLY_KEYS

    @property
    def parts(self) -> int:
        """Number of parts into which a key tile is divided for P."""
        return len(self.part_keys)

    @property
    def split_s(self) -> bool:
        """Whether QK, like P, is in parts: softmax of one part overlaps with MMAs of the other.

        QK takes longer in parts, since each part reads all of Q, but with E4M3 the softmax takes
        even longer.
        """
        return self.fp8 and self.query_tiles == 2 and not self.qk_before_pv

    @property
    def s_parts(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the parts of P that come from each part of S."""
        every = tuple(range(self.parts))
        return tuple((part,) for part in every) if self.split_s else (every,)

    def first_key(self, part: int) -> int:
        """First key of a part, counted from the key tile's first key."""
        return sum(self.part_keys[:part])

    @property
    def threads(self) -> int:
        """Number of threads: softmax, MMA and load warps, and two query warps if reallocating.

        Registers are reallocated between warpgroups (PTX ISA, setmaxnreg): the two query warps
        complete the last warpgroup.
        """
        return 32 * (WARPS * self.query_tiles + (4 if self.reallocates_registers else 2))

    @property
    def uses_clc(self) -> bool:
        """Whether a CTA has a CLC scheduler, which takes work tiles of CTAs not yet started.

        Such a CTA also has query warps, which copy the queries of the next work tile early.
        """
        return self.query_tiles == 2

    @property
    def quantizes_copied(self) -> bool:
        """Whether query warps copy queries in 16 bits, for softmax warps to quantise to E4M3.

        The two query warps alone would be too slow to quantise a work tile's queries in time.
        """
        return self.uses_clc and self.fp8

    @property
    def stages_beside(self) -> bool:
        """Whether the result is staged in separate memory, as the next queries already load."""
        return self.uses_clc and not self.fp8

    @property
    def reallocates_registers(self) -> bool:
        """Whether softmax warps take registers from the other warps (setmaxnreg)."""
        return self.query_tiles == 2

    # --- shared memory: rows are cut into chunks as wide as a swizzle --------------------------

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a row in one chunk: the widest swizzle that divides the row."""
        return widest_swizzle(self.row_bytes)

    @property
    def chunks(self) -> int:
        """Number of chunks per row."""
        return self.row_bytes // self.chunk_bytes

    @property
    def chunk_elements(self) -> int:
        """Number of elements per chunk of a row."""
        return self.chunk_bytes // self.element_bytes

    @property
    def stage_bytes(self) -> int:
        """Bytes of one tile of keys or of values."""
        return KEYS * self.row_bytes

    @property
    def query_bytes(self) -> int:
        """Bytes of one query tile in shared memory."""
        return ROWS * self.row_bytes

    @property
    def copied_row_bytes(self) -> int:
        """Bytes of a 16-bit row of queries, as query warps copy it."""
        return 2 * self.head_dim

    @property
    def copied_bytes(self) -> int:
        """Bytes of one query tile in 16 bits before quantisation; 0 unless ``quantizes_copied``."""
        return ROWS * self.copied_row_bytes if self.quantizes_copied else 0

    @property
    def staging_row_bytes(self) -> int:
        """Bytes of shared memory in which the epilogue stages one output row.

        The output row overwrites the query's row; if the next queries already load into that
        memory, a separate buffer holds ``STAGING_BYTES`` of the output row at a time.
        """
        return STAGING_BYTES if self.stages_beside else self.row_bytes

    @property
    def staging_bytes(self) -> int:
        """Bytes of separate memory for the staged rows of one query tile; 0 if none."""
        return ROWS * STAGING_BYTES if self.stages_beside else 0

    @property
    def stages(self) -> int:
        """Number of stages of the ring that key and value tiles share."""
        limit = SM_SHARED_BYTES // self.ctas_per_sm - CTA_RESERVED_BYTES
        beside = self.query_bytes + self.copied_bytes + self.staging_bytes
        left = limit - BARRIER_BYTES - self.query_tiles * beside
        return min(left // self.stage_bytes, self.max_stages)

    # --- tensor memory: S of every query tile, then P if in separate columns, then O
    # ---------------

    @property
    def p_columns(self) -> int:
        """Number of 32-bit tensor memory columns for P of a query tile."""
        return KEYS * self.element_bytes // 4

    @property
    def s_stages(self) -> int:
        """Number of stages of S per query tile: two if no other MMAs would hide the softmax."""
        return 2 if self.query_tiles == self.ctas_per_sm == 1 else 1

    @property
    def separate_p(self) -> bool:
        """Whether P has columns of its own, outside S: the next QK then need not wait for PV."""
        columns = KEYS + self.p_columns + self.head_dim
        return self.query_tiles == 2 and 2 * columns <= TENSOR_COLUMNS

    @property
    def qk_before_pv(self) -> bool:
        """Whether QK of the next key tile is issued before PV of the current key tile."""
        return self.separate_p or self.s_stages == 2

    def s_column(self, tile: int, stage: int = 0) -> int:
        """First column of a stage of S of a query tile."""
        return (tile * self.s_stages + stage) * KEYS

    @property
    def _s_end(self) -> int:
        return self.query_tiles * self.s_stages * KEYS

    def p_column(self, tile: int, stage: int = 0) -> int:
        """First column of P of a query tile, for a stage of S."""
        if self.separate_p:
            return self._s_end + tile * self.p_columns
        return self.s_column(tile, stage)

    def p_offset(self, part: int) -> int:
        """Column offset of a part in P; if S is in parts, each part of P lies in its part of S."""
        first = self.first_key(part)
        return first if self.split_s else first * self.element_bytes // 4

    def o_column(self, tile: int) -> int:
        """First column of O of a query tile."""
        own = self.query_tiles * self.p_columns if self.separate_p else 0
        return self._s_end + own + tile * self.head_dim

    @property
    def columns_used(self) -> int:
        """Number of tensor memory columns for S, P and O of all query tiles."""
        return self.o_column(self.query_tiles)

    @property
    def tensor_columns(self) -> int:
        """Number of columns to allocate: a power of two, at least 32 (PTX ISA, tcgen05.alloc)."""
        return max(32, 1 << (self.columns_used - 1).bit_length())

    # --- numbers --------------------------------------------------------------------------------

    @property
    def rescale_threshold(self) -> int:
        """Growth of a row's largest base-2 logit above which row_max grows and O is rescaled."""
        return 4 if self.fp8 else 8

    @property
    def exp2_degree(self) -> int:
        """Degree of the polynomial that emulates exponentials: lower where FMA units are busy."""
        return 3 if self.fp8 and self.query_tiles == 2 else 4

    @property
    def exp2_error(self) -> float:
        """Largest relative error of an emulated exponential.

        The error is at most 1/600 of the rounding error of P in E4M3 and bfloat16, and 1/160 in
        float16. Row sums of P have the same relative error, and the LSE an equal absolute error.
        """
        return EXP2[self.exp2_degree].error

    def p_limit(self, dtype: Dtype) -> float:
        """Bound on sums of speculative P, above which P is recomputed; in E4M3, the maximum."""
        return 448.0 if self.fp8 else 2.0 ** (self.rescale_threshold + self.p_shift(dtype))

    def p_shift(self, dtype: Dtype) -> int:
        """Binary exponent of P's scale, with queries of ``dtype``.

        P of a logit ``rescale_threshold`` above row_max is 2^8 in E4M3 and 2^15 in float16: a
        larger scale could overflow, a smaller scale would flush more small P to zero.
        """
        if self.fp8:
            return 4
        return 7 if dtype == "float16" else 0


@dataclass(frozen=True)
class Rotation:
    """Rotary embedding of queries and new keys, and the store of these keys to the cache.

    Attributes:
        heads: thread layout of a head.
        store: variant of ``rotary_store``; its ``position_dtype`` is not used.
    """

    heads: HeadTile
    store: rotary_store.Variant


@dataclass(frozen=True)
class Variant:
    """Variant of the kernel; see ``attention``, ``paged_attention`` and ``sparse_attention``.

    Attributes:
        dtype: dtype of queries and result.
        layout: layout of keys and values; indexed: every token is a sequence, with a list of keys
            in pages.
        page_size: number of keys per page; 0 unless paged or indexed.
        causal, window, soft_cap, sinks: whether the launch has a causal mask, a window, a soft cap
            and sinks.
        split: split-KV: whether CTAs split the keys and store float32 partial results.
        quantized: whether the result is NVFP4, rounded to ``dtype`` first.
        merges: whether the last CTA of a block of rows merges the splits; else a later kernel does.
        rotation: rotary embedding of queries and new keys, in decodes; None: already applied.
    """

    dtype: Dtype = "bfloat16"
    layout: Layout = "dense"
    page_size: int = 0
    causal: bool = False
    window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    split: bool = False
    quantized: bool = False
    merges: bool = False
    rotation: Rotation | None = None

    def __post_init__(self) -> None:
        assert self.split or not self.merges
        assert self.rotation is None or (self.layout == "paged" and self.causal)
        if self.split and not self.merges:
            assert not self.quantized, "the merge quantises"
            assert not self.sinks, "the merge adds them"
        assert (self.page_size > 0) == (self.layout in ("paged", "indexed"))
        assert self.layout != "paged" or self.page_size & (self.page_size - 1) == 0
        assert not (self.causal and self.layout == "indexed"), "a list is the only mask"
        assert self.causal or not self.window

    @property
    def stores_codes(self) -> bool:
        """Whether the epilogue stores NVFP4 codes: never for partial results."""
        return self.quantized and not self.split

    @property
    def box_rows(self) -> int:
        """Number of keys per TMA box."""
        return min(self.page_size, KEYS) if self.page_size else KEYS

    @property
    def boxes(self) -> int:
        """Number of TMA boxes of rows per key tile."""
        return KEYS // self.box_rows
