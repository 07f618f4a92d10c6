"""Tile of the block-scaled GEMM: shared and tensor memory of a CTA. Imports no CuTe.

The tensor core multiplies an M side of 128 rows per CTA with an N side of 8 to 256 rows.
Activations are the M side or, with *swap_ab*, the N side: few tokens then waste no tensor memory,
and weights stream through the M side, which is always full.
"""

from dataclasses import dataclass
from typing import Literal

from nvfp4_kernels.activation import Activation
from nvfp4_kernels.devices import ELEMENT_BITS
from nvfp4_kernels.formats.terms import ONE_TERM, PACKED_ROWS, TermLayout
from nvfp4_kernels.gemm.arguments import MAX_SHARDS
from nvfp4_kernels.sm100.limits import (
    ATOM_BYTES,
    ATOM_COLUMNS,
    ATOM_ROWS,
    CTA_ROWS,
    MAX_SHARED_BYTES,
    MMA_K,
    TENSOR_COLUMNS,
    WARP_ROWS,
)

TILE_K = 256  # elements of K per stage: 128 bytes, the widest swizzle
TILE_BYTES = TILE_K // 2
ATOMS_K = TILE_K // MMA_K
EPILOGUE_WARPS = 4
STORE_SLOTS = 2
TRANSPOSE_PITCH = WARP_ROWS + 4  # floats: rows of 16 bytes that start in different banks
MAX_STAGES = 12
# mbarriers, the tensor memory's address, and padding for alignment; and the KB of static shared
# memory that ptxas reports for each kernel.
BARRIER_BYTES = 2048

Store = Literal["tma", "vector", "element"]
OutDtype = Literal["bfloat16", "float16", "float32", "nvfp4"]


