"""Arguments of each op that quantises rows, as one value for check, reference and launch."""

from typing import NamedTuple

from torch import Tensor

from nvfp4_kernels.formats.output import Fp8Output, Nvfp4Output


class QuantizeCall(NamedTuple):
    """Arguments of ``quantize``.

    Attributes:
        x: bfloat16, float16 or float32 ``(..., M, K)``.
        output: format of the result.
    """

    x: Tensor
    output: Nvfp4Output | Fp8Output


class SiluMulQuantizeCall(NamedTuple):
    """Arguments of ``silu_mul_quantize``.

    Attributes:
        gate_up: bfloat16, float16 or float32 ``(..., M, 2·I)``, gate before up.
        output: format of the result.
    """

    gate_up: Tensor
    output: Nvfp4Output | Fp8Output


class RmsNormQuantizeCall(NamedTuple):
    """Arguments of ``rms_norm_quantize`` and ``add_rms_norm_quantize``.

    Attributes:
        x: bfloat16, float16 or float32 ``(..., M, K)``.
        residual: of ``x``'s dtype and shape, added to ``x``; None: no addition.
        weight: ``(K,)`` of ``x``'s dtype or float32.
        eps: number added to the mean square.
        output: format of the normalised result.
        out: memory for the new residual, contiguous, of ``x``'s dtype and shape; may be ``x`` or
            ``residual``. None: new memory.
    """

    x: Tensor
    residual: Tensor | None
    weight: Tensor
    eps: float
    output: Nvfp4Output | Fp8Output
    out: Tensor | None = None
