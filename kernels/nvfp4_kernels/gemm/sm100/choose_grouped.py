"""Chooser of a grouped GEMM's tile and of the rows per token tile. Pure functions; imports no CuTe.

The estimate counts cycles of one SM, with the rates of ``choose``. It also accounts for a partial
last wave, for token tiles that share an expert's weights, and for clusters without work because
fewer tiles are in use than allocated. Tiles were compared in the discrete-event model of the tests
(``python -m tests.modelled.experts --all``). Nothing here was measured on a B200.
"""

import functools
import math
from dataclasses import dataclass, replace

from nvfp4_kernels.devices import assumed_clusters
from nvfp4_kernels.formats.terms import TermLayout
from nvfp4_kernels.gemm.sm100.choose import (
    CLUSTER,
    EPILOGUE_COLUMN,
    EXCHANGE,
    EXCHANGE_COLUMN,
    GATE_UP,
    LATENCY,
    LOAD_BYTES_PER_CYCLE,
    MACS_PER_CYCLE,
    MEMORY_BYTES_PER_CYCLE,
    OPERAND_BYTES_PER_CYCLE,
    REGULAR,
    RING_BYTES_PER_CYCLE,
    SCALED_BYTES,
    SWAP_AB,
    Problem,
    fits,
    with_store,
)
from nvfp4_kernels.gemm.sm100.tile import TILE_BYTES, TILE_K, EpilogueConfig, Tile
from nvfp4_kernels.moe.routing import tile_tokens_of
from nvfp4_kernels.sm100.limits import CTA_ROWS, SMS

IN_CHAIN = 980  # cycles per cluster on top of its start and end, in a chain of launches
HAND_OVER = 900  # minimum per split-K tile: the exchange of partial sums precedes the next tile's
# Pairs of CTAs with weights on the M side: of each, two read half of the tokens' rows.
_SWAP_AB_PAIRS = [Tile(c, swap_ab=True, two_cta=True, cluster_m=2) for c in (64, 128, 256)]
# Possible numbers of ranks that share the experts, each with its part of the slots. All are
# weighed, even if the number is known: the tiles in use are a guess anyway, and a tile should lose
# little in any case.
_RANKS = (1, 2, 4, 8)


@dataclass(frozen=True)
class GroupedProblem:
    """Size of a grouped GEMM: up to ``tiles`` token tiles, each times its expert's weights.

    Attributes:
        tile_tokens: number of rows per token tile.
        n, k: number of rows of each weight, and of elements per row.
        tiles: number of allocated token tiles.
        experts: number of this rank's experts.
        weights: number of weights per expert.
        terms: number of NVFP4 terms per token.
    """

    tile_tokens: int
    n: int
    k: int
    tiles: int
    experts: int
    weights: int = 1
    terms: int = 1


@functools.cache
def choose_grouped(
    problem: GroupedProblem,
    output: EpilogueConfig,
    sms: int = SMS,
) -> tuple[Tile, EpilogueConfig]:
    """Tile of least cost (ties: the first), and its epilogue with ``store`` chosen.

    The number of token tiles in use is unknown before the launch. A candidate's cost is the ratio
    of its estimate to the best candidate's, summed over the numbers of tiles that are likely with
    1, 2, 4 and 8 ranks.
    """
    fitting = grouped_candidates(problem, output)
    losses = [0.0] * len(fitting)
    for ranks in _RANKS:
        used = _likely_tiles(problem, ranks)
        costs = [estimate_grouped(problem, tile, used, sms) for tile, _ in fitting]
        losses = [loss + cost / min(costs) for loss, cost in zip(losses, costs, strict=True)]
    return fitting[losses.index(min(losses))]


def grouped_candidates(
    problem: GroupedProblem, output: EpilogueConfig
) -> list[tuple[Tile, EpilogueConfig]]:
    """Candidates whose token side is at most a token tile, each with its epilogue."""
    tokens, weights = problem.tile_tokens, problem.weights
    tiles = [tile for tile in SWAP_AB if tile.columns == min(tokens, CTA_ROWS)]
    tiles += [
        tile
        for tile in _SWAP_AB_PAIRS
        if tile.columns in (tokens, CTA_ROWS)
        and weights * tile.columns <= 256
        and tile.columns <= tokens
    ]
    if tokens >= CTA_ROWS:
        tiles += [tile for tile in (GATE_UP if weights == 2 else REGULAR) if tile.rows <= tokens]
    one = Problem(tokens, problem.n, problem.k, 1, weights, problem.terms)
    tiles = [
        grouped_tile(problem, tile)
        for tile in tiles
        if tile.cluster_m == tile.ctas and not (tile.swap_ab and tile.cluster_n > 1)
    ]
    stored = [(tile, with_store(output, tile, problem.n)) for tile in tiles]
    return [(tile, out) for tile, out in stored if fits(one, tile, out)]


