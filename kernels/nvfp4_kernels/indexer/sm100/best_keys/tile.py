"""Candidate buffers in shared memory, in addition to the tile of scores. Imports no CuTe."""

from dataclasses import dataclass

from nvfp4_kernels.indexer.sm100.tile import GROUP_WARPS, KEYS, ScoreTile
from nvfp4_kernels.indexer.topk.tile import BINS, MAX_CLUSTER, MAX_TIES, WARP, TopkTile

KEY_BYTES = 8
QUERY_BYTES = 48  # counters and threshold of a query, in addition to its buffer


@dataclass(frozen=True)
class Selection:
    """Configuration of the selection among a CTA's scores.

    Attributes:
        capacity: number of candidates that a query's buffer holds.
        sync_phases: number of phases between two checks for full buffers; in a phase, every
            accumulator holds at most one key tile.
        words: number of words of the bitmap that orders the selected keys.
        whole: whether a CTA scores all keys that the CTA's queries see: keys are not split.
    """

    capacity: int
    sync_phases: int
    words: int
    whole: bool

    def max_appended(self, tile: ScoreTile) -> int:
        """Maximum number of candidates appended to a query's buffer between two checks."""
        return self.sync_phases * tile.accumulators * KEYS

    def max_entries(self, tile: ScoreTile) -> int:
        """Maximum number of candidates that a check leaves in a buffer; bounds ``top_k``."""
        return self.capacity - self.max_appended(tile)

    def topk_tile(self, tile: ScoreTile) -> TopkTile:
        """Tile of the selection by the epilogue warps of a group of queries."""
        return TopkTile(group_threads(tile), 1, self.capacity, self.words)

    def shared_bytes(self, tile: ScoreTile) -> int:
        """Bytes of shared memory of the selection, for all groups and queries of a CTA."""
        return query_bytes(tile, self.capacity) + group_bytes(tile, self.words)


def group_threads(tile: ScoreTile) -> int:
    """Number of epilogue threads per group of queries, of all ping-pong sets."""
    return 32 * GROUP_WARPS * tile.pingpong


def query_bytes(tile: ScoreTile, capacity: int) -> int:
    """Bytes of shared memory of a CTA's queries, with ``capacity`` candidates each."""
    return tile.queries * (KEY_BYTES * capacity + QUERY_BYTES)


def group_bytes(tile: ScoreTile, words: int) -> int:
    """Bytes of shared memory of a CTA's groups, without ``query_bytes``."""
    count = words + group_threads(tile) + BINS + WARP + MAX_CLUSTER
    return tile.groups * (4 * count + KEY_BYTES * MAX_TIES)