@dataclass(frozen=True)
class Tile:
    """Shape of the work of a CTA, a pair of CTAs and a cluster.

    Attributes:
        columns: number of rows of the N side per tile, i.e. columns of the accumulator: 8 to 256.
            Tiles of 32, 64 or 96 may start within a 128-row atom of scales, at a multiple of 32
            rows, which is a whole column of tensor memory.
        weights: number of products that share the activations, each with an accumulator: 1, or 2
            for the gate and up projections.
        terms: NVFP4 terms of the activations. A stage holds a tile of each term and of each weight;
            MMAs of all terms add up in the weight's accumulator.
        swap_ab: whether the weights are the M side.
        two_cta: whether pairs of CTAs compute tiles of 256 rows, each CTA holding half of the N
            side.
        cluster_m, cluster_n: number of a cluster's CTAs along the M and the N side; CTAs multicast
            operands that they share.
        split_k: number of CTAs of a cluster that split K and then reduce; 1: no split-K.
        max_stages: maximum depth of the operand ring; shared memory may allow less.
        scale_sets: number of buffers in tensor memory for a K step's scales, used alternately. With
            one set, the copy of scales relies on the order of the tensor core's pipe; with two, the
            copy waits until the MMAs that read the set are done (see ``Mma``).
        collects: whether MMAs of several terms keep the weight's tile in the tensor core's
            collector buffer, if the weights are the M side.
        grouped: whether the GEMM is grouped: each matrix of the batch is a token tile with its
            expert's weights, and the number of tiles is read on the device.
        routed_before: if grouped, whether the routing was complete before the preceding launch
            began, see ``scheduler.prefetch_tile_count``.
    """

    columns: int = 128
    weights: int = 1
    swap_ab: bool = False
    two_cta: bool = False
    cluster_m: int = 1
    cluster_n: int = 1
    split_k: int = 1
    max_stages: int = MAX_STAGES
    scale_sets: int = 1
    terms: TermLayout = ONE_TERM
    collects: bool = True
    grouped: bool = False
    routed_before: bool = False

    def __post_init__(self) -> None:
        assert self.columns in (8, 16, 32, 64, 96, 128, 256), self.columns
        assert self.weights in (1, 2), self.weights
        assert self.scale_sets in (1, 2), self.scale_sets
        assert self.cluster_m % self.ctas == 0, "a pair of CTAs lies along the M side"
        assert self.split_k == 1 or self.cluster == self.split_k, "a split has no other cluster"
        # Scales of all terms in one atom: 32 rows, a column of tensor memory, for each.
        assert not self.terms.packed or (self.swap_ab and self.columns <= PACKED_ROWS)
        assert self.grouped or not self.routed_before
        assert self.cluster <= 8, "larger clusters are not portable"
        assert self.b_rows // self.sharers_b >= 8, "the N side is shared in groups of 8 rows"
        assert ATOMS_K % self.sharers_sfb == 0
        assert ATOMS_K % self.cluster_n == 0
        assert self.split_k == 1 or self.split_columns >= 1
        assert self.accumulator_columns + self.scale_columns <= TENSOR_COLUMNS, "tensor memory"

    @property
    def counts_first(self) -> bool:
        """Whether all roles first wait for the preceding kernel, which may count the tiles."""
        return self.grouped and not self.routed_before

    @property
    def ctas(self) -> int:
        """Number of CTAs that compute one tile."""
        return 2 if self.two_cta else 1

    @property
    def rows(self) -> int:
        """Number of rows of the M side per tile."""
        return CTA_ROWS * self.ctas

    @property
    def cluster(self) -> int:
        return self.cluster_m * self.cluster_n if self.split_k == 1 else self.split_k

    @property
    def coupled(self) -> bool:
        """Whether CTAs of the cluster multicast or pair up for MMAs; false with split-K."""
        return self.cluster > 1 and self.split_k == 1

    @property
    def m_operands(self) -> int:
        """Number of M-side tiles per stage: one per weight, or one per term of the activations."""
        return self.weights if self.swap_ab else self.terms.count

    @property
    def n_operands(self) -> int:
        """Number of N-side tiles per stage."""
        return self.terms.count if self.swap_ab else self.weights

    @property
    def n_scales(self) -> int:
        """Number of N-side tiles of scales per stage; packed terms share one tile."""
        return 1 if self.terms.packed else self.n_operands

    @property
    def b_rows(self) -> int:
        """Number of rows of each N-side operand in each CTA's shared memory."""
        return self.columns // self.ctas

    @property
    def sharers_b(self) -> int:
        """Number of CTAs that hold the same rows of the N side."""
        return self.cluster_m // self.ctas

    @property
    def sharers_sfb(self) -> int:
        """Number of CTAs that hold the same N-side scales; both CTAs of a pair hold all of them."""
        return self.cluster_m

    @property
    def atoms_n(self) -> int:
        """Maximum number of atoms of scales along the N side that a tile overlaps."""
        aligned = self.columns % ATOM_ROWS == 0 or ATOM_ROWS % self.columns == 0
        return -(-self.columns // ATOM_ROWS) + (not aligned)

    @property
    def split_columns(self) -> int:
        """Number of columns of an accumulator that each CTA finishes; all without split-K."""
        return self.columns // self.split_k

    # --- tensor memory ------------------------------------------------------------------------

    @property
    def accumulator_columns(self) -> int:
        return self.weights * self.columns

    @property
    def scale_set_columns(self) -> int:
        """Number of tensor memory columns for the scales of one K step."""
        return ATOM_COLUMNS * ATOMS_K * (self.m_operands + self.n_scales * self.atoms_n)

    @property
    def scale_columns(self) -> int:
        return self.scale_sets * self.scale_set_columns

    @property
    def overlap(self) -> int:
        """Number of columns that the two accumulators share.

        The second accumulator starts at the first's last ``overlap`` columns. The epilogue reads
        the shared columns first; the next tile's MMAs start as soon as these have been read.
        """
        return max(0, 2 * self.accumulator_columns + self.scale_columns - TENSOR_COLUMNS)

    @property
    def accumulators(self) -> int:
        """Number of tiles whose accumulators are in tensor memory at a time."""
        return 2 if self.overlap < self.accumulator_columns else 1

    @property
    def accumulator_stride(self) -> int:
        """Distance from the first accumulator to the second, in columns."""
        return self.accumulator_columns - self.overlap if self.accumulators == 2 else 0

    @property
    def scale_column(self) -> int:
        """First column of the scales; each set has the M side's scales, then the N side's."""
        return self.accumulator_columns + self.accumulator_stride

    @property
    def tensor_columns(self) -> int:
        """Number of tensor memory columns to allocate: a power of two, at least 32."""
        return max(32, 1 << (self.scale_column + self.scale_columns - 1).bit_length())

    # --- shared memory ------------------------------------------------------------------------

    @property
    def stage_bytes(self) -> int:
        """Bytes that arrive in one CTA's shared memory per stage."""
        rows = self.m_operands * CTA_ROWS + self.n_operands * self.b_rows
        atoms = ATOMS_K * (self.m_operands + self.n_scales * self.atoms_n)
        return rows * TILE_BYTES + atoms * ATOM_BYTES

    @property
    def loaded_bytes(self) -> float:
        """Bytes that a CTA loads per stage, i.e. its multicast slices."""
        scales = ATOMS_K * ATOM_BYTES
        m_side = (CTA_ROWS * TILE_BYTES + scales) / self.cluster_n
        n_side = self.n_operands * self.b_rows * TILE_BYTES / self.sharers_b
        n_side += self.n_scales * self.atoms_n * scales / self.sharers_sfb
        return self.m_operands * m_side + n_side

    def depth(self, epilogue_bytes: int) -> int:
        """Number of operand ring stages that fit next to the epilogue's shared memory.

        A kernel needs at least two.
        """
        left = MAX_SHARED_BYTES - BARRIER_BYTES - epilogue_bytes
        return min(left // self.stage_bytes, self.max_stages)


@dataclass(frozen=True)
class EpilogueConfig:
    """Configuration of the epilogue: dtypes, scaling, and the way the result is stored.

    Attributes:
        dtype: dtype of the result.
        store: way of storing a result whose rows run along the N side. "tma": rows of a multiple
            of 16 bytes, staged in shared memory; "vector": such rows, straight from registers;
            "element": rows of any width. With swap_ab only "element", whose stores then coalesce.
        box_bytes: bytes of each row in a box, with "tma": 64 or 128.
        shards: number of factors ``alpha`` along the weights' rows.
        bias: dtype of the bias, "" for none.
        row_scale: whether every token has its own factor.
        terms: layout of the terms of an NVFP4 result.
        activation: activation function; None: SiLU-mul for a pair of weights, no activation for a
            single weight.
    """

    dtype: OutDtype = "bfloat16"
    store: Store = "element"
    box_bytes: int = 128
    shards: int = 1
    bias: str = ""
    row_scale: bool = False
    terms: TermLayout = ONE_TERM
    activation: Activation | None = None

    def __post_init__(self) -> None:
        assert 1 <= self.shards <= MAX_SHARDS
        assert self.dtype != "nvfp4" or self.store != "tma"
        assert self.dtype == "nvfp4" or self.terms == ONE_TERM
        assert self.box_bytes in (64, 128), self.box_bytes

    @property
    def box_columns(self) -> int:
        """Number of elements per row of a box."""
        return self.box_bytes * 8 // ELEMENT_BITS[self.dtype]

    def chunk(self, tile: Tile) -> int:
        """Number of accumulator columns stored at once."""
        if tile.swap_ab:
            return min(WARP_ROWS, tile.split_columns)
        if self.dtype == "nvfp4":
            return 64  # four scales: 4 bytes of the blocked layout
        return self.box_columns if self.store == "tma" else WARP_ROWS

    def column_vectors(self, tile: Tile) -> int:
        """Number of float32 vectors of factors and biases along the accumulator's columns."""
        if tile.swap_ab:
            return int(self.row_scale)
        return int(self.shards > 1) + bool(self.bias) * tile.weights

    def vector_length(self, tile: Tile) -> int:
        """Number of floats of a column vector in shared memory, at least one per lane."""
        return max(WARP_ROWS, tile.columns)

    def shared_bytes(self, tile: Tile) -> int:
        """Bytes of the epilogue's shared memory: slots, column vectors, split-K partial sums."""
        slots = EPILOGUE_WARPS * self.slot_bytes(tile)
        vectors = EPILOGUE_WARPS * self.column_vectors(tile) * 4 * self.vector_length(tile)
        partials = 4 * CTA_ROWS * tile.accumulator_columns if tile.split_k > 1 else 0
        return slots + vectors + partials

    def slot_bytes(self, tile: Tile) -> int:
        """Bytes of one warp's store ring ("tma") or transpose buffer (NVFP4 with swap_ab), or 0."""
        if self.store == "tma":
            return STORE_SLOTS * WARP_ROWS * self.box_bytes
        transposed = self.dtype == "nvfp4" and tile.swap_ab
        return 4 * TRANSPOSE_PITCH * self.chunk(tile) if transposed else 0