def grouped_tile(problem: GroupedProblem, tile: Tile) -> Tile:
    """Copy of ``tile`` for a grouped GEMM, with the problem's weights and terms."""
    terms = TermLayout.of(problem.terms, problem.tile_tokens)
    return replace(tile, weights=problem.weights, terms=terms, grouped=True)


def estimate_grouped(problem: GroupedProblem, tile: Tile, used: int, sms: int = SMS) -> float:
    """Estimated cycles of the GEMM with ``used`` token tiles in use."""
    slots = assumed_clusters(sms, tile.cluster)
    waves, rest = divmod(_clusters_of_tiles(problem, tile) * used, slots)
    steps = math.ceil(math.ceil(problem.k / TILE_K) / tile.split_k)
    multiplied = CTA_ROWS * tile.columns * TILE_K / MACS_PER_CYCLE
    read = (CTA_ROWS + tile.b_rows) * TILE_BYTES / OPERAND_BYTES_PER_CYCLE
    sums = tile.weights * tile.terms.count * max(multiplied, read)
    column = EPILOGUE_COLUMN * tile.weights
    # In the time model a 2-CTA pair starts and ends at no more cost than a CTA alone.
    exchanged = float((CLUSTER + IN_CHAIN) * (tile.cluster > tile.ctas))
    exposed = waves + bool(rest) if tile.accumulators == 1 else 1  # epilogues
    handed = HAND_OVER if tile.split_k > 1 else 0
    if tile.split_k > 1:
        sent = tile.weights * (tile.columns - tile.split_columns)
        exchanged += exposed * (EXCHANGE + EXCHANGE_COLUMN * sent)

    def wave(clusters: int) -> float:
        """Cycles of a wave of ``clusters`` concurrent clusters."""
        supplied = tile.loaded_bytes * clusters * tile.cluster / (sms * LOAD_BYTES_PER_CYCLE)
        step = max(sums, supplied, tile.loaded_bytes / RING_BYTES_PER_CYCLE)
        bytes_each = _moved(problem, used) / (waves * slots + rest)
        return max(steps * step, handed, clusters * bytes_each / MEMORY_BYTES_PER_CYCLE)

    last = wave(rest) if rest else 0.0
    return LATENCY + waves * wave(slots) + last + exposed * tile.split_columns * column + exchanged


def _likely_tiles(problem: GroupedProblem, ranks: int) -> int:
    """Estimated number of this rank's tiles in use if ``ranks`` ranks share the slots evenly."""
    tiles, rows, experts = problem.tiles, problem.tile_tokens, problem.experts
    slots = max(1, tiles if tiles <= experts else rows * tiles - (rows - 1) * experts) / ranks
    reached = experts * (1 - (1 - 1 / experts) ** slots)
    # An expert's last tile is half empty, its only one more so.
    return max(1, round(max(reached, slots / rows + reached / 2)))


def _clusters_of_tiles(problem: GroupedProblem, tile: Tile) -> int:
    """Number of clusters that together multiply one token tile by all rows of a weight."""
    sides = problem.n, problem.tile_tokens
    rows, columns = sides if tile.swap_ab else sides[::-1]
    return math.ceil(rows / tile.rows) * math.ceil(columns / (tile.columns * tile.cluster_n))


def _moved(problem: GroupedProblem, used: int) -> float:
    """Bytes read from memory: the weights of the experts in use, and the token tiles."""
    weights = min(used, problem.experts) * problem.weights * problem.n
    tokens = used * problem.terms * problem.tile_tokens
    return (weights + tokens) * problem.k * SCALED_BYTES


def choose_tile_tokens(
    tokens: int,
    top_k: int,
    experts: int,
    global_experts: int,
    n: int,
    k: int,
    *,
    weights: int = 2,
    sms: int = SMS,
) -> int:
    """Choose the number of rows per token tile, for both GEMMs of a layer.

    The result approximates the number of rows per expert in use: tiles of 8, 16 and 32 rows cost
    the same, and larger tiles read weights less often. The signature is the same as for sm_90.

    Args:
        tokens: number of tokens, M.
        top_k: number of experts per token.
        experts: number of this rank's experts; unused.
        global_experts: number of experts of all ranks.
        n: intermediate size; unused.
        k: hidden size; unused.
        weights: number of weights per expert in the first GEMM; unused.
        sms: number of SMs of the device; unused.

    Returns:
        One of ``TILE_TOKENS``.
    """
    return tile_tokens_of(tokens, top_k, global_experts)
