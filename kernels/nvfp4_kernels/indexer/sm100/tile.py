"""Tile of the scoring kernel: a CTA's work and memory layout. Imports no CuTe.

Keys are the M side, one per lane of tensor memory; the heads of a few queries are the N side, one
per column. A key's score for a query is then a sum along the key's lane, computed by one thread.
Several queries share each loaded key.

Columns are (query, head) pairs, query by query: column ``c`` is head ``c % head_columns`` of query
``c // head_columns``. Padding heads are zeros, and columns of padding heads are never read.
"""

from dataclasses import dataclass
from typing import Literal

from nvfp4_kernels.sm100.limits import (
    ATOM_BYTES,
    ATOM_COLUMNS,
    ATOM_ROWS,
    MAX_SHARED_BYTES,
    MMA_BYTES,
    TENSOR_COLUMNS,
    widest_swizzle,
)

Format = Literal["nvfp4", "mxfp4", "fp8", "bf16"]
ELEMENT_BITS: dict[Format, int] = {"nvfp4": 4, "mxfp4": 4, "fp8": 8, "bf16": 16}
SCALE_BLOCKS: dict[Format, int] = {"nvfp4": 16, "mxfp4": 32}  # elements per scale of one byte
FACTOR_BYTES = 4  # an FP8 key's scale, float32
HEAD_DIMS = (64, 128, 256)
MAX_HEADS = 128

KEYS = 128  # of a key tile: one per lane of tensor memory
GROUP_WARPS = 4  # epilogue warps of a group, 32 lanes of tensor memory each
SCALE_WARPS = 2
GROUP_COLUMNS = 64  # columns whose weights fit in a thread's registers, of up to three groups
MAX_GROUPS = 3
MAX_ACCUMULATORS = 4
MAX_STAGES = 12
WORD = 4  # bytes of scales that the tensor core takes as one
LANE_BYTES = 4 * WORD  # of a lane in an atom: the words of rows ``lane + 32·i``
# Registers of a thread, where they move: 16 warps start with 128, all that an SM has.
EPILOGUE_REGISTERS = 144
OTHER_REGISTERS = 80
PAIRS = 8  # see ``ScoreTile.doubled``
BARRIER_BYTES = 2048  # mbarriers, the tensor memory's address, and padding for alignment


