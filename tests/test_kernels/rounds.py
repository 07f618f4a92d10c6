"""Rounds of a launch: work items divided by the buffers they pass through.

A wrong parity of a barrier, or a race on reused memory, shows from the second round on; with two
buffers in turn, from the third.
"""

from typing import NamedTuple

from nvfp4_kernels.attention.decode.sm90.tile import KEYS as BOX_KEYS
from nvfp4_kernels.attention.decode.sm90.tile import DecodeTile
from nvfp4_kernels.attention.sm100.tile import KEYS, AttentionTile
from nvfp4_kernels.gemm.sm90 import tile as sm90
from nvfp4_kernels.gemm.sm100 import tile as sm100
from nvfp4_kernels.indexer.sm100.tile import ScoreTile
from nvfp4_kernels.indexer.topk.tile import BATCH, TopkTile

ENOUGH = 3


class Rounds(NamedTuple):
    """Rounds of the CTA with the most work.

    Attributes:
        accumulators: number of rounds through the buffers of results for an epilogue or softmax.
        ring: number of rounds through the ring of operands.
    """

    accumulators: float
    ring: float

    @property
    def enough(self) -> bool:
        return min(self) >= ENOUGH


def gemm_sm100(
    tile: sm100.Tile,
    output: sm100.EpilogueConfig,
    m: int,
    n: int,
    k: int,
    batch: int,
    sms: int,
) -> Rounds:
    """Rounds of a block-scaled product of ``batch`` times m × n × k on ``sms`` SMs."""
    rows, columns = (n, m) if tile.swap_ab else (m, n)
    across_m = _ceil_div(rows, tile.rows * tile.cluster_m // tile.ctas)
    tiles = across_m * _ceil_div(columns, tile.columns * tile.cluster_n) * batch
    tiles = _ceil_div(tiles, min(tiles, sms // tile.cluster))
    steps = tiles * (_ceil_div(k, sm100.TILE_K) // tile.split_k)
    stages = tile.depth(output.shared_bytes(tile))
    return Rounds(tiles / tile.accumulators, steps / stages)


def gemm_sm90(
    tile: sm90.Tile, output: sm90.EpilogueConfig, m: int, n: int, k: int, sms: int
) -> Rounds:
    """Rounds of a weight-only product; sums are in registers and leave through shared memory."""
    tiles = _ceil_div(n, tile.rows) * _ceil_div(m, tile.tokens)
    tiles = _ceil_div(tiles, min(tiles, max(1, sms // tile.split_k)))
    steps = tiles * (_ceil_div(k, tile.tile_k * tile.k_tiles) // tile.split_k)
    return Rounds(tiles, steps / tile.depth(output.shared_bytes(tile)))


def attention_sm100(tile: AttentionTile, keys: int, splits: int = 1) -> Rounds:
    """Rounds of S and of the ring of keys and values, for one sequence or list of keys."""
    tiles = _ceil_div(_ceil_div(keys, KEYS), splits)
    return Rounds(tiles / tile.s_stages, 2 * tiles / tile.stages)


def decode_sm90(tile: DecodeTile, keys: int) -> Rounds:
    """Rounds of a warp's ring; sums are in registers."""
    steps = _ceil_div(_ceil_div(keys, BOX_KEYS), tile.step_stride)
    return Rounds(steps, steps / tile.stages)


def indexer_sm100(tile: ScoreTile, keys: int, splits: int = 1) -> Rounds:
    """Rounds of the accumulators and of the ring of key tiles."""
    tiles = _ceil_div(_ceil_div(keys, KEYS), splits)
    return Rounds(tiles / tile.accumulators, tiles / tile.stages)


def topk(tile: TopkTile, columns: int) -> Rounds:
    """Upper bound of the candidate buffer's rounds, and rounds of the loads of a CTA's slice."""
    columns = columns // tile.cluster
    return Rounds(columns / tile.capacity, columns / (tile.warps * BATCH))


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
