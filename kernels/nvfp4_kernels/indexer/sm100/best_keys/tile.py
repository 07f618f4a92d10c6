"""Room for candidates in shared memory, beside the scores' tile. No CuTe in here."""

from dataclasses import dataclass

from nvfp4_kernels.indexer.sm100.tile import GROUP_WARPS, KEYS, ScoreTile
from nvfp4_kernels.indexer.topk.tile import BINS, MAX_CLUSTER, MAX_TIES, WARP, Config

KEY_BYTES = 8
QUERY_BYTES = 48  # of a query, beside its buffer: cells and a threshold


@dataclass(frozen=True)
class Selection:
    """One compiled variant of what takes the scores.

    Attributes:
        room: of a query's buffer, in candidates.
        laps: round the accumulators, from one meeting to the next.
        words: of the bitmap that orders what is chosen.
        whole: whether a CTA scores all keys that its queries see.
    """

    room: int
    laps: int
    words: int
    whole: bool

    def arriving(self, tile: ScoreTile) -> int:
        """Candidates of a query from one meeting to the next, at the most."""
        return self.laps * tile.accumulators * KEYS

    def most(self, tile: ScoreTile) -> int:
        """Candidates that a meeting lets pass; the keys to choose may be as many."""
        return self.room - self.arriving(tile)

    def team(self, tile: ScoreTile) -> Config:
        """The epilogue warps of a group of queries, which select together."""
        return Config(team_threads(tile), 1, self.room, self.words)

    def shared_bytes(self, tile: ScoreTile) -> int:
        """Of all groups."""
        return query_bytes(tile, self.room) + team_bytes(tile, self.words)


def team_threads(tile: ScoreTile) -> int:
    """Of a group of queries."""
    return 32 * GROUP_WARPS * tile.turns


def query_bytes(tile: ScoreTile, room: int) -> int:
    """Shared memory of all queries, with room for so many candidates of each."""
    return tile.queries * (KEY_BYTES * room + QUERY_BYTES)


def team_bytes(tile: ScoreTile, words: int) -> int:
    """Shared memory of all groups, whatever room there is for candidates."""
    count = words + team_threads(tile) + BINS + WARP + MAX_CLUSTER
    return tile.groups * (4 * count + KEY_BYTES * MAX_TIES)
