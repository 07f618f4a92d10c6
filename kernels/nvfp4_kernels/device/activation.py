"""Activations of projections in registers: ``nvfp4_kernels.activation`` on the device."""

import cutlass.cute as cute
from cutlass import Float32

from nvfp4_kernels.activation import Activation
from nvfp4_kernels.device.math import gelu, gelu_tanh, relu2, silu, swigluoai


def activated(projections: list[Float32], activation: Activation) -> Float32:
    """The activation of gate and up, or of the one projection."""
    if len(projections) == 1:
        return _function(projections[0], activation)
    gate, up = _limited(projections, activation.limit)
    if activation.beta:
        up = up + activation.beta
    return _function(gate, activation) * up


def _limited(projections: list[Float32], limit: float | None) -> list[Float32]:
    """Gate, bounded from above, and up, on both sides; NaN stays NaN."""
    if limit is None:
        return projections
    gate, up = (cute.arch.fmin(each, limit, nan=True) for each in projections)
    return [gate, cute.arch.fmax(up, -limit, nan=True)]


def _function(x: Float32, activation: Activation) -> Float32:
    if activation.name == "swigluoai_uninterleave":
        return swigluoai(x, activation.alpha)
    functions = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu2": relu2}
    return functions[activation.name](x)
