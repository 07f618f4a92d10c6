"""Chooser of the GEMM tile with the least estimated time in a layer. Pure; imports no CuTe.

The estimate counts cycles of one SM. Rates are B200's: per SM and cycle, 16384 multiply-accumulates
of NVFP4 and 64 bytes from L2; for the chip, 7.26 TB/s of memory at 1.85 GHz. The rest was fitted to
the times that the discrete-event model of the tests gives for 29 problems of 1 to 512 tokens on 304
tiles (``python -m tests.modelled.gemm --all``): a mean error of 6 %, a mean loss of 0.3 % against
the best tile. A tile's additional cost in a chain of launches was fitted to layers of 1 to 128
tokens, each GEMM on each candidate tile (``tests.modelled.layer``). ``SHARED_COLUMNS``, between the
900 and the 1800 cycles that two modelled prefills of 8192 tokens lose per tile, was added after
both fits: with one tile per cluster it changes nothing. ``SPLIT`` and the exchange were fitted
anew when partial sums came to travel by ``st.async``, at the rate that an H100 showed: over the
split tiles of five problems of 1 to 64 tokens the mean error is 5 %. Nothing here was measured on a
B200.
"""

import functools
import math
from dataclasses import dataclass, replace

from nvfp4_kernels.devices import ELEMENT_BITS, assumed_clusters
from nvfp4_kernels.formats.terms import PACKED_ROWS, TermLayout
from nvfp4_kernels.gemm.sm100.tile import TILE_BYTES, TILE_K, EpilogueConfig, Tile
from nvfp4_kernels.sm100.limits import CTA_ROWS, SMS, WARP_ROWS

MACS_PER_CYCLE = 16384
OPERAND_BYTES_PER_CYCLE = 101  # of shared memory, into the tensor core
MEMORY_BYTES_PER_CYCLE = 3930
LOAD_BYTES_PER_CYCLE = 64  # of each SM, from L2, with all at work
RING_BYTES_PER_CYCLE = 112  # of one SM: its ring bounds the bytes in flight
LATENCY = 2230  # of memory, until its bytes flow
CLUSTER = 980  # of starting and ending a cluster with multicast
SPLIT = 200  # of a cluster whose CTAs split K
EXCHANGE, EXCHANGE_COLUMN = 120, 25  # of the parts of a split
EPILOGUE_COLUMN, UNBOXED_COLUMN = 16.7, 6
SHARED_COLUMNS = 1000  # of MMAs that wait for columns which two accumulators share, a tile
LATE = 1.2  # of a cycle of loads that wait for the tokens, in a chain
OCCUPIED = 1300  # of leaving the next launch no SM to begin on
SCALED_BYTES = 0.5 + 1 / 16  # per element

_FEW = (8, 16, 32)  # tokens: one tile's columns, always swapped
MAX_FEW_TOKENS = max(_FEW)
assert MAX_FEW_TOKENS == PACKED_ROWS
_SOME = (64, 128, 256)  # tokens: tiles with either side
MAX_SWAP_AB_TOKENS = max(_SOME)
_MOST_ACROSS = 4  # tiles of tokens that each read all weights

SWAP_AB = [
    *(Tile(columns, swap_ab=True, split_k=s) for columns in _FEW for s in (1, 2, 4, 8)),
    *(Tile(columns, swap_ab=True, split_k=s) for columns in (64, 128) for s in (1, 2, 4)),
    Tile(64, swap_ab=True, cluster_n=2),
]
REGULAR = [
    Tile(256, two_cta=True, cluster_m=2),
    Tile(256, two_cta=True, cluster_m=4),
    Tile(128, two_cta=True, cluster_m=2),
    Tile(256),
    Tile(128),
    Tile(128, cluster_n=2),
    Tile(128, split_k=2),
    Tile(128, split_k=4),
    Tile(64),
    Tile(64, split_k=2),
]
GATE_UP = [
    Tile(128, 2, two_cta=True, cluster_m=2),
    Tile(128, 2, two_cta=True, cluster_m=4),
    Tile(128, 2),
    Tile(96, 2, two_cta=True, cluster_m=2),
    Tile(64, 2, two_cta=True, cluster_m=2),
    Tile(64, 2),
    Tile(64, 2, cluster_n=2),
    Tile(64, 2, split_k=2),
]


