"""Choice of the tile and of the number of splits for an attention problem. Imports no CuTe."""

from dataclasses import dataclass
from functools import lru_cache

from nvfp4_kernels.attention.sm100.tile import KEYS, ROWS, AttentionTile
from nvfp4_kernels.sm100.limits import SMS, WARP_ROWS

MAX_SPLITS = 64
MAX_SHARED_ROW_BYTES = 128  # of rows so short that the rings of two CTAs on an SM are deep enough
EMULATED_EXP2 = 6  # of 16 exponentials: the FMA units are then as busy as MUFU
MIN_SPLIT_TILES = 4  # key tiles that are worth a CTA and a part of the merge
MIN_GAIN = 0.03  # of the estimated time, for which keys are split beyond one wave of CTAs
# Parameters of the estimate, fitted to modelled decodes of 160 CTAs, 1 to 4 splits, D = 128, BF16.
BYTES_PER_SECOND = 7.26e12
TILE_SECONDS = 0.6e-6  # least time of a key tile, in a CTA alone on its SM
CTA_SECONDS = 2.5e-6  # prologue and epilogue of a CTA
MERGE_SECONDS = 2.5e-6  # the merge's launch
MIN_INDEXED_TILES = 2  # the same of a list: gathered rows come half as fast as boxes, as modelled


@dataclass(frozen=True)
class AttentionProblem:
    """Attention problem as the host knows it at launch.

    Attributes:
        batch: number of sequences.
        queries: maximum number of queries of a sequence.
        keys: maximum number of keys of a sequence.
        kv_heads: number of KV heads.
        group: number of query heads per KV head.
        head_dim: D.
        fp8: whether the cache is E4M3.
        window: number of keys that a query sees; 0: all.
        indexed: whether every token has a list of keys; then ``batch`` counts tokens, each with one
            query.
        batch_invariant: see ``Scoring``: one tile for prefills and decodes, and no splits.
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
    batch_invariant: bool = False


@lru_cache(maxsize=1024)  # the layers of a step repeat the same call
def choose_config(problem: AttentionProblem, sms: int = SMS) -> tuple[AttentionTile, int]:
    """Choose the tile, and the number of splits of the keys that fills the device.

    A CTA has two query tiles if there are rows for both and tensor memory holds both. If a warp
    has lanes for all rows, as in most decodes, the four softmax warps split the keys. Split-KV
    fills one wave of CTAs: two per SM if shared memory and registers suffice, else one. Warp-split
    decodes, which are memory-bound, get more splits if the last of several waves would leave most
    of the device idle; decodes with lists of keys (``indexed``) do not. A split has at least a
    minimum number of key tiles. With ``batch_invariant`` there are always one query tile and one
    split.
    """
    if problem.batch_invariant:
        tile = AttentionTile(
            problem.head_dim, fp8=problem.fp8, emulated_exp2=EMULATED_EXP2, batch_invariant=True
        )
        return tile, 1
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
    places, tiles = sms * ctas_per_sm, _ceil_div(keys, KEYS)
    most = max(1, min(tiles // min_tiles, MAX_SPLITS))
    splits = max(1, min(places // ctas, most))
    if not warp_split_kv or problem.indexed:
        return tile, splits
    estimates = {n: _decode_seconds(tile, ctas, tiles, places, n) for n in range(splits, most + 1)}
    best = min(estimates, key=lambda n: (estimates[n], n))
    worth = estimates[best] < (1 - MIN_GAIN) * estimates[splits]
    return tile, best if worth else splits


def _decode_seconds(tile: AttentionTile, ctas: int, tiles: int, places: int, splits: int) -> float:
    """Estimated time of a decode with ``ctas`` · ``splits`` CTAs and of its merge, in seconds.

    ``splits`` CTAs share ``tiles`` key tiles. In each wave of up to ``places`` CTAs, either memory
    bandwidth or the chain of MMAs and softmax in a CTA is the bound.
    """
    each, left, seconds = _ceil_div(tiles, splits), ctas * splits, 0.0
    while left > 0:
        wave = min(left, places)
        transfer = wave * 2 * tile.stage_bytes / BYTES_PER_SECOND
        seconds += CTA_SECONDS + each * max(transfer, TILE_SECONDS)
        left -= wave
    if splits == 1:
        return seconds
    parts = splits * ctas * tile.rows * tile.head_dim * 4  # upper bound
    return seconds + MERGE_SECONDS + 2 * parts / BYTES_PER_SECOND


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
