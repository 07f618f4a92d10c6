"""``quantize`` and ``quantize_per_token``: activations to NVFP4, scales ready for the GEMM."""

import torch
from torch import Tensor

from nvfp4_kernels.checks import check_blocks_of_16, check_dtype, check_same_device, check_shape
from nvfp4_kernels.device.rowwise.operands import (
    FLOAT_DTYPES,
    check_rows,
    new_operand,
    new_row_scale,
)
from nvfp4_kernels.formats.terms import check_terms
from nvfp4_kernels.quantize.kernels import KERNELS, PER_TOKEN_KERNELS


def quantize(x: Tensor, global_scale: Tensor, terms: int = 1) -> tuple[Tensor, Tensor]:
    """Quantise activations with one calibrated global scale.

    Args:
        x: bfloat16, float16 or float32 ``(..., M, K)``, K a multiple of 16. On a GPU the last
            stride is 1, and rows are evenly spaced and 32-byte aligned.
        global_scale: float32 ``()``, the global scale of the result (ModelOpt's ``input_scale``,
            ``max|x| / 2688`` over the calibration text).
        terms: number of NVFP4 terms of ``x``, 1 to 4 (see ``nvfp4_kernels.formats.terms``).

    Returns:
        ``data`` uint8 ``(..., M, K/2)`` and ``scales`` float8_e4m3fn in the blocked layout ``(...,
        ceil(M/128), ceil(K/64), 32, 16)``, padding zero; with several terms, ``data`` ``(...,
        terms, M, K/2)`` and the scales of stacked rows. Values beyond the calibrated range saturate
        in every term.

    Raises:
        InvalidArgument: an unsupported dtype, shape, stride or alignment, named.
        NoKernelError: no kernel for this device.
    """
    return torch.ops.nvfp4.quantize(x, global_scale, terms)


def quantize_per_token(x: Tensor, terms: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise activations with one global scale per row, computed from the row.

    Args:
        x: as for ``quantize``; on sm_100 K is at most 40960 (float32: 24576).
        terms: as for ``quantize``.

    Returns:
        ``data`` and ``scales`` as for ``quantize``, and ``row_scale`` float32 ``(..., M)``,
        ``max|row| / 2688``.

    Raises:
        InvalidArgument: an unsupported dtype, shape, stride or alignment, named.
        NoKernelError: no kernel for this device.
    """
    return torch.ops.nvfp4.quantize_per_token(x, terms)


def _check_input(x: Tensor, terms: int) -> None:
    check_dtype("x", x, FLOAT_DTYPES)
    check_rows("x", x)
    check_blocks_of_16("x", x.shape)
    check_terms("terms", terms)


@torch.library.custom_op("nvfp4::quantize", mutates_args=())
def _quantize(x: Tensor, global_scale: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    _check_input(x, terms)
    check_dtype("global_scale", global_scale, (torch.float32,))
    check_shape("global_scale", global_scale, (), "for one scale per row use quantize_per_token")
    check_same_device(x=x, global_scale=global_scale)
    kernel = KERNELS.select(x.device, "w4a4").load()
    return kernel(x, global_scale, terms)


@_quantize.register_fake
def _(x: Tensor, global_scale: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    return new_operand(x, x.shape[-1], terms)


@torch.library.custom_op("nvfp4::quantize_per_token", mutates_args=())
def _quantize_per_token(x: Tensor, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    _check_input(x, terms)
    kernel = PER_TOKEN_KERNELS.select(x.device, "w4a4").load()
    return kernel(x, terms)


@_quantize_per_token.register_fake
def _(x: Tensor, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    return (*new_operand(x, x.shape[-1], terms), new_row_scale(x))
