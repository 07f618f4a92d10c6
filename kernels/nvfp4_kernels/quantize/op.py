"""``quantize``: activations to NVFP4, with scales in the layout of the GEMM."""

from typing import overload

import torch
from torch import Tensor

from nvfp4_kernels.checks import check_blocks_of_16, check_dtype
from nvfp4_kernels.device.rowwise.operands import (
    FLOAT_DTYPES,
    check_rows,
    new_operand,
    new_row_scale,
)
from nvfp4_kernels.formats.output import PerToken, Static
from nvfp4_kernels.quantize.arguments import check_output, op_of
from nvfp4_kernels.quantize.call import QuantizeCall
from nvfp4_kernels.quantize.kernels import KERNELS, PER_TOKEN_KERNELS


@overload
def quantize(x: Tensor, output: Static) -> tuple[Tensor, Tensor]: ...
@overload
def quantize(x: Tensor, output: PerToken) -> tuple[Tensor, Tensor, Tensor]: ...
def quantize(x: Tensor, output: Static | PerToken) -> tuple[Tensor, ...]:
    """Quantise activations to NVFP4.

    Args:
        x: bfloat16, float16 or float32 ``(..., M, K)``, K a multiple of 16. On a GPU the last
            stride is 1, and rows are evenly spaced and 32-byte aligned; on sm_100 K is at most
            40960 (float32: 24576) for ``PerToken``.
        output: ``Static`` with one calibrated global scale (ModelOpt's ``input_scale``, ``max|x| /
            2688`` over the calibration text), or ``PerToken``: a global scale per row,
            ``max|row| / 2688``.

    Returns:
        ``data`` uint8 ``(..., M, K/2)`` and ``scales`` float8_e4m3fn in the blocked layout ``(...,
        ceil(M/128), ceil(K/64), 32, 16)``, padding zero; with several terms, ``data`` ``(...,
        terms, M, K/2)``, and scales of stacked rows (see ``nvfp4_kernels.formats.terms``).
        ``Static``: values beyond the calibrated range saturate in every term. ``PerToken``: also
        ``row_scale`` float32 ``(..., M)``.

    Raises:
        InvalidArgument: an unsupported dtype, shape, stride or alignment; the message names it.
        NoKernelError: no kernel for this device.
    """
    ops = torch.ops.nvfp4
    return op_of(output, ops.quantize, ops.quantize_per_token)(x, *output)


def _check(call: QuantizeCall, output: Static | PerToken) -> None:
    check_dtype("x", call.x, FLOAT_DTYPES)
    check_rows("x", call.x)
    check_blocks_of_16("x", call.x.shape)
    check_output(output, x=call.x)


@torch.library.custom_op("nvfp4::quantize", mutates_args=())
def _quantize(x: Tensor, global_scale: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    call = QuantizeCall(x, global_scale, terms)
    _check(call, Static(global_scale, terms))
    return KERNELS.select(x.device, "w4a4").load()(call)


@_quantize.register_fake
def _(x: Tensor, global_scale: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    return new_operand(x, x.shape[-1], terms)


@torch.library.custom_op("nvfp4::quantize_per_token", mutates_args=())
def _quantize_per_token(x: Tensor, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    call = QuantizeCall(x, None, terms)
    _check(call, PerToken(terms))
    return PER_TOKEN_KERNELS.select(x.device, "w4a4").load()(call)


@_quantize_per_token.register_fake
def _(x: Tensor, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    return (*new_operand(x, x.shape[-1], terms), new_row_scale(x))
