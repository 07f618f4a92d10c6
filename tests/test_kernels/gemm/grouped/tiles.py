"""Token tiles for tests: operands among poisoned spare tiles, and expected products."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvfp4_kernels.activation import SILU, Activation
from nvfp4_kernels.formats.output import Static
from nvfp4_kernels.formats.terms import quantize_terms
from nvfp4_kernels.gemm.call import GroupedGemmCall
from nvfp4_kernels.gemm.grouped.reference import grouped_gemm as reference
from tests.test_kernels import oracle

GroupedOp = Callable[..., Any]
POISON = 0x7F  # a NaN as an E4M3 scale


@dataclass(frozen=True)
class Case:
    """A grouped product.

    Attributes:
        counts: tokens of each expert.
        tile_tokens: number of rows of a tile.
        n, k: sizes of each weight.
        weights: weights per expert; 2 for gate and up.
        spare: number of tiles of capacity beyond the tiles in use.
    """

    counts: tuple[int, ...]
    tile_tokens: int
    n: int
    k: int
    weights: int = 1
    row_scale: bool = False
    activation: Activation | None = None
    out_dtype: torch.dtype = torch.float32
    terms: int = 1
    spare: int = 1
    bias: torch.dtype | None = None

    @property
    def tiles(self) -> int:
        """Number of tiles in use."""
        return sum(-(-count // self.tile_tokens) for count in self.counts)


def groups_of(case: Case) -> Tensor:
    """Number of tiles in use and the expert of each tile; invalid indices for spare tiles."""
    experts = [
        expert
        for expert, count in enumerate(case.counts)
        for _ in range(-(-count // case.tile_tokens))
    ]
    return torch.tensor([len(experts), *experts, *[2**30] * case.spare], dtype=torch.int32)


def rows_in_use(case: Case) -> Tensor:
    """Whether each row of the tiles in use holds a token: bool (tiles, T)."""
    used = torch.zeros(case.tiles, case.tile_tokens, dtype=torch.bool)
    first = 0
    for count in case.counts:
        tiles = -(-count // case.tile_tokens)
        used[first : first + tiles].view(-1)[:count] = True
        first += tiles
    return used


def token_tiles(case: Case, codes: np.ndarray, scales: np.ndarray) -> tuple[Tensor, Tensor]:
    """Data and blocked scales of values in tiles; padding rows are zeros, spare tiles poison."""
    padding = ~rows_in_use(case).numpy()
    if case.terms > 1:
        padding = np.broadcast_to(padding[:, None], codes.shape[:-1])
    codes[padding], scales[padding] = 0.0, 0.0
    operand = oracle.operand(codes, oracle.e4m3(scales), case.terms)
    return with_spare(case, operand.data), with_spare(case, operand.scales)


def with_spare(case: Case, tiles: Tensor) -> Tensor:
    """``tiles`` followed by poisoned spare tiles."""
    spare = torch.full((case.spare, *tiles.shape[1:]), POISON, dtype=torch.uint8)
    return torch.cat([tiles.view(torch.uint8), spare]).view(tiles.dtype)


def arguments(case: Case) -> dict[str, Any]:
    """Arguments with exact sums; a token's gates are at least 32, where SiLU is the identity."""
    rng = np.random.default_rng(0)
    terms = (case.terms,) if case.terms > 1 else ()
    shape = (case.tiles, *terms, case.tile_tokens, case.k)
    codes = rng.choice([1.0, 2.0], size=shape)
    scales = rng.choice([1.0, 2.0], size=(*shape[:-1], case.k // 16))
    a, a_scales = token_tiles(case, codes, scales)
    experts = len(case.counts)
    up = oracle.grid_operand(rng, experts, case.n, case.k)
    # The gate is at least K; alpha makes it 64 or more, the row scale halves it at most.
    # Neighbouring     experts have different factors.
    number = np.arange(experts)
    alpha = 2.0 ** (number % 5 - 2)
    if case.weights == 2:
        gate = oracle.positive_operand(rng, experts, case.n, case.k)
        b = torch.stack([gate.data, up.data], dim=1)
        b_scales = torch.stack([x.scales.view(torch.uint8) for x in (gate, up)], dim=1)
        gate_alpha = 2.0 ** (6 - int(np.log2(case.k)) + number % 4)
        alpha = np.stack([gate_alpha, 2.0 ** (2 * number % 7 - 5)], axis=1)
    else:
        b, b_scales = up.data, up.scales.view(torch.uint8)
    rows = 2.0 ** rng.integers(-1, 1, (case.tiles, case.tile_tokens))
    rows = np.concatenate([rows, np.full((case.spare, case.tile_tokens), np.nan)])
    activation = case.activation or (SILU if case.weights == 2 else None)
    bias = None
    if case.bias is not None:  # as fine as the sums
        drawn = rng.integers(0, 65, (*alpha.shape, case.n)) / 16
        if case.weights == 2:
            drawn[:, 0] += 32  # gates of padding, too, are in SiLU's identity range
        bias = torch.from_numpy(drawn).to(case.bias)
    return {
        "a": a,
        "a_scales": a_scales,
        "groups": groups_of(case),
        "b": b,
        "b_scales": b_scales.view(torch.float8_e4m3fn),
        "alpha": torch.from_numpy(alpha).float(),
        "row_scale": torch.from_numpy(rows).float() if case.row_scale else None,
        "activation": activation,
        "terms": case.terms,
        "bias": bias,
    }


def of_reference(case: Case, args: dict[str, Any]) -> Tensor:
    """Float32 result of the tiles in use, by the reference."""
    given = args | {"n": case.n, "out_dtype": torch.float32}
    out, _ = reference(GroupedGemmCall(**given))
    return out[: case.tiles]


def check_untouched(case: Case, *results: Tensor) -> None:
    """Assert that no spare tile was written: new memory holds NaN, or 0xFF."""
    for result in results:
        spare = result[case.tiles :].contiguous().view(torch.uint8)
        poison = torch.empty_like(result[case.tiles :]).view(torch.uint8)
        assert torch.equal(spare, poison)


def check_exact(op: GroupedOp, case: Case) -> None:
    """Check that grid values give the reference's result, rounded once, and nothing else."""
    args = arguments(case)
    expected = of_reference(case, args)
    out = op(**args, out_dtype=case.out_dtype)
    assert out.dtype == case.out_dtype
    assert torch.equal(out[: case.tiles], expected.to(case.out_dtype))
    check_untouched(case, out)


def check_quantized(op: GroupedOp, case: Case, out_terms: int = 1) -> None:
    """Check the quantised result: the reference's, with the scale of each tile's expert."""
    args = arguments(case)
    full = of_reference(case, args)
    experts = args["groups"][1 : 1 + case.tiles].long()
    scale = 2.0 ** torch.arange(len(case.counts)) / 64
    data, scales = op(**args, output=Static(scale, out_terms))
    each = [
        quantize_terms(tile, scale[expert], out_terms)
        for tile, expert in zip(full, experts, strict=True)
    ]
    assert_same_bytes(data[: case.tiles], [tile for tile, _ in each])
    assert_same_bytes(scales[: case.tiles], [tile for _, tile in each])
    check_untouched(case, data, scales)


def assert_same_bytes(tiles: Tensor, expected: Sequence[Tensor]) -> None:
    """Assert that tiles are equal bit for bit."""
    assert len(tiles) == len(expected)
    for tile, other in zip(tiles, expected, strict=True):
        assert torch.equal(tile.view(torch.uint8), other.view(torch.uint8))
