"""Arithmetic of tcgen05.mma: D = A * B.T + D.

Products and sums are FP32 in the order of BLAS (assumed: hardware multiplies exactly and adds
several products at once with truncation, which no document specifies). Operands times their block
scales are FP32 too, or FP64 where extreme UE8M0 scales could overflow FP32. An f16 accumulator is
widened, added to, and rounded to nearest even once per instruction (assumed). Integers are exact
and wrap around, or saturate where the instruction says so.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.emulator.findings import IllegalInstruction
from tests.emulator.tcgen05.formats import Bytes, Element, Floats, ScaleFormat, Words, decode_scales
from tests.emulator.tcgen05.instruction import MmaInstruction
from tests.emulator.tcgen05.tensor_memory_layout import accumulator_values

# Within 2^+-60, FP32 holds every scaled element; a product outside FP32 is outside D's range too.
_NARROW_EXPONENTS = (127 - 60, 127 + 60)


def scale_operand(matrix: Floats, scales: Bytes, scale_format: ScaleFormat) -> Floats:
    """Matrix with each block of a row multiplied by its scale.

    Args:
        matrix: float32 [rows, k].
        scales: uint8 [rows, scales], each for k / scales adjacent elements.
        scale_format: format of the scales.

    Returns:
        float32 [rows, k], or float64 where a scale is extreme.
    """
    factors: Floats = decode_scales(scales, scale_format)
    if scale_format is ScaleFormat.UE8M0 and (
        scales.min() < _NARROW_EXPONENTS[0] or scales.max() > _NARROW_EXPONENTS[1]
    ):
        factors = factors.astype(np.float64)
    rows, k = matrix.shape
    blocks = matrix.reshape(rows, scales.shape[1], -1) * factors[:, :, None]
    return blocks.reshape(rows, k)


def _integer(instruction: MmaInstruction, product: Floats, words: Words | None) -> Words:
    # |product| <= 32 * 255 * 255 < 2^24, so FP32 sums are exact.
    total = product.astype(np.int64)
    if words is not None:
        total += words.view(np.int32)
    if instruction.saturate:
        total = total.clip(-(2**31), 2**31 - 1)
    return (total & 0xFFFFFFFF).astype(np.uint32)


def multiply_accumulate(
    instruction: MmaInstruction,
    a: Floats,
    b: Floats,
    words: Words | None = None,
    scale_input_d: int = 0,
) -> Words:
    """D = A * B.T + D * 2^-scale_input_d, on words of tensor memory.

    Args:
        instruction: formats of D, negation and saturation.
        a: [rows, k], block scales already applied.
        b: [n, k], likewise.
        words: previous D, uint32 [rows, n], or None where enable-input-d is false.
        scale_input_d: 0 to 15.

    Returns:
        New D, uint32 [rows, n].

    Raises:
        IllegalInstruction: scale_input_d is out of range, or the kind does not support it.
    """
    if scale_input_d and not instruction.kind.scale_input_d:
        raise IllegalInstruction(
            f"scale-input-d with kind::{instruction.kind.name}: only kind::f16 and kind::tf32 take"
            " it (PTX ISA 9.7.16.10.9.1)"
        )
    if not 0 <= scale_input_d <= 15:
        raise IllegalInstruction(
            f"scale-input-d {scale_input_d}: accepted are 0 to 15 (PTX ISA 9.7.16.10.9.1)"
        )
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        product: npt.NDArray[Any] = a @ b.T
        if instruction.negate_a != instruction.negate_b:
            product = -product
        if instruction.d is Element.S32:
            return _integer(instruction, product, words)
        if words is not None:
            before = accumulator_values(words, instruction.d)
            product += before * np.float32(2.0**-scale_input_d) if scale_input_d else before
        if instruction.d is Element.F16:
            # The upper half of an f16 accumulator's word is written as zero (assumed).
            return product.astype(np.float16).view(np.uint16).astype(np.uint32)
        return product.astype(np.float32, copy=False).view(np.uint32)
