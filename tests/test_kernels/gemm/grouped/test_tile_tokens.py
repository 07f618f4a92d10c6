"""Rows of a layer's token tiles, for numbers of experts that are not divisible by the ranks."""

import pytest

from nvfp4_kernels.devices import SM_COUNTS
from nvfp4_kernels.gemm.grouped.tile_tokens import ExpertSizes, tile_tokens
from nvfp4_kernels.moe.routing import TILE_TOKENS, max_tiles

# Experts over all ranks: numbers as in pruned mixtures, and three that 4 ranks divide evenly.
EXPERTS = (1, 6, 97, 193, 375, 384, 672, 1021, 1024)


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("family", ["cpu", "sm_90", "sm_100"])
def test_ranks_with_one_expert_more_get_tiles_like_the_others(family: str, experts: int) -> None:
    """Each of 4 ranks holds a quarter of the experts, rounded up or down; tiles fit all slots."""
    sms, top_k = SM_COUNTS.get(family, 0), min(8, experts)
    for tokens in (1, 7, 64, 300, 4096):
        held = {max(1, experts // 4), -(-experts // 4)}
        rows = [
            tile_tokens(family, tokens, top_k, ExpertSizes(2048, 768, each, experts), sms)
            for each in held
        ]
        assert set(rows) <= set(TILE_TOKENS)
        slots = tokens * top_k
        for each, row in zip(held, rows, strict=True):
            tiles = max_tiles(slots, each, row)
            assert tiles * row >= slots
            assert tiles >= min(slots, each)
