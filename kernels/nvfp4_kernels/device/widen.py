"""Conversion of elements in registers to wider floats: 16 bits to float32, E4M3 to float16."""

from cutlass import BFloat16, Float32, Uint32, Vector
from cutlass.experimental import primitives as ptx

_HIGH = 0xFFFF0000  # half of a word


def widen(elements: Vector) -> Vector:
    """Convert elements to float32, exactly.

    Of two bfloat16 in a word, the lower is shifted and the upper masked, by one instruction each;
    a conversion would shift the upper half down and up again.
    """
    if elements.dtype is not BFloat16:
        return elements.to(Float32)
    words = elements.bitcast(Uint32)
    halves = [half for n in range(words.numel()) for half in (words[n] << 16, words[n] & _HIGH)]
    return Vector.from_elements(tuple(Uint32(half) for half in halves), Uint32).bitcast(Float32)


def e4m3_to_float16(word: Uint32) -> list[Uint32]:
    """Convert four E4M3 elements to float16, exactly; two words, the first of the lower bytes."""
    return list(
        ptx.inline_ptx(
            "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
            "cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high; }",
            write_only_types=[Uint32] * 2,
            read_only_args=[word],
        )
    )
