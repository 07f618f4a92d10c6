"""Functions of float32 values in registers: rounding, activations, parts of the softmax."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.experimental import primitives as ptx

LOG2_E = 1.4426950408889634
NEGATIVE_INFINITY = float("-inf")


def rounded(operation: str, a: Float32, b: Float32) -> Float32:
    """Result of ``add``, ``sub``, ``mul`` or ``div``, rounded to nearest even, never contracted.

    From plain operators, as in ``a * b + c``, the compiler may form an FMA.
    """
    return ptx.inline_ptx(
        f"{operation}.rn.f32 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Float32],
        read_only_args=[a, b],
    )


def exp2(value: Float32) -> Float32:
    """Base-2 exponential within 2 ulp; subnormal results are zero (PTX ISA, ex2.approx.ftz)."""
    return cute.math.exp2(value, approx=True, ftz=True)


def tanh(value: Float32) -> Float32:
    """Hyperbolic tangent: 1 − 2 / (e^2x + 1); below 0.25, against cancellation, a Taylor series."""
    magnitude = cute.math.abs(value)
    power = exp2(magnitude * (2.0 * LOG2_E))
    far = 1.0 - 2.0 * cute.arch.rcp_approx(power + 1.0)
    square = value * value
    series = square * (square * (square * (-17.0 / 315.0) + 2.0 / 15.0) - 1.0 / 3.0)
    near = magnitude + magnitude * series
    found = cutlass.select_(magnitude < 0.25, near, far)
    return cutlass.select_(value < 0.0, -found, found)


def silu(x: Float32) -> Float32:
    """SiLU, x · sigmoid(x), with approximate exp2 (2 ulp) and reciprocal (1 ulp)."""
    return x * sigmoid(x)


def sigmoid(x: Float32) -> Float32:
    """Sigmoid, 1 / (1 + e^−x)."""
    return cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -LOG2_E, fastmath=True))


def gelu(x: Float32) -> Float32:
    """GELU, x · Φ(x)."""
    return x * (0.5 + 0.5 * cute.math.erf(x * math.sqrt(0.5)))


def gelu_tanh(x: Float32) -> Float32:
    """GELU, tanh approximation, with (1 + tanh u) / 2 as sigmoid(2u) to avoid cancellation."""
    return x * sigmoid(x * (2.0 * math.sqrt(2.0 / math.pi)) * (1.0 + 0.044715 * (x * x)))


def relu2(x: Float32) -> Float32:
    """Squared ReLU, max(x, 0)²."""
    held = cute.arch.fmax(x, 0.0, nan=True)
    return held * held


def swigluoai(x: Float32, alpha: float) -> Float32:
    """SiLU with a factor in the sigmoid, x · sigmoid(alpha · x)."""
    return x * sigmoid(alpha * x)


def finite(peak: Float32) -> Float32:
    """Row maximum ``peak``; 0 for a row without visible keys, whose P is then 2^−∞ = 0."""
    return cutlass.select_(peak == NEGATIVE_INFINITY, Float32(0.0), peak)
