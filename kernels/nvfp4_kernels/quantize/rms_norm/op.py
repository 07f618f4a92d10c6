"""``rms_norm_quantize``, ``add_rms_norm_quantize``: norm before a layer's GEMM, straight to NVFP4.

``add_rms_norm`` with a 16-bit result is an op of its own (``nvfp4_kernels.norm``): its kernels run
on other devices, and take other shapes and dtypes.
"""

from typing import Any, overload

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from nvfp4_kernels.formats.output import PerToken, Static
from nvfp4_kernels.quantize.arguments import op_of
from nvfp4_kernels.quantize.rms_norm.arguments import FORMS, Form, check
from nvfp4_kernels.quantize.rms_norm.kernels import KERNELS


@overload
def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, output: Static
) -> tuple[Tensor, Tensor]: ...
@overload
def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, output: PerToken
) -> tuple[Tensor, Tensor, Tensor]: ...
def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, output: Static | PerToken
) -> tuple[Tensor, ...]:
    """``x / sqrt(mean(x²) + eps) · weight`` in NVFP4.

    The arithmetic is float32, with the roundings of vLLM's ``RMSNorm``: the normalised value is
    rounded to the weight's dtype, the product with the weight to ``x``'s dtype. The result is
    bit-identical to ``quantize`` of that product. On sm_100 the summation order of the mean depends
    on shapes and the number of SMs alone.

    Args:
        x: bfloat16, float16 or float32 ``(..., M, K)``, K a multiple of 16; on sm_100 at most
            24576. On a GPU the last stride is 1, and rows are evenly spaced and 32-byte aligned.
        weight: ``(K,)`` of ``x``'s dtype or float32, contiguous.
        eps: number added to the mean square, 0 or more.
        output: as for ``quantize``.

    Returns:
        ``data`` uint8 ``(..., M, K/2)`` and ``scales`` float8_e4m3fn in the blocked layout ``(...,
        ceil(M/128), ceil(K/64), 32, 16)``, padding zero; with several terms, as returned by
        ``quantize``. ``PerToken``: also ``row_scale`` float32 ``(..., M)``.

    Raises:
        InvalidArgument: an unsupported dtype, shape, stride or alignment; the message names it.
        NoKernelError: no kernel for this device.
    """
    ops = torch.ops.nvfp4
    op = op_of(output, ops.rms_norm_quantize, ops.rms_norm_quantize_per_token)
    return op(x, weight, eps, *output)


@overload
def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, output: Static
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, output: PerToken
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, output: Static | PerToken
) -> tuple[Tensor, ...]:
    """``rms_norm_quantize`` of ``x + residual``, and the sum itself; inputs are not modified.

    The float32 sum is normalised; the returned sum is rounded to ``x``'s dtype.

    Args:
        x: as for ``rms_norm_quantize``.
        residual: of ``x``'s dtype and shape; the row stride may differ.
        weight: as for ``rms_norm_quantize``.
        eps: as for ``rms_norm_quantize``.
        output: as for ``quantize``.

    Returns:
        The results of ``rms_norm_quantize``, and the new residual ``x + residual``, of ``x``'s
        dtype and shape, contiguous.

    Raises:
        InvalidArgument, NoKernelError: as ``rms_norm_quantize``.
    """
    ops = torch.ops.nvfp4
    op = op_of(output, ops.add_rms_norm_quantize, ops.add_rms_norm_quantize_per_token)
    return op(x, residual, weight, eps, *output)


def _define(form: Form) -> CustomOpDef:
    def run(*arguments: Any) -> Any:
        call = form.call(*arguments)
        check(call, form)
        return KERNELS[form].select(call.x.device, "w4a4").load()(call)

    schema = f"({form.parameters}) -> {form.results}"
    op = torch.library.custom_op(f"nvfp4::{form.name}", run, mutates_args=(), schema=schema)
    op.register_fake(form.fake)
    return op


_OPS = {form: _define(form) for form in FORMS}
