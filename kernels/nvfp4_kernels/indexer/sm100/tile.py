"""What a CTA of the scoring kernel computes at a time, and where it keeps it. No CuTe in here.

Keys are the M side, one to a lane of tensor memory; the heads of some queries are the N side, one
to a column. A key's score for a query is then a sum along the key's own lane: a thread forms it
alone. Several queries share each key that is loaded.

Columns are (query, head) pairs, those of a query side by side: column ``c`` is head
``c % head_columns`` of query ``c // head_columns``. Heads that a query lacks are zeros, and nobody
reads their columns.
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
SCALE_BLOCKS: dict[Format, int] = {"nvfp4": 16, "mxfp4": 32}  # elements, of scales of one byte
FACTOR_BYTES = 4  # of an FP8 key's scale, which is float32
HEAD_DIMS = (64, 128, 256)
MAX_HEADS = 128

KEYS = 128  # of a key tile: one per lane of tensor memory
GROUP_WARPS = 4  # that share a key tile, 32 lanes each
SCALE_WARPS = 2
GROUP_COLUMNS = 64  # whose weights a thread has registers for, and those of two more groups
MAX_GROUPS = 3
MAX_ACCUMULATORS = 4
MAX_STAGES = 12
WORD = 4  # scales that the tensor core takes as one
LANE_BYTES = 4 * WORD  # of an atom: the words of rows ``lane + 32·i``
# Of a thread, where they move: 16 warps start with 128, as many as fit; the sum stays the same.
EPILOGUE_REGISTERS = 144
OTHER_REGISTERS = 80
PAIRS = 8  # see ``ScoreTile.doubled``
BARRIER_BYTES = 2048  # mbarriers, the tensor memory's address, and what alignment costs


def head_columns(heads: int) -> int:
    """Columns of a query: N is a multiple of 16 (PTX ISA, tcgen05.mma, M = 128)."""
    return -(-heads // 16) * 16


@dataclass(frozen=True)
class ScoreTile:
    """How the work is cut.

    Attributes:
        fmt: of queries and keys.
        head_dim: D.
        heads: of a query.
        group_queries: queries of a group of four epilogue warps.
        groups: of queries: each sums other columns of the same key tile.
        turns: sets of such groups, which take key tiles in turn.
        doubled: of 8 pairs of heads, those for which the FMA units form 2·relu(x) = x + abs(x)
            instead of the ALU the maximum; their weights are halved.
        max_stages: bound on the depth of the ring of key tiles.
        consumer_bytes: shared memory of what takes the scores.
    """

    fmt: Format
    head_dim: int
    heads: int
    group_queries: int = 1
    groups: int = 1
    turns: int = 1
    doubled: int = 0
    max_stages: int = MAX_STAGES
    consumer_bytes: int = 0

    def __post_init__(self) -> None:
        assert self.head_dim in HEAD_DIMS
        assert 1 <= self.heads <= MAX_HEADS
        assert self.groups * self.turns <= MAX_GROUPS
        assert 0 <= self.doubled <= PAIRS
        assert self.columns <= 256, "N of an MMA"
        assert self.group_columns <= GROUP_COLUMNS or self.groups * self.turns == 1, "registers"
        assert self.accumulators >= self.turns, "tensor memory"
        assert self.stages >= 2, "shared memory"

    @property
    def queries(self) -> int:
        """Of a CTA."""
        return self.group_queries * self.groups

    @property
    def head_columns(self) -> int:
        return head_columns(self.heads)

    @property
    def group_columns(self) -> int:
        return self.group_queries * self.head_columns

    @property
    def columns(self) -> int:
        """N: columns of an accumulator."""
        return self.queries * self.head_columns

    @property
    def block_scaled(self) -> bool:
        """Whether blocks have scales, which the tensor core multiplies."""
        return self.fmt in SCALE_BLOCKS

    @property
    def factored(self) -> bool:
        """Whether keys have a scale each, which multiplies their scores."""
        return self.fmt == "fp8"

    @property
    def scaled(self) -> bool:
        """Whether keys have scales at all."""
        return self.block_scaled or self.factored

    # --- warps: epilogue, then MMA, load, and scale if there are any ----------------------------

    @property
    def epilogue_warps(self) -> int:
        return GROUP_WARPS * self.groups * self.turns

    @property
    def mma_warp(self) -> int:
        return self.epilogue_warps

    @property
    def load_warp(self) -> int:
        return self.mma_warp + 1

    @property
    def scale_warp(self) -> int:
        return self.load_warp + 1

    @property
    def threads(self) -> int:
        """Registers move between groups of four warps, some of which only lend theirs."""
        others = GROUP_WARPS if self.moves_registers or self.scaled else 2
        return 32 * (self.epilogue_warps + others)

    @property
    def moves_registers(self) -> bool:
        """Whether epilogue warps need more than an equal share (PTX ISA, setmaxnreg)."""
        return self.groups * self.turns == MAX_GROUPS

    # --- shared memory: rows are cut into chunks as wide as a swizzle ---------------------------

    @property
    def row_bytes(self) -> int:
        """Of a key's or query's data."""
        return self.head_dim * ELEMENT_BITS[self.fmt] // 8

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a row side by side: the widest swizzle that divides it."""
        return widest_swizzle(self.row_bytes)

    @property
    def chunks(self) -> int:
        return self.row_bytes // self.chunk_bytes

    @property
    def steps(self) -> int:
        """MMAs along D."""
        return self.row_bytes // MMA_BYTES

    @property
    def scale_bytes(self) -> int:
        """Of a key's scales, and of block scales those of a query's head."""
        if self.block_scaled:
            return self.head_dim // SCALE_BLOCKS[self.fmt]
        return FACTOR_BYTES if self.factored else 0

    @property
    def scale_words(self) -> int:
        """Atoms of scales along D; half a word fills one too."""
        return -(-self.scale_bytes // WORD)

    @property
    def query_atoms(self) -> int:
        """Atoms of scales along the queries' rows."""
        return -(-self.columns // ATOM_ROWS)

    @property
    def key_bytes(self) -> int:
        """Of a key tile's data."""
        return KEYS * self.row_bytes

    @property
    def key_scale_bytes(self) -> int:
        """Of a key tile's scales."""
        return self.scale_words * ATOM_BYTES

    @property
    def query_bytes(self) -> int:
        """Of the queries' data."""
        return self.columns * self.row_bytes

    @property
    def query_scale_bytes(self) -> int:
        """Of the queries' block scales."""
        return self.query_atoms * self.key_scale_bytes if self.block_scaled else 0

    @property
    def stages(self) -> int:
        """Depth of the ring of key tiles."""
        left = MAX_SHARED_BYTES - self.fixed_bytes - self.consumer_bytes
        return min(left // self.stage_bytes, self.max_stages)

    @property
    def stage_bytes(self) -> int:
        return self.key_bytes + self.key_scale_bytes

    @property
    def fixed_bytes(self) -> int:
        """Shared memory beside the ring and the consumer's."""
        return BARRIER_BYTES + self.query_bytes + self.query_scale_bytes

    # --- tensor memory: accumulators, then scales of keys and of queries ------------------------

    @property
    def scale_columns(self) -> int:
        atoms = self.scale_words * (1 + self.query_atoms) if self.block_scaled else 0
        return ATOM_COLUMNS * atoms

    @property
    def accumulators(self) -> int:
        """Key tiles in tensor memory at a time: as many of each turn."""
        most = min((TENSOR_COLUMNS - self.scale_columns) // self.columns, MAX_ACCUMULATORS)
        return most // self.turns * self.turns

    @property
    def key_scale_column(self) -> int:
        return self.accumulators * self.columns

    @property
    def query_scale_column(self) -> int:
        return self.key_scale_column + ATOM_COLUMNS * self.scale_words

    @property
    def tensor_columns(self) -> int:
        """Columns to allocate: a power of two, at least 32."""
        used = self.accumulators * self.columns + self.scale_columns
        return max(32, 1 << (used - 1).bit_length())
