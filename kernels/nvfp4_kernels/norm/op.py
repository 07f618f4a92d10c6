"""``add_rms_norm``: add a residual and normalise the sum."""

import math

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_dtype, check_same_device, check_shape
from nvfp4_kernels.dispatch import called
from nvfp4_kernels.norm.kernels import DTYPES, KERNELS


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``y / sqrt(mean(y²) + eps) · weight`` and ``y`` for ``y = x + residual``.

    Formed in float32 and rounded where vLLM's ``RMSNorm`` rounds: ``y`` to ``x``'s dtype as the new
    residual, while the float32 sum is what is normalised; the normalised value, and then its
    product with the weight. The mean is added up in an order that depends on K alone.

    On sm_90 ``weight`` is read while kernels before this one in the stream may still run, where
    those let it start early: none of these may write it. The kernel after this one may start while
    the one before this one still runs.

    Args:
        x: bfloat16 or float16 ``(M, K)``. On sm_90 K is a multiple of 8, at most 24576; rows start
            on multiples of 16 bytes, and the last stride is 1.
        residual: of ``x``'s dtype and shape; its row stride may differ.
        weight: ``(K,)`` of ``x``'s dtype, contiguous.
        eps: added to the mean square, 0 or more.

    Returns:
        The normalised rows and the new residual, of ``x``'s dtype and shape, contiguous.

    Raises:
        InvalidArgument: an unsupported dtype, shape, stride or alignment, named.
        NoKernelError: no kernel for this device.
    """
    return called(_add_rms_norm, x)(x, residual, weight, eps)


@torch.library.custom_op("nvfp4::add_rms_norm", mutates_args=())
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    check_dtype("x", x, DTYPES)
    if x.ndim != 2 or not x.shape[1]:
        raise InvalidArgument(
            f"x: shape is {tuple(x.shape)}, must be (M, K) with K above 0; view it as rows"
        )
    check_dtype("residual", residual, (x.dtype,))
    check_shape("residual", residual, x.shape, "one value for each of x")
    check_dtype("weight", weight, (x.dtype,))
    check_shape("weight", weight, x.shape[1:], "one factor per column of x")
    if not (math.isfinite(eps) and eps >= 0):
        raise InvalidArgument(f"eps: is {eps}, must be 0 or more and finite; models use 1e-5 or so")
    check_same_device(x=x, residual=residual, weight=weight)
    return KERNELS.select(x.device, "float").load()(x, residual, weight, eps)


@_add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)