@dataclass(frozen=True)
class Problem:
    """Size of a GEMM: ``batch`` × ``m`` tokens by ``weights`` matrices of ``n`` rows, K = ``k``.

    Each token is a sum of ``terms`` NVFP4 terms.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    weights: int = 1
    terms: int = 1


@functools.cache
def choose_config(
    problem: Problem, output: EpilogueConfig, sms: int = SMS
) -> tuple[Tile, EpilogueConfig]:
    """Tile of least cost in a layer (ties: the first), and its epilogue with ``store`` chosen.

    Args:
        problem: GEMM problem; must not be empty.
        output: epilogue, whose ``store`` is chosen here.
        sms: number of SMs of the device.
    """
    fitting = candidates(problem, output)
    return min(fitting, key=lambda each: cost_in_layer(problem, each[0], each[1], sms))


# Numbers of tokens by which the batch-invariant tile is judged.
INVARIANT_TOKENS = (1, 16, 64, 256, 1024, 8192)


@functools.cache
def choose_batch_invariant(
    problem: Problem, output: EpilogueConfig, sms: int = SMS
) -> tuple[Tile, EpilogueConfig]:
    """One tile for any number of tokens, so that the summation order is always the same.

    Chosen is the tile with the smallest worst-case slowdown, over ``INVARIANT_TOKENS``, against the
    choice of ``choose_config``. Split-K is allowed only without swap_ab, where the order of the
    partial sums follows from the weight's row, not from the token's index.

    Args:
        problem: GEMM problem with one term; ``m`` is ignored.
        output: epilogue, whose ``store`` is chosen here.
        sms: number of SMs of the device.
    """
    assert problem.terms == 1, "the layout of several terms depends on the tokens"
    problems = [replace(problem, m=m) for m in INVARIANT_TOKENS]
    least = [cost_in_layer(p, *choose_config(p, output, sms), sms) for p in problems]
    # A tile of fewer tokens must be the only tile: it reads scales from an atom's first row on.
    tiles = [t for t in SWAP_AB if t.split_k == 1 and t.columns >= MAX_FEW_TOKENS] + REGULAR
    if problem.weights == 2:  # with swap_ab SiLUs of several tokens would share a reciprocal
        tiles = GATE_UP
    fitting = [(t, with_store(output, t, problem.n)) for t in tiles]

    def worst(each: tuple[Tile, EpilogueConfig]) -> float:
        pairs = zip(problems, least, strict=True)
        return max(cost_in_layer(p, *each, sms) / best for p, best in pairs)

    return min(((t, o) for t, o in fitting if fits(problem, t, o)), key=worst)


def candidates(problem: Problem, output: EpilogueConfig) -> list[tuple[Tile, EpilogueConfig]]:
    """Tiles that can serve the problem, each with its epilogue, including the store."""
    tokens = next((most for most in (*_FEW, *_SOME) if most >= problem.m), 0)
    return _candidates(replace(problem, m=tokens, batch=1), output)


@functools.cache
def _candidates(problem: Problem, output: EpilogueConfig) -> list[tuple[Tile, EpilogueConfig]]:
    """Candidates for at most ``problem.m`` tokens; 0: for any number of tokens."""
    tokens = problem.m
    columns = range(0)
    if 0 < tokens <= MAX_FEW_TOKENS:
        columns = range(tokens, MAX_FEW_TOKENS + 1)
    elif tokens:
        columns = range(max(MAX_FEW_TOKENS, tokens // _MOST_ACROSS), 2 * tokens)
    tiles = [replace(t, weights=problem.weights) for t in SWAP_AB if t.columns in columns]
    few = 0 < tokens <= MAX_FEW_TOKENS
    if not few:
        tiles += GATE_UP if problem.weights == 2 else REGULAR
    if problem.terms > 1:
        tiles = [replace(t, terms=TermLayout(problem.terms, packed=few)) for t in tiles]
    fitting = [(t, with_store(output, t, problem.n)) for t in tiles]
    return [(t, o) for t, o in fitting if fits(problem, t, o)]


def with_store(output: EpilogueConfig, tile: Tile, n: int) -> EpilogueConfig:
    """Copy of ``output`` with ``store`` and ``box_bytes`` chosen.

    Preferred are TMA boxes, of which each warp must fill at least two; then 16-byte vectors; then
    elements.
    """
    bits = ELEMENT_BITS[output.dtype]
    if tile.swap_ab or n * bits % 128:
        return replace(output, store="element")
    if output.dtype == "nvfp4":
        return replace(output, store="vector")
    # At least two boxes: the store of a box overlaps with the math of the next.
    tile_bytes = tile.split_columns * bits // 8
    box_bytes = next((size for size in (128, 64) if tile_bytes >= 2 * size), 0)
    if not box_bytes:
        return replace(output, store="vector")
    return replace(output, store="tma", box_bytes=box_bytes)


def fits(problem: Problem, tile: Tile, output: EpilogueConfig) -> bool:
    """Whether a tile can serve a problem."""
    k_steps = math.ceil(problem.k / TILE_K)
    if tile.split_k > min(k_steps, tile.columns) or tile.depth(output.shared_bytes(tile)) < 2:
        return False
    return tile.split_columns % output.chunk(tile) == 0


def cost_in_layer(problem: Problem, tile: Tile, output: EpilogueConfig, sms: int = SMS) -> float:
    """Cycles of the GEMM in a chain of dependent launches, up to a constant.

    With few tokens, launches overlap: on free SMs a launch fills its rings with weights while its
    predecessor ends. Further weights wait until the tokens have been written.
    """
    alone = estimate(problem, tile, sms)
    if problem.m > MAX_SWAP_AB_TOKENS:
        return alone
    work = _work(problem, tile, sms)
    late = max(0, work.steps - tile.depth(output.shared_bytes(tile))) * tile.loaded_bytes
    return alone + LATE * late / RING_BYTES_PER_CYCLE + OCCUPIED * work.occupied / sms


def estimate(problem: Problem, tile: Tile, sms: int = SMS) -> float:
    """Estimated cycles of the GEMM, launched alone."""
    work = _work(problem, tile, sms)
    multiplied = CTA_ROWS * tile.columns * TILE_K / MACS_PER_CYCLE
    read = (CTA_ROWS + tile.b_rows) * TILE_BYTES / OPERAND_BYTES_PER_CYCLE
    supplied = tile.loaded_bytes * work.occupied / (sms * LOAD_BYTES_PER_CYCLE)
    step = tile.weights * tile.terms.count * max(multiplied, read)
    rows = problem.weights * problem.n + problem.terms * problem.m
    moved = problem.batch * problem.k * rows * SCALED_BYTES
    boxed = tile.split_columns % WARP_ROWS == 0
    column = EPILOGUE_COLUMN * tile.weights + (0 if boxed else UNBOXED_COLUMN)
    exposed = work.waves if tile.accumulators == 1 else 1  # epilogues that no MMAs run over
    together = float(CLUSTER * tile.coupled)
    if tile.split_k > 1:
        sent = tile.weights * (tile.columns - tile.split_columns)
        together += SPLIT + work.waves * (EXCHANGE + EXCHANGE_COLUMN * sent)
    rings = work.steps * tile.loaded_bytes / RING_BYTES_PER_CYCLE
    loaded = max(moved / MEMORY_BYTES_PER_CYCLE, rings)
    # Loads go on meanwhile.
    waiting = (work.waves - 1) * SHARED_COLUMNS if tile.accumulators == 2 and tile.overlap else 0
    stepping = max(work.steps * step + waiting, work.steps * supplied)
    multiplying = max(stepping, LATENCY + loaded)
    return multiplying + exposed * tile.split_columns * column + together


@dataclass(frozen=True)
class _Work:
    """Division of a GEMM among SMs: number of busy SMs, of waves, and of K steps per SM in all."""

    occupied: int
    waves: int
    steps: int


def _work(problem: Problem, tile: Tile, sms: int) -> _Work:
    rows, columns = (problem.n, problem.m) if tile.swap_ab else (problem.m, problem.n)
    down = max(1, tile.cluster_m // tile.ctas)  # tiles of a cluster
    tiles = math.ceil(rows / (tile.rows * down)) * math.ceil(
        columns / (tile.columns * tile.cluster_n)
    )
    ctas = tiles * tile.cluster * problem.batch
    slots = assumed_clusters(sms, tile.cluster) * tile.cluster
    waves = math.ceil(ctas / slots)
    steps = waves * math.ceil(math.ceil(problem.k / TILE_K) / tile.split_k)
    return _Work(min(ctas, slots), waves, steps)
