"""Activations of a feed-forward layer: of gate and up projection, or of one alone."""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional

from nvfp4_kernels.checks import InvalidArgument

GatedName = Literal["silu", "gelu", "gelu_tanh", "swigluoai_uninterleave"]
UngatedName = Literal["silu", "gelu", "gelu_tanh", "relu2"]
GATED, UNGATED = get_args(GatedName), get_args(UngatedName)


class Activation(NamedTuple):
    """Activation, formed in float32.

    Gated, ``f(gate) · (up + beta)``; of one projection, ``f(x)``. f is SiLU, GELU or its tanh form,
    ``gate · sigmoid(alpha · gate)`` of ``"swigluoai_uninterleave"`` (gpt-oss and MiniMax M3, whose
    halves lie apart as all do here), or of one projection ``"relu2"``, ``max(x, 0)²``.

    Attributes:
        name: f.
        limit: bound of gate from above, and of up on both sides; None: there is none.
        alpha: factor in the sigmoid.
        beta: what is added to up.
    """

    name: str
    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Apply it to two float32 projections."""
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self._function(gate) * (up + self.beta if self.beta else up)

    def ungated(self, x: Tensor) -> Tensor:
        """Apply it to the one float32 projection."""
        return self._function(x)

    def _function(self, x: Tensor) -> Tensor:
        if self.name == "relu2":
            return functional.relu(x).square()
        if self.name == "silu":
            return functional.silu(x)
        if self.name == "swigluoai_uninterleave":
            return x * torch.sigmoid(self.alpha * x)
        return functional.gelu(x, approximate="tanh" if self.name == "gelu_tanh" else "none")


SILU = Activation("silu")


def check_gated(activation: Activation) -> None:
    """Raise unless it is one of gate and up."""
    name, limit, alpha, beta = activation
    if name not in GATED:
        raise InvalidArgument(
            f"activation: is {name!r}, must be one of {', '.join(GATED)} with a gate; an expert "
            "without one is grouped_gemm_quantized()'s"
        )
    if limit is not None and not limit > 0:
        raise InvalidArgument(f"activation.limit: is {limit}, must be positive; or leave it out")
    if name != "swigluoai_uninterleave" and (alpha, beta) != (1.0, 0.0):
        raise InvalidArgument(
            f"activation: alpha is {alpha} and beta {beta}, must be 1 and 0 with {name}; they are "
            "of swigluoai_uninterleave"
        )


def check_ungated(activation: Activation | None) -> None:
    """Raise unless it is one of a single projection, or none."""
    if activation is None:
        return
    name, *parameters = activation
    if name not in UNGATED:
        raise InvalidArgument(
            f"activation: is {name!r}, must be one of {', '.join(UNGATED)} or None without a gate; "
            "gate and up are grouped_silu_mul_gemm()'s"
        )
    if parameters != [None, 1.0, 0.0]:
        raise InvalidArgument(
            f"activation: limit, alpha and beta are {parameters}, must be None, 1 and 0 without a "
            "gate; leave them out"
        )
