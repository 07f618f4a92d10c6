"""One global scale for gate and up, as vLLM's methods take it, without changing what they compute.

vLLM gives up's weights gate's global scale. What up then lacks is a factor of each expert, and what
the activation gives is proportional to up: the factor goes into down's global scale, and the scale
of down's input shrinks by it, so that the same 4-bit codes come out.
"""

from typing import NamedTuple

import torch
from torch import Tensor

PROPORTIONAL = ("silu", "gelu", "gelu_tanh")  # to up, unless that is clamped


class GlobalScales(NamedTuple):
    """Global scales of the experts of a rank, of which up's may differ from gate's.

    Attributes:
        w13: float32 ``(E, 2)``, of gate and up.
        w2: float32 ``(E,)``, of down.
        w2_input: float32 ``(E,)``, of down's input.
        reciprocal: they are divisors, not factors.
    """

    w13: Tensor
    w2: Tensor
    w2_input: Tensor
    reciprocal: bool

    def factors(self) -> Tensor:
        """Ratio of up's scale to gate's, as factors: float32 ``(E,)``."""
        gate, up = self.w13.unbind(1)
        return gate / up if self.reciprocal else up / gate


def join(scales: GlobalScales) -> None:
    """Give up gate's scales, and down what they lack; in place."""
    factors = scales.factors()
    if scales.reciprocal:
        factors = factors.reciprocal()
    scales.w2.mul_(factors)
    scales.w2_input.div_(factors)
    scales.w13[:, 1] = scales.w13[:, 0]


def described(factors: Tensor) -> str:
    """Say how many experts' scales differ, and how far; empty if none does."""
    off = int((factors != 1).sum())
    if not off:
        return ""
    furthest = float(torch.maximum(factors, factors.reciprocal()).max())
    return f"differ in {off} of {len(factors)} experts, by up to {furthest:.2f}×"
