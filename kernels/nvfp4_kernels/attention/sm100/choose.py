"""Choice of the tile and of the number of splits for an attention problem. Pure, and no CuTe."""

from dataclasses import dataclass

from nvfp4_kernels.attention.sm100.tile import KEYS, ROWS, AttentionTile
from nvfp4_kernels.sm100.limits import SMS, WARP_ROWS

MAX_SPLITS = 64
MAX_SHARED_ROW_BYTES = 128  # of rows so short that the rings of two CTAs on an SM are deep enough
EMULATED_EXP2 = 6  # of 16 exponentials: the FMA units are then as busy as MUFU
MIN_SPLIT_TILES = 4  # key tiles that are worth a CTA and a part of the merge
MIN_INDEXED_TILES = 2  # the same of a list: gathered rows come half as fast as boxes, as modelled


@dataclass(frozen=True)
class AttentionProblem:
    """Host integers that a launch knows.

    Attributes:
        batch: sequences.
        queries: maximum of a sequence.
        keys: maximum of a sequence.
        kv_heads: KV heads.
        group: query heads of each KV head.
        head_dim: D.
        fp8: whether the cache is E4M3.
        window: keys a query sees; 0: all.
        indexed: whether every token has a list of keys; then ``batch`` counts tokens, each a query
            of its own.
    """

    batch: int
    queries: int
    keys: int
    kv_heads: int
    group: int
    head_dim: int
    fp8: bool = False
    window: int = 0
    indexed: bool = False


def choose_config(problem: AttentionProblem, sms: int = SMS) -> tuple[AttentionTile, int]:
    """Choose the tile, and the splits of the keys that fill the device.

    Two query tiles where there are rows for both and tensor memory holds them. Splits only where
    one wave of CTAs leaves SMs idle, and never so many that a part has next to nothing to do.
    Rows that one warp holds, those of most decodes, split their keys over four warps.
    """
    rows = problem.queries * problem.group
    two_query_tiles = rows > ROWS and problem.head_dim <= 128
    row_bytes = problem.head_dim * (1 if problem.fp8 else 2)
    warp_split_kv = rows <= WARP_ROWS
    # Two CTAs leave a thread 168 registers: too few for a row of 16-bit probabilities.
    small = (warp_split_kv or problem.fp8) and not two_query_tiles
    ctas_per_sm = 2 if small and row_bytes <= MAX_SHARED_ROW_BYTES else 1
    tile = AttentionTile(
        problem.head_dim,
        2 if two_query_tiles else 1,
        problem.fp8,
        emulated_exp2=EMULATED_EXP2,
        ctas_per_sm=ctas_per_sm,
        warp_split_kv=warp_split_kv,
    )
    ctas = problem.batch * problem.kv_heads * _ceil_div(rows, tile.rows)
    keys = problem.keys
    if problem.window:
        keys = min(keys, problem.window + _ceil_div(tile.rows, problem.group))
    if ctas == 0:
        return tile, 1
    min_tiles = MIN_INDEXED_TILES if problem.indexed else MIN_SPLIT_TILES
    splits = min(sms * ctas_per_sm // ctas, _ceil_div(keys, KEYS) // min_tiles, MAX_SPLITS)
    return tile, max(1, splits)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
