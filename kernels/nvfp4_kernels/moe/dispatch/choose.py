"""Choice of the launches, layouts and grids of ``moe_dispatch``. Imports no CuTe."""

from dataclasses import dataclass

from nvfp4_kernels.device.row_vectors import tile as vectors
from nvfp4_kernels.device.row_vectors.tile import VECTOR, VectorTile
from nvfp4_kernels.device.rowwise.tile import (
    ATOM_ROWS,
    BLOCK,
    RowTile,
    choose_whole_rows,
)
from nvfp4_kernels.moe.route.tile import MAX_STEPS, MAX_THREADS, WARP, RouteTile
from nvfp4_kernels.moe.routing import max_tiles

LINES = 32  # rows, up to which a CTA writes whole lines of atoms
SLOTS, WARPS = 8, 4  # of a CTA whose rows share a global scale
RESIDENT_THREADS = 1024  # of an SM, with the registers that a row takes
MAX_COPIED = 4  # vectors of a thread
MAX_COPY_THREADS = 256
MAX_SLOTS = 256  # most slots that every CTA sorts itself
CTAS_PER_SM = 1  # each of which sorts: several get in one another's way
MAX_TOKENS = 1024  # of one launch from logits
MAX_CLUSTER = 8  # larger clusters are not portable
MAX_TURNS = 8  # tokens of a warp, one after the other
LEAST_THREADS = 128  # of a CTA of several teams
FEW_THREADS = 256  # from here on a cluster shares the top-k
MANY_THREADS = 512  # used where the largest cluster has fewer warps than tokens
MAX_WORDS = 48 * 1024  # of a CTA's shared memory
PLACED = 7, 8  # of so many SMs clusters of several CTAs find a place for each of theirs


# --- rows -----------------------------------------------------------------------------------------


