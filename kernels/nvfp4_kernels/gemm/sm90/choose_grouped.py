"""Chooser of the tile of grouped GEMMs, and of the number of rows of token tiles. Pure functions.

Up to a thousand tokens, an MoE layer is bound by reading weights, many small matrices: the time
depends on the number of bytes in flight. Every number here is from the time model of the tests, on
the layers of Qwen3-30B and of a rank of DeepSeek-V3 (``python -m tests.modelled.grouped_sm90``);
none was measured.
"""

import functools
import math
from dataclasses import dataclass, replace

from nvfp4_kernels.formats.fragments import TILE
from nvfp4_kernels.gemm.sm90.choose import (
    MANY_TOKENS,
    Problem,
    estimate,
    fits,
    many_token_configs,
    with_store,
)
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile
from nvfp4_kernels.moe.routing import TILE_TOKENS, expected_slots
from nvfp4_kernels.sm90.limits import REGISTERS, SMS

# Cycles of an SM for 64 × 64 elements of a weight and a tile of tokens, where all SMs are busy.
_CYCLES = {8: 125, 16: 167, 32: 202, 64: 215, 128: 288, 256: 512}
assert tuple(_CYCLES) == TILE_TOKENS
# Cost of a CTA without work, in 64 × 64 weight tiles that a warpgroup decodes in the same time.
_IDLE = 8
_SPREAD = 10  # standard deviations of a Poisson distribution that are summed


@dataclass(frozen=True)
class GroupedProblem:
    """Grouped GEMM of at most ``tiles`` tiles of ``tile_tokens`` tokens, each of one expert.

    Attributes:
        experts: number of this rank's experts.
        n, k: number of rows of each weight, and of elements per row.
        weights: number of weights per expert: 1, or 2 for gate and up.
        global_experts: number of experts of all ranks, over which slots are spread; None: same as
            ``experts``.
    """

    tiles: int
    tile_tokens: int
    experts: int
    n: int
    k: int
    weights: int = 1
    global_experts: int | None = None

    @property
    def slots(self) -> int:
        """Number of slots (token-expert pairs) of all ranks.

        Inverse of ``routing.max_tiles``, up to rounding.
        """
        more = self.tiles * self.tile_tokens - (self.tile_tokens - 1) * self.experts
        return self.tiles if self.tiles <= self.experts else more

    @property
    def used(self) -> int:
        """Expected number of tiles in use, at least one."""
        everywhere = self.experts if self.global_experts is None else self.global_experts
        slots = expected_slots(self.slots, self.experts, everywhere)
        return max(1, math.ceil(expected_tiles(slots, self.experts, self.tile_tokens)))


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
    """Choose the number of rows per token tile for the least estimated time of a layer's two GEMMs.

    Args:
        tokens: number of tokens, M.
        top_k: number of experts per token.
        experts: number of this rank's experts.
        global_experts: number of experts of all ranks.
        n: intermediate size, the rows of each weight of the first GEMM.
        k: hidden size.
        weights: number of weights per expert in the first GEMM.
        sms: number of SMs of the device.

    Returns:
        One of ``TILE_TOKENS``.
    """
    slots = expected_slots(tokens * top_k, experts, global_experts)

    def cycles(each: int) -> float:
        used = expected_tiles(slots, experts, each)
        products = ((n, k, weights), (k, n, 1))
        return sum(_cycles(each, used, *product, sms) for product in products)

    return min(TILE_TOKENS, key=cycles)


