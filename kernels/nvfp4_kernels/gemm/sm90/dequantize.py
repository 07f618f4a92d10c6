"""Dequantisation in registers: from fragments in shared memory to A operands of ``wgmma``.

Every product of an E2M1 element and its scale has at most 6 significant bits, and so is exact in
bfloat16 and float16. The dequantised values are 2⁻⁷ times the true values: an element's bits,
placed at the low end of the exponent field, read as 2⁻¹²⁶ (float16: 2⁻¹⁴) times the element, and a
scale's bits as 2¹¹⁹ (2⁷) times the scale. The epilogue multiplies the sums by ``UNSCALE``.
"""

import cutlass.cute as cute
from cutlass import Array, Int32, Uint32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.formats.fragments import LANES, ROTATIONS, SCALE_BIT, STEPS, TARGETS
from nvfp4_kernels.sm90.limits import ActDtype

UNSCALE = 2.0**7
# Bits above a scale (5 bits of exponent, 3 of mantissa) in bfloat16, in both halves.
_BF16_TOP = 0x70007000
_BF16_SCALES, _F16_SCALES = 0x0FF00FF0, 0x7F807F80
_SIGNS, _F16_MAGNITUDES = 0x80008000, 0x0E000E00
_F16_SHIFT = 3  # from bfloat16's lowest bits of the exponent to float16's


def load(data: Array, scales: Array, warp: Int32, lane: Int32) -> tuple[list[Uint32], list[Uint32]]:
    """Load a lane's words of a tile: one word per 16 elements of K, and two words of scales."""
    words = data.load((warp * LANES + lane) * 4, STEPS, alignment=16).to_elements()
    factors = scales.load((warp * 8 + lane // 4) * 2, 2, alignment=8).to_elements()
    return [Uint32(word) for word in words], [Uint32(word) for word in factors]


def dequantized(
    words: list[Uint32], factors: list[Uint32], step: int, dtype: ActDtype
) -> list[Uint32]:
    """Fragment of operand A for K step ``step``, in the order of the MMA's registers.

    ``words`` and ``factors`` are results of ``load``. The four returned words hold two elements
    each: of the upper row, of the lower row, and of both rows 8 elements further along K.
    """
    scales = _scales(factors[step // 2], step % 2, dtype)
    pairs = _pairs(words[step], dtype)
    return [_times(pair, scales, i % 2, dtype) for i, pair in enumerate(pairs)]


def _scales(word: Uint32, odd: int, dtype: ActDtype) -> Uint32:
    """Scales of the upper and the lower row, in the low and the high half of the returned word.

    ``odd``: 0 for the first 16 elements of K that ``word`` covers, 1 for the second.
    """
    rotation = 8 * odd
    if dtype == "bfloat16":
        # The grid has depth 1, which ptxas cannot know: a value that looks variable stays in a
        # register, and one LOP3 has it beside the mask, where two constants would need two.
        top = Uint32(_BF16_TOP - 1) + Uint32(cute.arch.grid_dim()[2])
        return _rotated(word, rotation) & Uint32(_BF16_SCALES) | top
    return _rotated(word, rotation + 7 - SCALE_BIT) & Uint32(_F16_SCALES)


def _pairs(word: Uint32, dtype: ActDtype) -> list[Uint32]:
    """Unscaled values of the four pairs of a word."""
    pairs = []
    for rotations in ROTATIONS:
        pair = Uint32(0)
        for by in sorted(set(rotations)):
            bits = [t for t, r in zip(TARGETS, rotations, strict=True) if r == by]
            mask = sum(1 << bit | 1 << bit + 16 for bit in bits)
            pair = pair | _rotated(word, by) & Uint32(mask)
        pairs.append(pair)
    if dtype == "bfloat16":
        return pairs
    magnitudes = Uint32(_F16_MAGNITUDES)
    return [pair & Uint32(_SIGNS) | pair << _F16_SHIFT & magnitudes for pair in pairs]


def _rotated(word: Uint32, by: int) -> Uint32:
    """Rotate a word left by ``by`` bits."""
    if by == 0:
        return word
    if by <= min(TARGETS):
        return word << by  # no needed bit wraps around
    return ptx.inline_ptx(
        f"shf.l.wrap.b32 {{$w0}}, {{$r0}}, {{$r0}}, {by};",
        write_only_types=[Uint32],
        read_only_args=[word],
    )


def _times(pair: Uint32, scales: Uint32, half: int, dtype: ActDtype) -> Uint32:
    """Multiply both elements of a pair by the scale in one half of ``scales``."""
    kind = "bf16x2" if dtype == "bfloat16" else "f16x2"
    chosen = ("low", "high")[half]
    # ptxas reads the half in place.
    return ptx.inline_ptx(
        "{ .reg .b16 low, high; .reg .b32 both; mov.b32 {low, high}, {$r1}; "
        f"mov.b32 both, {{{chosen}, {chosen}}}; mul.rn.{kind} {{$w0}}, {{$r0}}, both; }}",
        write_only_types=[Uint32],
        read_only_args=[pair, scales],
    )
