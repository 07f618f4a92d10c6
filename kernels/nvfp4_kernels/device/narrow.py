"""Conversion of float32 registers to E4M3."""

from cutlass import Float32, Uint32
from cutlass.experimental import primitives as ptx


def to_e4m3(values: list[Float32]) -> Uint32:
    """Convert four elements to E4M3; the first is in the lowest byte.

    Elements are rounded to nearest even and saturate at ±448; NaN becomes 0x7F.
    """
    return ptx.inline_ptx(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }",
        write_only_types=[Uint32],
        read_only_args=values,
    )
