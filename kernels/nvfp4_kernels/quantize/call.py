"""Arguments of each op that quantises rows, as one value for check, reference and launch.

``global_scale`` is float32 ``()``, or None: each row has its own global scale, computed from the
row. ``terms`` is the number of NVFP4 terms of the result.
"""

from typing import NamedTuple

from torch import Tensor


class QuantizeCall(NamedTuple):
    """Arguments of ``quantize``.

    Attributes:
        x: bfloat16, float16 or float32 ``(..., M, K)``.
        global_scale: global scale of the result; None: one per row.
        terms: number of NVFP4 terms of the result.
    """

    x: Tensor
    global_scale: Tensor | None
    terms: int = 1


class SiluMulQuantizeCall(NamedTuple):
    """Arguments of ``silu_mul_quantize``.

    Attributes:
        gate_up: bfloat16, float16 or float32 ``(..., M, 2·I)``, gate before up.
        global_scale: global scale of the result; None: one per row.
        terms: number of NVFP4 terms of the result.
    """

    gate_up: Tensor
    global_scale: Tensor | None
    terms: int = 1


class RmsNormQuantizeCall(NamedTuple):
    """Arguments of ``rms_norm_quantize`` and ``add_rms_norm_quantize``.

    Attributes:
        x: bfloat16, float16 or float32 ``(..., M, K)``.
        residual: of ``x``'s dtype and shape, added to ``x``; None: no addition.
        weight: ``(K,)`` of ``x``'s dtype or float32.
        eps: number added to the mean square.
        global_scale: global scale of the result; None: one per row.
        terms: number of NVFP4 terms of the result.
        out: memory for the new residual, contiguous, of ``x``'s dtype and shape; may be ``x`` or
            ``residual``. None: new memory.
    """

    x: Tensor
    residual: Tensor | None
    weight: Tensor
    eps: float
    global_scale: Tensor | None
    terms: int = 1
    out: Tensor | None = None