def head_columns(num_heads: int) -> int:
    """Number of columns per query: a multiple of 16 (PTX ISA, tcgen05.mma, N for M = 128)."""
    return -(-num_heads // 16) * 16


@dataclass(frozen=True)
class ScoreTile:
    """Tile of scores: keys times the heads of some queries.

    Attributes:
        fmt: format of queries and keys.
        head_dim: number of elements per key, and per head of a query.
        num_heads: number of heads per query.
        group_queries: number of queries per group; four epilogue warps compute a group's scores.
        groups: number of groups, each of which sums different columns of the same key tile.
        pingpong: number of sets of epilogue warps, which take key tiles alternately; each set has
            four warps per group.
        doubled: number of pairs of heads, of every 8 pairs, for which FMA units compute
            2·relu(x) = x + abs(x) instead of the ALU's maximum; the weights of these heads are
            halved.
        max_stages: upper bound on the number of stages of the ring of key tiles.
        visitor_bytes: bytes of shared memory of the visitor of the scores.
        scale_sets: number of buffers in tensor memory for key tiles' block scales, used
            alternately; see ``Tile`` of the GEMM.
    """

    fmt: Format
    head_dim: int
    num_heads: int
    group_queries: int = 1
    groups: int = 1
    pingpong: int = 1
    doubled: int = 0
    max_stages: int = MAX_STAGES
    visitor_bytes: int = 0
    scale_sets: int = 1

    def __post_init__(self) -> None:
        assert self.head_dim in HEAD_DIMS
        assert 1 <= self.num_heads <= MAX_HEADS
        assert self.groups * self.pingpong <= MAX_GROUPS
        assert 0 <= self.doubled <= PAIRS
        assert self.scale_sets in (1, 2)
        assert self.columns <= 256, "N of an MMA"
        assert self.group_columns <= GROUP_COLUMNS or self.groups * self.pingpong == 1, "registers"
        assert self.accumulators >= self.pingpong, "tensor memory"
        assert self.stages >= 2, "shared memory"

    @property
    def queries(self) -> int:
        """Number of queries per CTA."""
        return self.group_queries * self.groups

    @property
    def head_columns(self) -> int:
        """Number of columns per query: the heads, padded to a multiple of 16."""
        return head_columns(self.num_heads)

    @property
    def group_columns(self) -> int:
        """Number of columns per group of queries."""
        return self.group_queries * self.head_columns

    @property
    def columns(self) -> int:
        """Number of columns of an accumulator: the MMA's N."""
        return self.queries * self.head_columns

    @property
    def block_scaled(self) -> bool:
        """Whether each block of elements has a scale, which the tensor core applies."""
        return self.fmt in SCALE_BLOCKS

    @property
    def factored(self) -> bool:
        """Whether each key has a single scale, by which the key's scores are multiplied."""
        return self.fmt == "fp8"

    @property
    def scaled(self) -> bool:
        """Whether keys have scales: block scales, or one scale per key."""
        return self.block_scaled or self.factored

    # --- warps: epilogue, then MMA, load, and scale if there are any ----------------------------

    @property
    def epilogue_warps(self) -> int:
        """Number of epilogue warps, which are the first warps of the CTA."""
        return GROUP_WARPS * self.groups * self.pingpong

    @property
    def mma_warp(self) -> int:
        """Index of the MMA warp."""
        return self.epilogue_warps

    @property
    def load_warp(self) -> int:
        """Index of the TMA warp."""
        return self.mma_warp + 1

    @property
    def scale_warp(self) -> int:
        """Index of the first of the scale warps."""
        return self.load_warp + 1

    @property
    def threads(self) -> int:
        """Number of threads; whole warpgroups where setmaxnreg moves registers or keys have scales.

        Spare warps have no role but to give up registers.
        """
        others = GROUP_WARPS if self.moves_registers or self.scaled else 2
        return 32 * (self.epilogue_warps + others)

    @property
    def moves_registers(self) -> bool:
        """Whether registers move from the other warps to the epilogue (PTX ISA, setmaxnreg)."""
        return self.groups * self.pingpong == MAX_GROUPS

    # --- shared memory: rows are cut into chunks as wide as a swizzle ---------------------------

    @property
    def row_bytes(self) -> int:
        """Bytes of data per key, and per head of a query."""
        return self.head_dim * ELEMENT_BITS[self.fmt] // 8

    @property
    def chunk_bytes(self) -> int:
        """Bytes per chunk of a row: the widest swizzle that divides the row."""
        return widest_swizzle(self.row_bytes)

    @property
    def chunks(self) -> int:
        """Number of chunks per row."""
        return self.row_bytes // self.chunk_bytes

    @property
    def steps(self) -> int:
        """Number of MMAs per key tile, along D."""
        return self.row_bytes // MMA_BYTES

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales per key, and of block scales per head of a query, in global memory."""
        if self.block_scaled:
            return self.head_dim // SCALE_BLOCKS[self.fmt]
        return FACTOR_BYTES if self.factored else 0

    @property
    def scale_words(self) -> int:
        """Number of scale atoms along D, each with one word per row; 2 bytes take a whole word."""
        return -(-self.scale_bytes // WORD)

    @property
    def query_atoms(self) -> int:
        """Number of scale atoms along the columns of all queries."""
        return -(-self.columns // ATOM_ROWS)

    @property
    def key_bytes(self) -> int:
        """Bytes of data per key tile."""
        return KEYS * self.row_bytes

    @property
    def key_scale_bytes(self) -> int:
        """Bytes of scales per key tile in shared memory."""
        return self.scale_words * ATOM_BYTES

    @property
    def query_bytes(self) -> int:
        """Bytes of the CTA's queries' data in shared memory."""
        return self.columns * self.row_bytes

    @property
    def query_scale_bytes(self) -> int:
        """Bytes of the CTA's queries' block scales in shared memory."""
        return self.query_atoms * self.key_scale_bytes if self.block_scaled else 0

    @property
    def stages(self) -> int:
        """Number of stages of the ring of key tiles; even for FP8 with two ping-pong sets.

        Epilogue warps themselves wait for FP8 keys' scales. In a ring of odd depth a ping-pong set
        would wait for every second phase of a stage; these phases have equal parity, so that the
        warps could mistake an earlier phase for the expected phase.
        """
        left = MAX_SHARED_BYTES - self.fixed_bytes - self.visitor_bytes
        fit = min(left // self.stage_bytes, self.max_stages)
        return fit // self.pingpong * self.pingpong if self.factored else fit

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory per stage."""
        return self.key_bytes + self.key_scale_bytes

    @property
    def fixed_bytes(self) -> int:
        """Bytes of shared memory other than the ring and the visitor's."""
        return BARRIER_BYTES + self.query_bytes + self.query_scale_bytes

    # --- tensor memory: accumulators, then scales of keys and of queries ------------------------

    @property
    def scale_columns(self) -> int:
        """Number of tensor memory columns for the block scales of keys and queries."""
        sets = self.scale_sets + self.query_atoms
        atoms = self.scale_words * sets if self.block_scaled else 0
        return ATOM_COLUMNS * atoms

    @property
    def accumulators(self) -> int:
        """Number of accumulators in tensor memory, a multiple of the number of ping-pong sets."""
        fit = min((TENSOR_COLUMNS - self.scale_columns) // self.columns, MAX_ACCUMULATORS)
        return fit // self.pingpong * self.pingpong

    @property
    def key_scale_column(self) -> int:
        """First tensor memory column of the first set of keys' block scales."""
        return self.accumulators * self.columns

    @property
    def query_scale_column(self) -> int:
        """First tensor memory column of the queries' block scales."""
        return self.key_scale_column + self.scale_sets * self.scale_set_columns

    @property
    def scale_set_columns(self) -> int:
        """Number of tensor memory columns for the block scales of a key tile."""
        return ATOM_COLUMNS * self.scale_words

    @property
    def tensor_columns(self) -> int:
        """Number of tensor memory columns to allocate: a power of two, at least 32."""
        used = self.accumulators * self.columns + self.scale_columns
        return max(32, 1 << (used - 1).bit_length())