def choose_rows(rows: int, k: int, element_size: int, per_token: bool, sms: int) -> RowTile:
    """Choose the layout for quantising ``rows`` rows, of all tiles in use. Pure function.

    With one global scale for all rows, CTAs are small and many share an SM: while one CTA waits for
    slots or tokens, others quantise, and an SM with an extra work item is not much slower.
    """
    if per_token:
        return choose_whole_rows(rows, k, BLOCK * element_size // 4, sms)
    return RowTile(SLOTS, WARPS, 1)


def columns_of_row(tile: RowTile, k: int) -> int:
    """Number of parts into which rows are cut; a CTA or a team processes one part at a time."""
    return -(-k // (tile.blocks * BLOCK))


def groups_of_tile(tile: RowTile, tile_tokens: int) -> int:
    """Number of row groups per token tile; a group is the rows that a CTA processes at once."""
    if tile_tokens <= LINES:
        return tile_tokens // tile.slots
    return -(-tile_tokens // ATOM_ROWS) * tile.groups


def items_of_tile(tile: RowTile, tile_tokens: int, k: int) -> int:
    """Number of work items per token tile; a work item is one part of the rows of one group."""
    return columns_of_row(tile, k) * groups_of_tile(tile, tile_tokens)


def choose_gather(k: int) -> VectorTile:
    """Choose the layout of CTAs that copy rows of ``k`` elements, or equal parts. Pure function."""
    count = -(-k // VECTOR)
    steps = min(MAX_COPIED, -(-count // MAX_COPY_THREADS))
    parts = -(-count // (MAX_COPY_THREADS * steps))
    return VectorTile(max(WARP, -(-count // (parts * steps * WARP)) * WARP), steps)


def choose_fp8_rows(rows: int, k: int, element_size: int, per_token: bool, sms: int) -> VectorTile:
    """Choose the layout for rows as E4M3, of ``rows`` rows of all tiles in use. Pure function."""
    if per_token:
        return vectors.choose_whole_rows(rows, k, VECTOR * element_size // 4, sms)
    return choose_gather(k)


# --- grids ----------------------------------------------------------------------------------------


def ctas_of_tiles(items: int, threads: int, sms: int) -> int:
    """Number of CTAs for at most ``items`` work items: one per item, if all can be resident."""
    return max(1, min(items, sms * max(1, RESIDENT_THREADS // threads)))


def ctas_of_ids(items: int, sms: int) -> int:
    """Number of CTAs that share at most ``items`` work items: few, as each also sorts the batch."""
    return max(1, min(items, sms * CTAS_PER_SM))


def ctas_of_logits(items: int, cluster: int, sms: int) -> int:
    """Number of CTAs, whole clusters: one writes the routing, others share ``items`` work items."""
    room = sms if cluster == 1 else sms * PLACED[0] // PLACED[1]
    ctas = min(items + 1, room)
    return -(-max(2, ctas) // cluster) * cluster


# --- one launch or several ------------------------------------------------------------------------


@dataclass(frozen=True)
class SortTile:
    """Sort of a small batch, repeated in every CTA.

    Attributes:
        route: layout of the sort, by the threads of one CTA.
        capacity: entries of the row-to-slot table, at least the number of rows of all tiles.
    """

    route: RouteTile
    capacity: int


def fuse_ids(slots: int, experts: int, tile_tokens: int, threads: int) -> SortTile | None:
    """Choose how CTAs sort a batch in the launch that also writes the rows. Pure function.

    Args:
        slots: number of slots of the batch.
        experts: number of experts of this rank.
        tile_tokens: rows per token tile.
        threads: threads per CTA.

    Returns:
        The tile; None for batches or tiles so large that a separate launch should sort.
    """
    if slots > min(MAX_SLOTS, threads * MAX_STEPS) or tile_tokens > LINES:
        return None
    route = RouteTile(threads, steps=max(1, -(-slots // threads)))
    return SortTile(route, row_capacity(slots, experts, tile_tokens))


def row_capacity(slots: int, experts: int, tile_tokens: int) -> int:
    """Number of row-to-slot entries: a power of two, so that few variants serve many batches."""
    rows = max_tiles(slots, experts, tile_tokens) * tile_tokens
    return max(256, 1 << (rows - 1).bit_length())


@dataclass(frozen=True)
class TopkTile:
    """Cluster whose CTAs each select the experts of a share of the tokens.

    Attributes:
        cluster: CTAs per cluster.
        share: maximum number of tokens per CTA.
        route: layout of the sort of all slots, repeated in each CTA.
        capacity: entries of the row-to-slot table, at least the number of rows of all tiles.
    """

    cluster: int
    share: int
    route: RouteTile
    capacity: int

    @property
    def threads(self) -> int:
        """Number of threads per CTA."""
        return self.route.threads


def fuse_logits(
    slots: tuple[int, int], experts: int, tile_tokens: int, threads: int, teams: bool
) -> TopkTile | None:
    """Choose CTAs that select experts, sort and write rows in one launch. Pure function.

    Every CTA sorts the whole batch, so that no cluster waits for another.

    Args:
        slots: number of tokens, and of slots per token.
        experts: number of experts of this rank.
        tile_tokens: rows per token tile.
        threads: threads that quantise or copy a work item together.
        teams: whether a CTA may have several teams of ``threads`` threads.

    Returns:
        The tile; None for batches so large that separate launches (top-k, sort, rows) are used.
    """
    tokens, top_k = slots
    if teams:
        threads = max(threads, LEAST_THREADS // threads * threads)
        while threads < FEW_THREADS and tokens > threads // WARP:
            threads *= 2
    cluster = 1
    while cluster < MAX_CLUSTER and tokens > cluster * (threads // WARP):
        cluster *= 2
    if teams and threads < MANY_THREADS and tokens > cluster * (threads // WARP):
        threads *= 2
    warps = threads // WARP
    if teams and tokens * top_k > threads * MAX_STEPS:
        threads *= 2
    count, share = tokens * top_k, _power(-(-tokens // cluster))
    capacity = row_capacity(count, experts, tile_tokens)
    words = capacity + threads // WARP * experts + share * top_k
    if (
        tokens > min(MAX_TOKENS, cluster * warps * MAX_TURNS)
        or count > threads * MAX_STEPS
        or threads > MAX_THREADS
        or words > MAX_WORDS
    ):
        return None
    steps = _power(-(-count // threads))
    return TopkTile(cluster, share, RouteTile(threads, steps=steps), capacity)


def _power(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()
