"""Activation functions of float32 registers: device code of ``nvfp4_kernels.activation``."""

import cutlass.cute as cute
from cutlass import Float32

from nvfp4_kernels.activation import Activation
from nvfp4_kernels.device.math import gelu, gelu_tanh, relu2, sigmoid, silu, swigluoai, tanh


def activated(projections: list[Float32], activation: Activation) -> Float32:
    """Apply the activation to gate and up, or to a single projection."""
    if len(projections) == 1:
        return function(projections[0], activation)
    gate, up = limited(projections, activation)
    return function(gate, activation) * up


def limited(projections: list[Float32], activation: Activation) -> list[Float32]:
    """Apply limits that precede the function f, and add ``beta`` to up; NaN stays NaN."""
    (gate, up), limit = projections, activation.limit
    if activation.name == "situ":
        return [gate, up if limit is None else limit * tanh(up * (1.0 / limit))]
    if limit is not None:
        up = cute.arch.fmax(cute.arch.fmin(up, limit, nan=True), -limit, nan=True)
        if activation.name != "swiglustep":
            gate = cute.arch.fmin(gate, limit, nan=True)
    return [gate, up + activation.beta if activation.beta else up]


def function(x: Float32, activation: Activation) -> Float32:
    """Apply the activation function f to a single projection, or to the gate."""
    if activation.name == "swigluoai_uninterleave":
        return swigluoai(x, activation.alpha)
    if activation.name == "situ":
        return activation.alpha * tanh(x * (1.0 / activation.alpha)) * sigmoid(x)
    if activation.name == "swiglustep":
        return cute.arch.fmin(silu(x), activation.limit, nan=True)
    functions = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu2": relu2}
    return functions[activation.name](x)
