"""Choice between one launch and three, and of the CTAs of a single launch. No CuTe in here."""

from dataclasses import dataclass

from nvfp4_kernels.moe.route.tile import MAX_STEPS, MAX_THREADS, WARP, RouteTile
from nvfp4_kernels.moe.route_quantize.choose import row_capacity

MAX_TOKENS = 1024  # of one launch
MAX_CLUSTER = 8  # larger clusters are not portable
MAX_TURNS = 8  # tokens of a warp, one after the other
LEAST_THREADS = 128  # of a CTA of several teams
FEW_THREADS = 256  # from here on a cluster shares the top-k
MANY_THREADS = 512  # used where the largest cluster has fewer warps than tokens
MAX_WORDS = 48 * 1024  # of a CTA's shared memory
PLACED = 7, 8  # of so many SMs clusters of several CTAs find a place for each of theirs


@dataclass(frozen=True)
class TopkTile:
    """Cluster whose CTAs each select the experts of a share of the tokens.

    Attributes:
        cluster: CTAs of the cluster.
        share: most tokens of a CTA.
        route: sort of all slots, repeated in each CTA.
        capacity: most rows of token tiles.
    """

    cluster: int
    share: int
    route: RouteTile
    capacity: int

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.route.threads


def choose_config(
    tokens: int, top_k: int, experts: int, tile_tokens: int, threads: int, teams: bool
) -> TopkTile | None:
    """Choose the CTAs that route a batch into token tiles in one launch. Pure.

    Every CTA sorts the whole batch, and so waits only for its own cluster.

    Args:
        tokens: tokens of the batch.
        top_k: slots of each token.
        experts: experts of this rank.
        tile_tokens: rows of a token tile.
        threads: threads that quantise or copy rows together.
        teams: whether a CTA may have several teams of ``threads`` threads.

    Returns:
        The tile, or None where three launches (top-k, sort, tokens) take less time.
    """
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
    slots, share = tokens * top_k, _power(-(-tokens // cluster))
    capacity = row_capacity(slots, experts, tile_tokens)
    words = capacity + threads // WARP * experts + share * top_k
    if (
        tokens > min(MAX_TOKENS, cluster * warps * MAX_TURNS)
        or slots > threads * MAX_STEPS
        or threads > MAX_THREADS
        or words > MAX_WORDS
    ):
        return None
    steps = _power(-(-slots // threads))
    return TopkTile(cluster, share, RouteTile(threads, steps=steps), capacity)


def grid_of(turns: int, cluster: int, sms: int) -> int:
    """CTAs in whole clusters: one CTA writes the routing, the others share ``turns`` turns."""
    room = sms if cluster == 1 else sms * PLACED[0] // PLACED[1]
    ctas = min(turns + 1, room)
    return -(-max(2, ctas) // cluster) * cluster


def _power(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()
