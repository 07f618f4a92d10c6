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
DOUBLED = 3  # of 8 pairs: the ALU and the FMA units are then about as busy
MAX_SPLITS = 256
# Cycles of one SM: of starting and ending a CTA, and of a key tile, per column of it.
START = 4000
COLUMN = 2


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
    ctas = problem.sequences * _ceil_div(problem.queries, tile.queries)
    return tile, _splits(ctas, _ceil_div(problem.columns, KEYS), tile.columns, sms)


def _splits(ctas: int, tiles: int, columns: int, sms: int) -> int:
    """Those with the least time: waves of CTAs, each of its share of the tiles and a start.

    Waves that the last CTAs leave half empty cost as much as full ones.
    """

    def cycles(splits: int) -> int:
        waves = _ceil_div(ctas * splits, sms)
        return waves * (START + _ceil_div(tiles, splits) * columns * COLUMN)

    most = max(1, min(tiles, MAX_SPLITS))
    return min(range(1, most + 1), key=cycles)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
