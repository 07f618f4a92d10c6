"""``rms_norm_quantize`` and its siblings: norm before a layer's GEMM, straight to NVFP4."""

import math

import torch
from torch import Tensor

from nvfp4_kernels.checks import (
    InvalidArgument,
    check_blocks_of_16,
    check_dtype,
    check_same_device,
    check_shape,
)
from nvfp4_kernels.device.rowwise.operands import (
    FLOAT_DTYPES,
    check_rows,
    new_operand,
    new_row_scale,
)
from nvfp4_kernels.formats.terms import check_terms
from nvfp4_kernels.quantize.rms_norm.kernels import KERNELS


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, global_scale: Tensor, terms: int = 1
) -> tuple[Tensor, Tensor]:
    """``x / sqrt(mean(x²) + eps) · weight`` in NVFP4, with one calibrated global scale.

    Computed in float32 with the roundings of vLLM's ``RMSNorm``: the normalised value to the
    weight's dtype, the product with the weight to ``x``'s dtype; then bit-identical to
    ``quantize``. The summation order of the mean depends on shapes alone.

    Args:
        x: bfloat16, float16 or float32 ``(..., M, K)``, K a multiple of 16; on sm_100 at most
            24576. On a GPU the last stride is 1, and rows are evenly spaced and 32-byte aligned.
        weight: ``(K,)`` of ``x``'s dtype or float32, contiguous.
        eps: added to the mean square, 0 or more.
        global_scale: float32 ``()``, the global scale of the result.
        terms: number of NVFP4 terms of the result, 1 to 4 (see ``nvfp4_kernels.formats.terms``).

    Returns:
        ``data`` uint8 ``(..., M, K/2)`` and ``scales`` float8_e4m3fn in the blocked layout ``(...,
        ceil(M/128), ceil(K/64), 32, 16)``, padding zero; with several terms, as returned by
        ``quantize``.

    Raises:
        InvalidArgument: an unsupported dtype, shape, stride or alignment, named.
        NoKernelError: no kernel for this device.
    """
    return torch.ops.nvfp4.rms_norm_quantize(x, weight, eps, global_scale, terms)


def rms_norm_quantize_per_token(
    x: Tensor, weight: Tensor, eps: float, terms: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Variant of ``rms_norm_quantize`` with one global scale per row, computed from the row.

    Returns:
        ``data``, ``scales``, and ``row_scale`` float32 ``(..., M)``.

    Raises:
        InvalidArgument, NoKernelError: as ``rms_norm_quantize``.
    """
    return torch.ops.nvfp4.rms_norm_quantize_per_token(x, weight, eps, terms)


def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, global_scale: Tensor, terms: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """``rms_norm_quantize`` of ``x + residual``, and the sum; inputs are not modified.

    The float32 sum is normalised; the returned sum is rounded.

    Args:
        x: as for ``rms_norm_quantize``.
        residual: of ``x``'s dtype and shape; the row stride may differ.
        weight: as for ``rms_norm_quantize``.
        eps: as for ``rms_norm_quantize``.
        global_scale: as for ``rms_norm_quantize``.
        terms: as for ``rms_norm_quantize``.

    Returns:
        ``data``, ``scales``, and the new residual ``x + residual``, of ``x``'s dtype and shape,
        contiguous.

    Raises:
        InvalidArgument, NoKernelError: as ``rms_norm_quantize``.
    """
    return torch.ops.nvfp4.add_rms_norm_quantize(x, residual, weight, eps, global_scale, terms)


def add_rms_norm_quantize_per_token(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, terms: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Variant of ``add_rms_norm_quantize`` with one global scale per row, computed from the row.

    Returns:
        ``data``, ``scales``, ``row_scale`` float32 ``(..., M)``, and the new residual.

    Raises:
        InvalidArgument, NoKernelError: as ``rms_norm_quantize``.
    """
    return torch.ops.nvfp4.add_rms_norm_quantize_per_token(x, residual, weight, eps, terms)


def _check(x: Tensor, weight: Tensor, eps: float, terms: int, **more: Tensor) -> None:
    """Check the common arguments of all four ops, and ``residual`` and ``global_scale`` if any."""
    check_dtype("x", x, FLOAT_DTYPES)
    check_rows("x", x)
    check_blocks_of_16("x", x.shape)
    check_dtype("weight", weight, tuple(dict.fromkeys((x.dtype, torch.float32))))
    check_shape("weight", weight, x.shape[-1:], "one factor per column of x")
    if not (math.isfinite(eps) and eps >= 0):
        raise InvalidArgument(f"eps: is {eps}, must be 0 or more and finite; models use 1e-5 or so")
    check_terms("terms", terms)
    if "residual" in more:
        check_dtype("residual", more["residual"], (x.dtype,))
        check_shape("residual", more["residual"], x.shape, "one value for each of x")
    if "global_scale" in more:
        check_dtype("global_scale", more["global_scale"], (torch.float32,))
        remedy = "for one scale per row use the per_token op"
        check_shape("global_scale", more["global_scale"], (), remedy)
    check_same_device(x=x, weight=weight, **more)


@torch.library.custom_op("nvfp4::rms_norm_quantize", mutates_args=())
def _rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, global_scale: Tensor, terms: int
) -> tuple[Tensor, Tensor]:
    _check(x, weight, eps, terms, global_scale=global_scale)
    kernel = KERNELS["rms_norm_quantize"].select(x.device, "w4a4").load()
    return kernel(x, weight, eps, global_scale, terms)


@_rms_norm_quantize.register_fake
def _(
    x: Tensor, weight: Tensor, eps: float, global_scale: Tensor, terms: int
) -> tuple[Tensor, Tensor]:
    return new_operand(x, x.shape[-1], terms)


@torch.library.custom_op("nvfp4::rms_norm_quantize_per_token", mutates_args=())
def _rms_norm_quantize_per_token(
    x: Tensor, weight: Tensor, eps: float, terms: int
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, weight, eps, terms)
    kernel = KERNELS["rms_norm_quantize_per_token"].select(x.device, "w4a4").load()
    return kernel(x, weight, eps, terms)


@_rms_norm_quantize_per_token.register_fake
def _(x: Tensor, weight: Tensor, eps: float, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    return (*new_operand(x, x.shape[-1], terms), new_row_scale(x))


@torch.library.custom_op("nvfp4::add_rms_norm_quantize", mutates_args=())
def _add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, global_scale: Tensor, terms: int
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x, weight, eps, terms, residual=residual, global_scale=global_scale)
    kernel = KERNELS["add_rms_norm_quantize"].select(x.device, "w4a4").load()
    return kernel(x, residual, weight, eps, global_scale, terms)


@_add_rms_norm_quantize.register_fake
def _(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, global_scale: Tensor, terms: int
) -> tuple[Tensor, Tensor, Tensor]:
    return (*new_operand(x, x.shape[-1], terms), x.new_empty(x.shape))


@torch.library.custom_op("nvfp4::add_rms_norm_quantize_per_token", mutates_args=())
def _add_rms_norm_quantize_per_token(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, terms: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(x, weight, eps, terms, residual=residual)
    kernel = KERNELS["add_rms_norm_quantize_per_token"].select(x.device, "w4a4").load()
    return kernel(x, residual, weight, eps, terms)


@_add_rms_norm_quantize_per_token.register_fake
def _(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, terms: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (*new_operand(x, x.shape[-1], terms), new_row_scale(x), x.new_empty(x.shape))
