"""One global scale for gate and up, as vLLM's methods require, with unchanged results.

vLLM applies gate's global scale to up's weights as well, so that up's result is off by one factor
per expert. As the activation's result is proportional to up, down's global scale is multiplied by
the factor. The scale of down's input is divided by the factor, which keeps the input's 4-bit codes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

PROPORTIONAL = ("silu", "gelu", "gelu_tanh")  # proportional to up, unless up is clamped


class GlobalScales(NamedTuple):
    """Global scales of a rank's experts; up's scale may differ from gate's.

    Attributes:
        w13: float32 ``(E, 2)``, of gate and up.
        w2: float32 ``(E,)``, of down.
        w2_input: float32 ``(E,)``, of down's input.
        reciprocal: whether the scales are divisors instead of factors.
    """

    w13: Tensor
    w2: Tensor
    w2_input: Tensor
    reciprocal: bool

    def factors(self) -> Tensor:
        """Ratio of up's scale to gate's, float32 ``(E,)``; stored divisors are inverted first."""
        gate, up = self.w13.unbind(1)
        return gate / up if self.reciprocal else up / gate


def join(scales: GlobalScales) -> None:
    """Replace up's scales by gate's in place; compensate in the scales of down and down's input."""
    factors = scales.factors()
    if scales.reciprocal:
        factors = factors.reciprocal()
    scales.w2.mul_(factors)
    scales.w2_input.div_(factors)
    scales.w13[:, 1] = scales.w13[:, 0]


def described(factors: Tensor) -> str:
    """Text with the number of experts whose scales differ and the largest ratio; empty if equal."""
    off = int((factors != 1).sum())
    if not off:
        return ""
    furthest = float(torch.maximum(factors, factors.reciprocal()).max())
    return f"differ in {off} of {len(factors)} experts, by up to {furthest:.2f}×"
