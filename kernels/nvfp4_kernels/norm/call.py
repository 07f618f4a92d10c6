"""Arguments of ``add_rms_norm`` as one value, passed to check, reference and launch."""

from typing import NamedTuple

from torch import Tensor


class AddRmsNormCall(NamedTuple):
    """Arguments of ``add_rms_norm``.

    Attributes:
        x: bfloat16 or float16 ``(M, K)``.
        residual: of ``x``'s dtype and shape.
        weight: ``(K,)`` of ``x``'s dtype.
        eps: added to the mean square.
    """

    x: Tensor
    residual: Tensor
    weight: Tensor
    eps: float
