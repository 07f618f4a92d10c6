"""Conversion of 16-bit elements in registers to float32."""

from cutlass import BFloat16, Float32, Uint32, Vector

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
