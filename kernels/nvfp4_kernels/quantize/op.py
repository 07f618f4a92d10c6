"""``quantize``: activations to NVFP4, with scales in the layout of the GEMM, or to E4M3."""

from typing import overload

import torch
from torch import Tensor

from nvfp4_kernels.checks import check_blocks_of_16, check_dtype
from nvfp4_kernels.device.rowwise.operands import FLOAT_DTYPES, check_rows
from nvfp4_kernels.formats.output import (
    Fp8Output,
    Nvfp4Output,
    PerToken,
    PerTokenFp8,
    Static,
    StaticFp8,
)
from nvfp4_kernels.quantize.arguments import check_output, is_per_token, mode_of, new_result, op_of
from nvfp4_kernels.quantize.call import QuantizeCall
from nvfp4_kernels.quantize.kernels import KERNELS, PER_TOKEN_KERNELS


@overload
def quantize(x: Tensor, output: Static | PerTokenFp8) -> tuple[Tensor, Tensor]: ...
@overload
def quantize(x: Tensor, output: PerToken) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def quantize(x: Tensor, output: StaticFp8) -> Tensor: ...
def quantize(x: Tensor, output: Nvfp4Output | Fp8Output) -> Tensor | tuple[Tensor, ...]:
    """Quantise activations to NVFP4 or E4M3.

    Args:
        x: bfloat16, float16 or float32 ``(..., M, K)``, K a multiple of 16. On a GPU the last
            stride is 1, and rows are evenly spaced and 32-byte aligned (sm_90: 16-byte aligned).
            With a scale per row K is at most 40960 on sm_100, 49152 on sm_90 (float32: 24576).
        output: NVFP4 (CPU, sm_100): ``Static`` with one calibrated global scale (ModelOpt's
            ``input_scale``, ``max|x| / 2688`` over the calibration text), or ``PerToken``: a global
            scale per row, ``max|row| / 2688``. E4M3 (CPU, sm_90): ``StaticFp8`` with one calibrated
            scale, ``max|x| / 448``, or ``PerTokenFp8``: a scale per row, ``max|row| / 448``.

    Returns:
        ``Static``: ``data`` uint8 ``(..., M, K/2)`` and ``scales`` float8_e4m3fn in the blocked
        layout ``(..., ceil(M/128), ceil(K/64), 32, 16)``, padding zero; with several terms,
        ``data`` ``(..., terms, M, K/2)``, and scales of stacked rows (see
        ``nvfp4_kernels.formats.terms``). Values beyond the calibrated range saturate in every term.
        ``PerToken``: also ``row_scale`` float32 ``(..., M)``.

        ``StaticFp8``: float8_e4m3fn ``(..., M, ceil(K/64)·64)`` in the order of
        ``nvfp4_kernels.formats.fp8_rows``, zeros past K; values beyond the calibrated range
        saturate. ``PerTokenFp8``: also ``row_scale`` float32 ``(..., M)``.

    Raises:
        InvalidArgument: an unsupported dtype, shape, stride or alignment; the message names it.
        NoKernelError: no kernel for this device.
    """
    return op_of(output, "quantize")(x, *output)


def _run(x: Tensor, output: Nvfp4Output | Fp8Output) -> tuple[Tensor, ...]:
    check_dtype("x", x, FLOAT_DTYPES)
    check_rows("x", x)
    check_blocks_of_16("x", x.shape)
    check_output(output, x=x)
    table = PER_TOKEN_KERNELS if is_per_token(output) else KERNELS
    found: tuple[Tensor, ...] = table.select(x.device, mode_of(output)).load()(
        QuantizeCall(x, output)
    )
    return found


def _fake(x: Tensor, output: Nvfp4Output | Fp8Output) -> tuple[Tensor, ...]:
    return new_result(x, x.shape[-1], output)


@torch.library.custom_op("nvfp4::quantize", mutates_args=())
def _quantize(x: Tensor, global_scale: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    data, scales = _run(x, Static(global_scale, terms))
    return data, scales


@_quantize.register_fake
def _(x: Tensor, global_scale: Tensor, terms: int) -> tuple[Tensor, ...]:
    return _fake(x, Static(global_scale, terms))


@torch.library.custom_op("nvfp4::quantize_per_token", mutates_args=())
def _quantize_per_token(x: Tensor, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    data, scales, row_scale = _run(x, PerToken(terms))
    return data, scales, row_scale


@_quantize_per_token.register_fake
def _(x: Tensor, terms: int) -> tuple[Tensor, ...]:
    return _fake(x, PerToken(terms))


@torch.library.custom_op("nvfp4::quantize_fp8", mutates_args=())
def _quantize_fp8(x: Tensor, scale: Tensor) -> Tensor:
    (rows,) = _run(x, StaticFp8(scale))
    return rows


@_quantize_fp8.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    (rows,) = _fake(x, StaticFp8(scale))
    return rows


@torch.library.custom_op("nvfp4::quantize_fp8_per_token", mutates_args=())
def _quantize_fp8_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, row_scale = _run(x, PerTokenFp8())
    return rows, row_scale


@_quantize_fp8_per_token.register_fake
def _(x: Tensor) -> tuple[Tensor, ...]:
    return _fake(x, PerTokenFp8())
