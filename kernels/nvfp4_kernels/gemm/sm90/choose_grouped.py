"""Chooser of the tile of grouped products, and of the tokens that a layer's tiles hold. Pure.

Up to a thousand tokens a mixture of experts reads weights, many small matrices of them: what counts
is how many bytes are under way. Every number here is from the time model of the tests, on the
layers of Qwen3-30B and of a rank of DeepSeek-V3 (``python -m tests.modelled.grouped_sm90``); none
was measured.
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
# Tiles of 64 × 64 elements that a warpgroup decodes while an SM starts and ends a CTA without work.
_IDLE = 8
_SPREAD = 10  # standard deviations of a Poisson distribution that are summed


@dataclass(frozen=True)
class GroupedProblem:
    """``tiles`` of ``tile_tokens`` tokens at the most, each times the weights of an expert.

    Attributes:
        experts: that this rank holds.
        n, k: of each of them.
        weights: of an expert: 1, or 2 for gate and up.
        global_experts: of all ranks, over which slots are spread; None: this rank holds them all.
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
        """Slots of all ranks, for which there is room: undoes ``max_tiles``, up to its rounding."""
        more = self.tiles * self.tile_tokens - (self.tile_tokens - 1) * self.experts
        return self.tiles if self.tiles <= self.experts else more

    @property
    def used(self) -> int:
        """Tiles that are expected to be in use, one at least."""
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
    weights: int = 2,
    sms: int = SMS,
) -> int:
    """Tokens of a tile, for both products of a layer: those that take the least time.

    Args:
        tokens: M.
        top_k: slots of each of them.
        experts: that this rank holds.
        global_experts: of all ranks.
        n: width between the products, rows of each weight of the first one.
        k: width of the layer's input and result.
        weights: of the first product, for each expert.
        sms: of the device.

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
    """Cycles of a product of ``used`` tiles; no SM does less than one tile."""
    rows = TILE * _warpgroups(tokens, weights)
    tiles = max(1.0, used * math.ceil(n / rows) / sms)
    return tiles * weights * (rows // TILE) * math.ceil(k / TILE) * _CYCLES[tokens]


def _warpgroups(tokens: int, weights: int) -> int:
    """Warpgroups of a CTA, of 64 rows of each weight.

    Two weights' rows share the tokens that come with them, whether of a pair or of one; many tokens
    are worth more rows.
    """
    return 2 // weights if tokens < MANY_TOKENS else 2


@functools.cache
def choose_grouped_config(
    problem: GroupedProblem, output: EpilogueConfig, sms: int = SMS
) -> tuple[Tile, EpilogueConfig]:
    """Tile, and epilogue with the way its result is stored.

    Args:
        problem: at least one element each way.
        output: its ``boxes`` is chosen here.
        sms: of the device.
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
    """Tiles in use where every slot goes to any expert alike, near enough.

    An expert's slots are taken for Poisson's: its tiles are as many as multiples of ``tile_tokens``
    below them.
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
    """Tiles for few tokens, the best first; the last one serves any problem."""
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
    """Whether slices save more than is lost to CTAs that have no tile.

    A split's CTAs have one tile each, so that its grid is what there is room for: on a rank that
    shares experts with others, mostly CTAs that start in vain.
    """
    saved = sliced.weights * math.ceil(problem.k / TILE) * (1 - 1 / sliced.slices)
    idle = (problem.tiles - problem.used) * math.ceil(problem.n / sliced.rows)
    return saved > _IDLE * idle / (sms * sliced.ctas_per_sm)


def _has_registers(tile: Tile) -> bool:
    """Whether an SM's CTAs have what decoding and accumulators take, as ptxas has it."""
    return tile.ctas_per_sm * tile.threads * (60 + tile.columns * 5 // 8) <= REGISTERS
