"""Decode attention tiles in place of the chooser's, each with a problem that exercises the tile."""

from importlib import import_module
from typing import Any

import pytest

from nvfp4_kernels.attention.decode.sm90.tile import DecodeTile
from tests.test_kernels.attention.attention_cases import FP16
from tests.test_kernels.attention.decode.decode_cases import case


class Chosen:
    """A tile that replaces the result of ``choose_config``."""

    def __init__(self, splits: int, **rest: int) -> None:
        self.splits, self.rest = splits, rest

    def __call__(
        self, batch: int, kv_heads: int, group: int, head_dim: int, *_: int, fp8: bool = False
    ) -> Any:
        return DecodeTile(head_dim, group, self.splits, **self.rest, fp8=fp8)

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Make the op use this tile. Call inside the emulator, to which imports bind CuTe DSL."""
        module = import_module("nvfp4_kernels.attention.decode.sm90.launch")
        patch.setattr(module, "choose_config", self)


# Steps are full, half full, ragged, or begin within a page; some warps have no keys.
SHAPES = {
    "32 keys": (
        Chosen(1, keys=32, max_stages=2),
        case(700, 16, 32, 33, 1, 0, query_heads=4, heads=1),
    ),
    "32 keys, 2 splits, everything, D = 128": (
        Chosen(2, keys=32, max_stages=2),
        case(
            50, 150, window=130, soft_cap=3.0, sinks=True, scale=0.2, dtype=FP16, by_token=True,
            query_heads=16, heads=1, head_dim=128,
        ),
    ),
    "32 keys, 4 splits, pages of 32": (
        Chosen(4, keys=32), case(600, 40, query_heads=4, heads=1, page_size=32)
    ),
    "16 keys, 2 splits, long": (
        Chosen(2, keys=16, max_stages=2), case(760, 3, query_heads=4, heads=1)
    ),
    "32 keys, 8 splits, window": (
        Chosen(8, keys=32), case(330, 60, window=300, query_heads=4, heads=1)
    ),
}  # fmt: skip
