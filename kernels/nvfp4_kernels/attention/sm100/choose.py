"""Which tile, and how many splits, for an attention problem. Pure."""

from dataclasses import dataclass

from nvfp4_kernels.attention.sm100.tile import KEYS, ROWS, AttentionTile
from nvfp4_kernels.sm100.limits import SMS, WARP_ROWS

MAX_SPLITS = 64
SHARED_ROW_BYTES = 128  # of rows so short that the rings of two CTAs on an SM are deep enough
POLYNOMIAL = 6  # of 16 exponentials: the FMA units are then as busy as MUFU
MIN_SPLIT_TILES = 4  # key tiles that are worth a CTA and a part of the merge
MIN_INDEXED_TILES = 2  # the same of a list: gathered rows come half as fast as boxes, as modelled


@dataclass(frozen=True)
class AttentionProblem:
    """Host integers that a launch knows.

    Attributes:
        batch: sequences.
        queries: most of a sequence.
        keys: most of a sequence.
        kv_heads: KV heads.
        group: query heads of each.
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
    """The tile, and the splits of the keys that fill the device.

    Two query tiles where there are rows for both and tensor memory holds them. Splits only where
    one wave of CTAs leaves SMs idle, and never so many that a part has next to nothing to do.
    Rows that one warp holds, those of most decodes, are spread over four.
    """
    rows = problem.queries * problem.group
    pairs = rows > ROWS and problem.head_dim <= 128
    row_bytes = problem.head_dim * (1 if problem.fp8 else 2)
    spread = rows <= WARP_ROWS
    # Two CTAs leave a thread 168 registers: too few for a row of 16-bit probabilities.
    small = (spread or problem.fp8) and not pairs
    resident = 2 if small and row_bytes <= SHARED_ROW_BYTES else 1
    tile = AttentionTile(
        problem.head_dim,
        2 if pairs else 1,
        problem.fp8,
        polynomial=POLYNOMIAL,
        resident=resident,
        spread=spread,
    )
    ctas = problem.batch * problem.kv_heads * _ceil_div(rows, tile.rows)
    keys = problem.keys
    if problem.window:
        keys = min(keys, problem.window + _ceil_div(tile.rows, problem.group))
    if ctas == 0:
        return tile, 1
    least = MIN_INDEXED_TILES if problem.indexed else MIN_SPLIT_TILES
    splits = min(sms * resident // ctas, _ceil_div(keys, KEYS) // least, MAX_SPLITS)
    return tile, max(1, splits)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
