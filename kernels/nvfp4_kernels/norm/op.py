"""``add_rms_norm``: add a residual and normalise the sum."""

import math

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_dtype, check_same_device, check_shape
from nvfp4_kernels.dispatch import called
from nvfp4_kernels.norm.call import AddRmsNormCall
from nvfp4_kernels.norm.kernels import DTYPES, KERNELS


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``y / sqrt(mean(y²) + eps) · weight``, and ``y`` itself, where ``y = x + residual``.

    The arithmetic is float32, with the roundings of vLLM's ``RMSNorm``: the returned ``y`` is
    rounded to ``x``'s dtype, but the unrounded ``y`` is normalised; the normalised value and the
    product with the weight are each rounded, too. The summation order of the mean depends on K
    alone.

    On sm_90 ``weight`` may be read while preceding kernels that allow programmatic dependent launch
    still run: these kernels must not write ``weight``. The kernel after this op may start while the
    kernel before this op still runs.

    Args:
        x: bfloat16 or float16 ``(M, K)``. On sm_90 K is a multiple of 8, at most 24576; rows start
            on multiples of 16 bytes, and the last stride is 1.
        residual: of ``x``'s dtype and shape; the row stride may differ.
        weight: ``(K,)`` of ``x``'s dtype, contiguous.
        eps: number added to the mean square, 0 or more.

    Returns:
        The normalised rows and the new residual, of ``x``'s dtype and shape, contiguous.

    Raises:
        InvalidArgument: an unsupported dtype, shape, stride or alignment; the message names it.
        NoKernelError: no kernel for this device.
    """
    return called(_add_rms_norm, x)(x, residual, weight, eps)


def _check(call: AddRmsNormCall) -> None:
    """Check the arguments of ``add_rms_norm``."""
    x, residual, weight, eps = call
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


@torch.library.custom_op("nvfp4::add_rms_norm", mutates_args=())
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    call = AddRmsNormCall(x, residual, weight, eps)
    _check(call)
    return KERNELS.select(x.device, "float").load()(call)


@_add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)
