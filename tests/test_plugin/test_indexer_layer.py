"""A layer like DeepSeek V3.2's with our indexer, step by step over a paged cache."""

from typing import Any

import pytest

from tests.test_plugin.indexer_layer import Layer, Step

FORMATS = ("nvfp4", "mxfp4", "fp8", "bf16")
STEPS: list[Step] = [
    [("a", 5)],  # fewer keys than are chosen
    [("a", 1), ("b", 11), ("c", 70)],
    [("a", 1), ("b", 1), ("c", 58)],  # c fills its second page to the last slot
    [("a", 1), ("b", 1), ("c", 1)],  # and begins a third
    [("c", 1), ("a", 60)],
]


@pytest.mark.parametrize("fmt", FORMATS)
def test_steps(fmt: str, indexer_config: Any) -> None:
    layer = Layer(indexer_config, fmt)
    for step in STEPS:
        layer.step(step)
        layer.check(step)
