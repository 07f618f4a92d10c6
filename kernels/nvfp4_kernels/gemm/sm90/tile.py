"""Tile of the weight-only GEMM: shared memory and registers of a CTA. Imports no CuTe.

Weights are the M side of ``wgmma``, decoded in registers; tokens are the N side, in shared memory.
"""

import math
from dataclasses import dataclass
from typing import Literal

from nvfp4_kernels.activation import Activation
from nvfp4_kernels.devices import ELEMENT_BITS
from nvfp4_kernels.formats.fragments import TILE
from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE
from nvfp4_kernels.gemm.arguments import MAX_SHARDS
from nvfp4_kernels.sm90.limits import (
    BARRIER_BYTES,
    CTA_RESERVED_BYTES,
    ROW_BYTES,
    SM_SHARED_BYTES,
    WARPGROUP,
    ActDtype,
)

MAX_STAGES = 12
LOAD_REGISTERS, MULTIPLY_REGISTERS = 24, 240  # per thread, if reallocated (setmaxnreg)
PITCH = TILE + 4  # floats: neighbouring tokens start in different banks
FEW_TOKENS = 16  # tokens up to which mma.sync issues less than wgmma
SLICED_TOKENS = 32  # the same where warpgroups take alternate stages
MOST_COLUMNS_IN_TURN = 128  # registers of a part's sums beside the running sums
CHUNK = 32  # tokens that the epilogue turns at a time
BARRIER = 1  # named barrier of the first warpgroup; after the warpgroups', one for all together

OutDtype = Literal["bfloat16", "float16", "float32", "float8_e4m3fn"]


@dataclass(frozen=True)
class Tile:
    """Shape of the work of a CTA and a cluster.

    Attributes:
        tokens: number of tokens per tile, 8 to 256: the N side of the MMA.
        weights: number of products that share the tokens: 1, or 2 for the gate and up projections.
        warpgroups: number of warpgroups that decode and multiply.
        k_tiles: number of K tiles, of ``tile_k`` elements each, per stage; if above 1, K must be a
            multiple of ``tile_k · k_tiles``.
        split_k: number of CTAs of a cluster that split K and then reduce; 1: no split-K.
        parts_in_turn: number of parts of K that a CTA sums separately, one after the other; the
            result is bit-identical to that with ``split_k`` set to this number.
        slices: number of warpgroups that share weight rows, take alternate stages and then reduce.
        ctas_per_sm: number of CTAs that must fit on an SM.
        max_stages: maximum depth of the operand ring; shared memory may allow less.
        weight_per_warpgroup: whether one of two warpgroups takes gate and the other takes up.
        grouped: whether each token tile has its own expert, from a stack of weights; the number of
            tiles is read on the device.
        routed_before: if grouped, whether the routing was complete before the preceding launch
            began. If so, the kernel reads the routing, and loads weights, before it waits for the
            preceding launch.
        fp8: whether tokens are E4M3 and weights folded (``formats.folded``).
    """

    tokens: int
    weights: int = 1
    warpgroups: int = 2
    k_tiles: int = 1
    split_k: int = 1
    parts_in_turn: int = 1
    slices: int = 1
    ctas_per_sm: int = 1
    max_stages: int = MAX_STAGES
    weight_per_warpgroup: bool = False
    grouped: bool = False
    routed_before: bool = False
    fp8: bool = False

    def __post_init__(self) -> None:
        assert self.tokens in range(8, 257, 8), self.tokens
        assert self.split_k <= 8, "larger clusters are not portable"
        assert self.columns <= 256, "128 accumulator registers per thread"
        assert self.parts_in_turn == 1 or self.split_k == self.slices == 1
        assert self.parts_in_turn == 1 or self.columns <= MOST_COLUMNS_IN_TURN, "two of them"
        assert self.warpgroups % self.slices == 0, self.slices
        assert self.slices == 1 or self.tokens <= SLICED_TOKENS, "wgmma keeps a tensor core busy"
        if self.weight_per_warpgroup:
            assert self.weights == self.warpgroups == 2, "one weight for each warpgroup"
            assert self.split_k == 1
            assert self.own_tokens % 16 == 0, self.tokens
        assert self.grouped or not self.routed_before

    @property
    def tile_k(self) -> int:
        """Number of elements of K per K tile: a row of 128 bytes."""
        return ROW_BYTES if self.fp8 else ROW_BYTES // 2

    @property
    def data_bytes(self) -> int:
        """Bytes of codes of a 64-row weight tile, per K tile."""
        return TILE * self.tile_k // 2

    @property
    def scale_bytes(self) -> int:
        """Bytes of block scales of a 64-row weight tile, per K tile."""
        return TILE * self.tile_k // BLOCK_SIZE

    @property
    def sides(self) -> int:
        """Number of warpgroups that divide gate and up: 2 if ``weight_per_warpgroup``, else 1.

        If 2, one warpgroup takes gate and another takes up; in the epilogue, each finishes half of
        the tokens.
        """
        return self.weights if self.weight_per_warpgroup else 1

    @property
    def team(self) -> int:
        """Number of warpgroups that work on the same rows of the weights."""
        return self.sides * self.slices

    @property
    def parts(self) -> int:
        """Number of partial sums per element, each by a warpgroup, over different parts of K."""
        return self.split_k * self.slices

    @property
    def accumulators(self) -> int:
        """Number of accumulators per warpgroup, of 64 rows each."""
        return self.weights // self.sides

    @property
    def own_tokens(self) -> int:
        """Number of a tile's tokens for which a warpgroup computes the result."""
        return self.tokens // self.sides

    @property
    def columns(self) -> int:
        """Number of columns (tokens) of all accumulators of a warpgroup together."""
        return self.accumulators * self.tokens

    @property
    def rows(self) -> int:
        """Number of rows of each weight per tile."""
        return TILE * self.warpgroups // self.team

    @property
    def split_rows(self) -> int:
        """Number of weight rows that each CTA of a split-K cluster reduces and stores."""
        return self.rows // self.split_k

    @property
    def operands(self) -> int:
        """Number of 64-row weight tiles that a stage holds for each of its K tiles."""
        return self.weights * self.warpgroups // self.team

    @property
    def uses_mma_sync(self) -> bool:
        """Whether each warp multiplies with ``mma.sync``, instead of a warpgroup with ``wgmma``.

        ``mma.sync`` of E4M3 converts its operands to 16 bits on sm_90.
        """
        return not self.fp8 and (self.tokens <= FEW_TOKENS or self.slices > 1)

    @property
    def least_stages(self) -> int:
        """Least depth of the ring: with ``wgmma`` a slice holds a stage until it has the next."""
        return 2 if self.uses_mma_sync else 2 * self.slices

    @property
    def streams_weights(self) -> bool:
        """Whether few other CTAs read the same weights, so that L2 need not keep them."""
        return self.tokens <= SLICED_TOKENS

    @property
    def knows_weights(self) -> bool:
        """Whether the weights to load are known before the preceding launch has ended."""
        return not self.grouped or self.routed_before

    @property
    def reallocates_registers(self) -> bool:
        """Whether the load warp and three idle warps form a warpgroup that gives up registers."""
        # With parts in turn, a thread holds the running sums beside the part's sums.
        return self.columns * (1 + (self.parts_in_turn > 1)) >= 192

    @property
    def threads(self) -> int:
        """Number of threads per CTA, including the load warp or its warpgroup."""
        return WARPGROUP * self.warpgroups + (WARPGROUP if self.reallocates_registers else 32)

    @property
    def stage_bytes(self) -> int:
        """Bytes that arrive in shared memory per stage."""
        weights = self.operands * (self.data_bytes + self.scale_bytes)
        return self.k_tiles * (weights + self.tokens * ROW_BYTES)

    def depth(self, epilogue_bytes: int) -> int:
        """Number of operand ring stages that fit next to the epilogue's shared memory.

        A multiple of ``slices``.
        """
        left = SM_SHARED_BYTES // self.ctas_per_sm - CTA_RESERVED_BYTES
        room = (left - BARRIER_BYTES - epilogue_bytes) // self.stage_bytes
        # A stage always belongs to the same slice: a slice that used every other phase would
        # mistake it.
        return min(room, self.max_stages) // self.slices * self.slices


