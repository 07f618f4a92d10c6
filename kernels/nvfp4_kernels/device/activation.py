"""Activations of projections in registers: ``nvfp4_kernels.activation`` on the device."""

import cutlass.cute as cute
from cutlass import Float32

from nvfp4_kernels.activation import Activation
from nvfp4_kernels.device.math import gelu, gelu_tanh, relu2, silu, swigluoai


def activated(projections: list[Float32], activation: Activation) -> Float32:
    """The activation of gate and up, or of the one projection."""
    if len(projections) == 1:
        return function(projections[0], activation)
    gate, up = limited(projections, activation)
    return function(gate, activation) * up


def limited(projections: list[Float32], activation: Activation) -> list[Float32]:
    """Gate, bounded from above, and up, on both sides and with beta added; NaN stays NaN."""
    gate, up = projections
    if activation.limit is not None:
        gate, up = (cute.arch.fmin(each, activation.limit, nan=True) for each in projections)
        up = cute.arch.fmax(up, -activation.limit, nan=True)
    return [gate, up + activation.beta if activation.beta else up]


def function(x: Float32, activation: Activation) -> Float32:
    """The activation of one projection, or of the gate alone."""
    if activation.name == "swigluoai_uninterleave":
        return swigluoai(x, activation.alpha)
    functions = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu2": relu2}
    return functions[activation.name](x)
