"""SiLU of two float32 values at a time, with the packed arithmetic of sm_100."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.math import LOG2_E

_LEAST_SILU = -43.6  # e^43.6 is just below 2^63
_NEAREST = ptx.FPRoundingMode.RN


def silu_pair(x: Float32, y: Float32) -> tuple[Float32, Float32]:
    """SiLU of two values with one reciprocal, of the product of their denominators.

    MUFU is what SiLU waits for: three of its instructions for two values instead of four. From
    −43.6 down, where the product might not stay finite, SiLU is nearer to zero than 5e-18: zero.
    NaN is held off the denominators, and so stays NaN alone.
    """
    held = (cute.arch.fmax(x, _LEAST_SILU), cute.arch.fmax(y, _LEAST_SILU))
    exponents = ptx.mul_packed_f32x2(held, _both(-LOG2_E), rnd=_NEAREST)
    p, q = (cute.math.exp2(exponent, fastmath=True) for exponent in exponents)
    a, b = ptx.add_packed_f32x2((p, q), _both(1.0), rnd=_NEAREST)
    reciprocal = cute.arch.rcp_approx(a * b)
    sigmoids = ptx.mul_packed_f32x2((reciprocal, reciprocal), (b, a), rnd=_NEAREST)
    first, second = ptx.mul_packed_f32x2((x, y), sigmoids, rnd=_NEAREST)
    zero = Float32(0.0)
    return (
        cutlass.select_(x <= _LEAST_SILU, zero, first),
        cutlass.select_(y <= _LEAST_SILU, zero, second),
    )


def _both(value: float) -> tuple[Float32, Float32]:
    return Float32(value), Float32(value)
