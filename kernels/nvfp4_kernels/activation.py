"""Activations of a feed-forward layer: gated (of gate and up projections) or ungated."""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional

from nvfp4_kernels.checks import InvalidArgument

GatedName = Literal["silu", "gelu", "gelu_tanh", "swigluoai_uninterleave", "situ", "swiglustep"]
UngatedName = Literal["silu", "gelu", "gelu_tanh", "relu2"]
GATED, UNGATED = get_args(GatedName), get_args(UngatedName)


class Activation(NamedTuple):
    """Activation, computed in float32.

    Gated: ``f(gate) · (up + beta)``; ungated: ``f(x)``. f is SiLU, GELU or tanh GELU. Ungated, f
    may also be ``"relu2"``, ``max(x, 0)²``; gated, f may also be:

    * ``"swigluoai_uninterleave"`` (gpt-oss and MiniMax M3, here with gate and up in separate
      halves): f is ``gate · sigmoid(alpha · gate)``.
    * ``"situ"`` (Kimi K3): f is ``alpha · tanh(gate / alpha) · sigmoid(gate)``, and up becomes
      ``limit · tanh(up / limit)``.
    * ``"swiglustep"`` (Step 3): f is SiLU; the limit bounds ``f(gate)`` instead of gate.

    Attributes:
        name: name of the activation, which determines f.
        limit: upper bound of gate, and bound of up's magnitude, except as stated above; None: no
            bound.
        alpha: factor in the sigmoid; for ``"situ"`` the bound of gate.
        beta: offset added to up.
    """

    name: str
    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Apply the activation to float32 gate and up projections."""
        if self.name == "situ":
            bounded = up if self.limit is None else self.limit * torch.tanh(up / self.limit)
            return self._function(gate) * bounded
        if self.limit is not None:
            up = up.clamp(-self.limit, self.limit)
            if self.name != "swiglustep":
                gate = gate.clamp(max=self.limit)
        return self._function(gate) * (up + self.beta if self.beta else up)

    def ungated(self, x: Tensor) -> Tensor:
        """Apply the activation to a single float32 projection."""
        return self._function(x)

    def _function(self, x: Tensor) -> Tensor:
        if self.name == "relu2":
            return functional.relu(x).square()
        if self.name == "silu":
            return functional.silu(x)
        if self.name == "swigluoai_uninterleave":
            return x * torch.sigmoid(self.alpha * x)
        if self.name == "situ":
            return self.alpha * torch.tanh(x / self.alpha) * torch.sigmoid(x)
        if self.name == "swiglustep":
            return functional.silu(x).clamp(max=self.limit)
        return functional.gelu(x, approximate="tanh" if self.name == "gelu_tanh" else "none")


SILU = Activation("silu")
_WITH_ALPHA = ("swigluoai_uninterleave", "situ")


def check_gated(activation: Activation) -> None:
    """Raise unless ``activation`` is gated, and its limit, alpha and beta are valid."""
    name, limit, alpha, beta = activation
    if name not in GATED:
        raise InvalidArgument(
            f"activation: is {name!r}, must be one of {', '.join(GATED)} with a gate; use "
            "grouped_gemm() for experts without one"
        )
    if limit is not None and not limit > 0:
        raise InvalidArgument(f"activation.limit: is {limit}, must be positive; or leave it out")
    if name == "swiglustep" and limit is None:
        raise InvalidArgument("activation.limit: is None, must be given with swiglustep; give it 7")
    if name not in _WITH_ALPHA and alpha != 1.0:
        raise InvalidArgument(
            f"activation.alpha: is {alpha}, must be 1 with {name}; it is of "
            f"{' and '.join(_WITH_ALPHA)}"
        )
    if name == "situ" and not alpha > 0:
        raise InvalidArgument(
            f"activation.alpha: is {alpha}, must be positive with situ, whose gate it bounds"
        )
    if name != "swigluoai_uninterleave" and beta != 0.0:
        raise InvalidArgument(
            f"activation.beta: is {beta}, must be 0 with {name}; it is of swigluoai_uninterleave"
        )


def check_ungated(activation: Activation | None) -> None:
    """Raise unless ``activation`` is None, or ungated with default limit, alpha and beta."""
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
