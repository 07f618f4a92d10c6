"""Shapes of modelled mixtures of experts, and batches whose tokens choose experts at random."""

import random
from dataclasses import dataclass

TOKENS = (1, 8, 64, 256, 1024)
DRAWS = 99  # draws of a batch's experts; the most typical draw is used


@dataclass(frozen=True)
class Shape:
    """Mixture of experts as sharded to one rank.

    Attributes:
        experts, local: number of experts of all ranks, and of this rank.
        top_k: number of experts of a token.
        hidden, intermediate: sizes.
    """

    experts: int
    local: int
    top_k: int
    hidden: int
    intermediate: int

    def ids(self, tokens: int) -> list[list[int]]:
        """Experts of each token; the first ``local`` experts belong to this rank."""
        drawn = [self._draw(tokens, random.Random(seed)) for seed in range(DRAWS)]
        hit = self.local * (1 - (1 - self.top_k / self.experts) ** tokens)
        slots = self.local * tokens * self.top_k / self.experts

        def oddity(ids: list[list[int]]) -> tuple[float, float]:
            counts = self.counts(ids)
            return abs(len(counts) - hit), abs(sum(counts) - slots)

        return min(drawn, key=oddity)

    def counts(self, ids: list[list[int]]) -> list[int]:
        """Number of tokens of each expert on this rank that has any tokens."""
        counts = [0] * self.experts
        for expert in (expert for of_token in ids for expert in of_token):
            counts[expert] += 1
        return [count for count in counts[: self.local] if count]

    def _draw(self, tokens: int, rng: random.Random) -> list[list[int]]:
        return [rng.sample(range(self.experts), self.top_k) for _ in range(tokens)]


MODELS = {
    "deepseek-v3-ep8": Shape(256, 32, 8, 7168, 2048),
    "qwen3-235b-ep4": Shape(128, 32, 8, 4096, 1536),
    "qwen3-30b": Shape(128, 128, 8, 2048, 768),
}
