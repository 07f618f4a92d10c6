"""Sizes of the models that can be trained, each with a suitable amount of text and rates."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Size:
    """One model size.

    Attributes:
        vocabulary: number of ids of the tokenizer.
        characters: maximum number of characters to read.
        settings: arguments of ``TrainSettings``.
    """

    vocabulary: int
    characters: int
    settings: dict[str, Any]


def _size(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """Settings for a GPU: 32,768 tokens per step; the 250m model needs an estimated 70 GB.

    K of every linear, and half of K, are multiples of 64, as NVFP4 with two ranks requires.
    """
    return {
        "hidden": hidden,
        "intermediate": intermediate,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": 64,
        "batch": 32,
        "sequence": 1024,
        # The embedding is the head too: a step moves each logit by up to hidden · rate. 1.5 and 5
        # learn at a width of 1024, 20 makes the loss rise for the first 20 steps.
        "other_rate": 2 / hidden,
        "momentum": 0.95,
    }


SIZES = {
    "tiny": Size(
        2048,
        4_000_000,
        _size(128, 384, layers=2, heads=2, kv_heads=2) | {"batch": 8, "sequence": 128}
        | {"other_rate": 0.02},
    ),
    "20m": Size(16_384, 250_000_000, _size(512, 1408, layers=4, heads=8, kv_heads=2)),
    "125m": Size(16_384, 250_000_000, _size(1024, 2816, layers=10, heads=16, kv_heads=4)),
    "250m": Size(16_384, 250_000_000, _size(1024, 2816, layers=20, heads=16, kv_heads=4)),
}  # fmt: skip
