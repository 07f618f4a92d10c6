"""SiLU of a thread's elements, as the kernels of ``silu_mul_quantize`` compute it."""

import cutlass.cute as cute
from cutlass import Float32, Vector

from nvfp4_kernels.device.math import LOG2_E


def silu(x: Vector) -> Vector:
    """SiLU, x · sigmoid(x), in float32, rounded to ``x``'s dtype.

    For 16-bit types exp2 and the reciprocal are approximate, within 2 and 1 ulp: the relative error
    before the last rounding stays below (2·|x| + 8) · 2⁻²⁴. For x below about -87 the result is -0.
    """
    values = x.to(Float32)
    if x.dtype is Float32:
        return values / (1.0 + cute.math.exp(-values))
    elements = range(x.numel())
    scaled = values * Float32(-LOG2_E)
    powers = [cute.math.exp2(scaled[n], approx=True, ftz=True) for n in elements]
    sums = Vector.from_elements(tuple(powers), Float32) + Float32(1.0)
    sigmoid = [cute.arch.rcp_approx(sums[n]) for n in elements]
    return (values * Vector.from_elements(tuple(sigmoid), Float32)).to(x.dtype)
