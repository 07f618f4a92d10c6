"""Which tile, and how many splits of the keys, for a scoring problem. Pure, and no CuTe."""

from dataclasses import dataclass

from nvfp4_kernels.sm100.indexer.tile import (
    GROUP_COLUMNS,
    KEYS,
    MAX_GROUPS,
    Format,
    ScoreTile,
    head_columns,
)

SMS = 148  # of a B200
DOUBLED = 5  # of 8 pairs: the ALU and the FMA units are then about as busy
MAX_SPLITS = 256
# As the discrete-event model of the tests gives them (``python -m tests.modelled_indexer``); none
# was measured on a B200. Cycles of one SM: of starting and ending a CTA, and of a key tile, at the
# least, and per column of it. Bytes from memory per cycle, for the chip.
START = 5000
TILE, COLUMN = 250, 2.8
MEMORY_BYTES = 3900


@dataclass(frozen=True)
class ScoreProblem:
    """Host integers that a launch knows.

    Attributes:
        fmt: of queries and keys.
        head_dim, heads: of a query.
        sequences: whose queries see keys of their own.
        queries: of each.
        columns: keys of each, at the most.
    """

    fmt: Format
    head_dim: int
    heads: int
    sequences: int
    queries: int
    columns: int


def choose_config(problem: ScoreProblem, sms: int = SMS) -> tuple[ScoreTile, int]:
    """The tile, and the splits of the keys that keep the device busy.

    As many queries share a CTA's keys as there are, up to three groups. A single group is put in
    twice where registers allow: the two take key tiles in turn.
    """
    columns = head_columns(problem.heads)
    fit = max(1, GROUP_COLUMNS // columns)
    group_queries = min(fit, problem.queries)
    groups = min(MAX_GROUPS, _ceil_div(problem.queries, group_queries))
    if group_queries * columns > GROUP_COLUMNS:
        groups = 1
    turns = 2 if groups == 1 and group_queries * columns <= GROUP_COLUMNS else 1
    doubled = DOUBLED if problem.fmt in ("nvfp4", "mxfp4") else 0
    tile = ScoreTile(
        problem.fmt, problem.head_dim, problem.heads, group_queries, groups, turns, doubled
    )
    return tile, _splits(problem, tile, sms)


def _splits(problem: ScoreProblem, tile: ScoreTile, sms: int) -> int:
    """Those with the least time, of waves of CTAs that each have a start and a share of the tiles.

    Waves that the last CTAs leave half empty cost as much as full ones. Only what has to come from
    memory does so at the same rate whichever SMs ask for it.
    """
    ctas = problem.sequences * _ceil_div(problem.queries, tile.queries)
    tiles = _ceil_div(problem.columns, KEYS)
    each = max(TILE, tile.columns * COLUMN)
    stored = problem.sequences * tiles * (tile.key_bytes + KEYS * tile.scale_bytes)

    def cycles(splits: int) -> float:
        waves = _ceil_div(ctas * splits, sms)
        computed = waves * _ceil_div(tiles, splits) * each
        return waves * START + max(computed, stored / MEMORY_BYTES)

    return min(range(1, max(1, min(tiles, MAX_SPLITS)) + 1), key=cycles)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
