"""``rms_norm_quantize``, ``add_rms_norm_quantize``: norm before a layer's GEMM, quantised at once.

``add_rms_norm`` with a 16-bit result is an op of its own (``nvfp4_kernels.norm``): its kernels run
on other devices, and take other shapes and dtypes.
"""

from typing import Any, overload

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from nvfp4_kernels.formats.output import (
    Fp8Output,
    Nvfp4Output,
    PerToken,
    PerTokenFp8,
    Static,
    StaticFp8,
)
from nvfp4_kernels.quantize.arguments import op_of
from nvfp4_kernels.quantize.rms_norm.arguments import FORMS, Form, check
from nvfp4_kernels.quantize.rms_norm.kernels import KERNELS


@overload
def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, output: Static | PerTokenFp8
) -> tuple[Tensor, Tensor]: ...
@overload
def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, output: PerToken
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def rms_norm_quantize(x: Tensor, weight: Tensor, eps: float, output: StaticFp8) -> Tensor: ...
def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, output: Nvfp4Output | Fp8Output
) -> Tensor | tuple[Tensor, ...]:
    """``x / sqrt(mean(x²) + eps) · weight`` in NVFP4 or E4M3.

    The arithmetic is float32, with the roundings of vLLM's ``RMSNorm``: the normalised value is
    rounded to the weight's dtype, the product with the weight to ``x``'s dtype. The result is
    bit-identical to ``quantize`` of that product. On sm_100 the summation order of the mean depends
    on shapes and the number of SMs alone; on sm_90 on K alone, as in ``add_rms_norm``.

    On sm_90 ``weight`` may be read while preceding kernels that allow programmatic dependent launch
    still run: these kernels must not write ``weight``.

    Args:
        x: bfloat16, float16 or float32 ``(..., M, K)``, K a multiple of 16; on a GPU at most 24576.
            On a GPU the last stride is 1, and rows are evenly spaced and 32-byte aligned (sm_90:
            16-byte aligned).
        weight: ``(K,)`` of ``x``'s dtype or float32, contiguous.
        eps: number added to the mean square, 0 or more.
        output: as for ``quantize``.

    Returns:
        As ``quantize`` of a tensor of ``x``'s shape.

    Raises:
        InvalidArgument: an unsupported dtype, shape, stride or alignment; the message names it.
        NoKernelError: no kernel for this device.
    """
    return op_of(output, "rms_norm_quantize")(x, weight, eps, *output)


@overload
def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, output: Static | PerTokenFp8
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, output: PerToken
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
@overload
def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, output: StaticFp8
) -> tuple[Tensor, Tensor]: ...
def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, output: Nvfp4Output | Fp8Output
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
    return op_of(output, "add_rms_norm_quantize")(x, residual, weight, eps, *output)


def _define(form: Form) -> CustomOpDef:
    def run(*arguments: Any) -> Any:
        call = form.call(*arguments)
        check(call, form)
        return form.returned(KERNELS[form].select(call.x.device, form.mode).load()(call))

    schema = f"({form.parameters}) -> {form.results}"
    op = torch.library.custom_op(f"nvfp4::{form.name}", run, mutates_args=(), schema=schema)
    op.register_fake(form.fake)
    return op


_OPS = {form: _define(form) for form in FORMS}
