"""Arguments of ``add_rms_norm`` as one value for the check, the reference and the launch."""

from typing import NamedTuple

from torch import Tensor


class AddRmsNormCall(NamedTuple):
    """Arguments of ``add_rms_norm``.

    Attributes:
        x: bfloat16 or float16 ``(M, K)``.
        residual: ``(M, K)`` of ``x``'s dtype, added to ``x``.
        weight: ``(K,)`` of ``x``'s dtype.
        eps: number added to the mean square.
    """

    x: Tensor
    residual: Tensor
    weight: Tensor
    eps: float