@dataclass(frozen=True)
class EpilogueConfig:
    """Configuration of the epilogue: dtypes, scaling, and the way the result is stored.

    Attributes:
        act: dtype of activations; with E4M3, ``alpha`` has a factor for each row of the weight.
        dtype: dtype of the result; E4M3 is scaled and in the order of ``formats.fp8_rows``.
        boxes: whether TMA stores the result in boxes; else element by element, for any N.
        shards: number of factors ``alpha`` along the weight's rows; with E4M3 activations 1.
        per_token: whether each token has a factor, ``row_scale``.
        bias: dtype of the bias, "" for none.
        activation: activation of a grouped GEMM; None: SiLU for gate and up, no activation for a
            single weight.
    """

    act: ActDtype = "bfloat16"
    dtype: OutDtype = "bfloat16"
    boxes: bool = False
    shards: int = 1
    per_token: bool = False
    bias: str = ""
    activation: Activation | None = None

    def __post_init__(self) -> None:
        assert 1 <= self.shards <= MAX_SHARDS
        assert not self.boxes or self.dtype != "float32"
        assert self.shards == 1 or self.act != "float8_e4m3fn", "a factor per row"

    def shared_bytes(self, tile: Tile) -> int:
        """Bytes of the epilogue's shared memory."""
        if self.boxes:
            # Two boxes, or the float32 sums that gate and up exchange.
            row = max(2 * self.box_row_bytes, 4 * TILE if tile.weight_per_warpgroup else 0)
            return tile.warpgroups * self.box_tokens(tile) * row
        if tile.parts > 1:
            return 4 * tile.slices * tile.rows * tile.weights * tile.tokens
        return 4 * tile.warpgroups * tile.weights * self.chunk(tile) * PITCH

    @property
    def is_fp8(self) -> bool:
        """Whether the result is E4M3."""
        return self.dtype == "float8_e4m3fn"

    @property
    def box_row_bytes(self) -> int:
        """Bytes of a token in a box of 64 rows of a weight."""
        return TILE * ELEMENT_BITS[self.dtype] // 8

    def box_tokens(self, tile: Tile) -> int:
        """Number of tokens per box of 64 rows."""
        return math.gcd(64, tile.own_tokens)

    def chunk(self, tile: Tile) -> int:
        """Number of tokens that are transposed at a time."""
        return math.gcd(CHUNK, tile.own_tokens)