def _cycles(tokens: int, used: float, n: int, k: int, weights: int, sms: int) -> float:
    """Cycles of a GEMM of ``used`` token tiles; an SM computes at least one tile."""
    rows = TILE * _warpgroups(tokens, weights)
    tiles = max(1.0, used * math.ceil(n / rows) / sms)
    return tiles * weights * (rows // TILE) * math.ceil(k / TILE) * _CYCLES[tokens]


def _warpgroups(tokens: int, weights: int) -> int:
    """Number of warpgroups per CTA, each for 64 rows of every weight.

    All weight rows of a CTA, of one weight or of a pair, share the loaded tokens; with many tokens
    more rows pay off.
    """
    return 2 // weights if tokens < MANY_TOKENS else 2


@functools.cache
def choose_grouped_config(
    problem: GroupedProblem, output: EpilogueConfig, sms: int = SMS
) -> tuple[Tile, EpilogueConfig]:
    """Tile and epilogue for a problem, including the way of storing the result.

    Args:
        problem: grouped GEMM problem; must not be empty.
        output: epilogue, whose ``boxes`` is chosen here.
        sms: number of SMs of the device.
    """
    tokens, n, k = problem.tile_tokens, problem.n, problem.k
    as_one = Problem(problem.used * tokens, n, k, problem.weights)
    if tokens < MANY_TOKENS:
        found = [(t, with_store(output, t, n)) for t in _few_token_tiles(problem, sms)]
        tile, output = next((t, o) for t, o in found if fits(as_one, t, o))
    else:
        fitting = many_token_configs(as_one, output, sms)
        tile, output = min(
            ((t, o) for t, o in fitting if t.tokens == tokens),
            key=lambda each: estimate(as_one, each[0], sms),
        )
    return replace(tile, grouped=True), output


@functools.cache
def expected_tiles(slots: int, experts: int, tile_tokens: int) -> float:
    """Estimated number of tiles in use if every slot goes to any expert with equal probability.

    The number of an expert's slots is assumed Poisson-distributed; an expert with s slots has
    ceil(s / ``tile_tokens``) tiles.
    """
    if not slots or not experts:
        return 0.0
    mean = slots / experts
    most = min(slots, math.ceil(mean + _SPREAD * math.sqrt(mean) + _SPREAD))
    each, total = math.exp(-mean), 0.0
    if not each:  # hundreds of slots: half of the last tile is empty
        return experts * (mean / tile_tokens + (1 - 1 / tile_tokens) / 2)
    for count in range(1, most + 1):
        each *= mean / count
        total += each * math.ceil(count / tile_tokens)
    return min(experts * total, float(slots))


def _few_token_tiles(problem: GroupedProblem, sms: int) -> list[Tile]:
    """Tiles for few tokens, the best first; the last tile serves any problem."""
    tokens, weights = problem.tile_tokens, problem.weights
    plain = Tile(tokens, weights, warpgroups=_warpgroups(tokens, weights), ctas_per_sm=1 + weights)
    tiles = [replace(plain, k_tiles=k_tiles) for k_tiles in (2, 1)]
    together = math.ceil(problem.used * math.ceil(problem.n / TILE) / sms)
    # Few tiles to an SM: four warpgroups share the only one, two each of several.
    slices = max(2, 4 // together)
    sliced = Tile(tokens, weights, warpgroups=slices, slices=slices, ctas_per_sm=together)
    if _has_registers(sliced) and _pays(problem, sliced, sms):
        tiles = [replace(sliced, k_tiles=k_tiles) for k_tiles in (2, 1)] + tiles
    return [*tiles, Tile(tokens, weights, warpgroups=1)]


def _pays(problem: GroupedProblem, sliced: Tile, sms: int) -> bool:
    """Whether slices save more time than is lost to CTAs without a tile.

    With slices, as with split-K, a CTA has at most one tile, so that the grid covers all allocated
    tiles; under expert parallelism, most CTAs have no work.
    """
    saved = sliced.weights * math.ceil(problem.k / TILE) * (1 - 1 / sliced.slices)
    idle = (problem.tiles - problem.used) * math.ceil(problem.n / sliced.rows)
    return saved > _IDLE * idle / (sms * sliced.ctas_per_sm)


def _has_registers(tile: Tile) -> bool:
    """Whether an SM has registers for its CTAs' accumulators and decoding, by ptxas's counts."""
    return tile.ctas_per_sm * tile.threads * (60 + tile.columns * 5 // 8) <= REGISTERS
