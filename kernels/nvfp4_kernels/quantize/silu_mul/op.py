"""``silu_mul_quantize``: the activation of a gated MLP, quantised at once for the next GEMM."""

from typing import overload

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_dtype
from nvfp4_kernels.device.rowwise.operands import FLOAT_DTYPES, check_rows
from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE
from nvfp4_kernels.formats.output import (
    Fp8Output,
    Nvfp4Output,
    PerToken,
    PerTokenFp8,
    Static,
    StaticFp8,
)
from nvfp4_kernels.quantize.arguments import check_output, is_per_token, mode_of, new_result, op_of
from nvfp4_kernels.quantize.call import SiluMulQuantizeCall
from nvfp4_kernels.quantize.silu_mul.kernels import KERNELS, PER_TOKEN_KERNELS


@overload
def silu_mul_quantize(gate_up: Tensor, output: Static | PerTokenFp8) -> tuple[Tensor, Tensor]: ...
@overload
def silu_mul_quantize(gate_up: Tensor, output: PerToken) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def silu_mul_quantize(gate_up: Tensor, output: StaticFp8) -> Tensor: ...
def silu_mul_quantize(
    gate_up: Tensor, output: Nvfp4Output | Fp8Output
) -> Tensor | tuple[Tensor, ...]:
    """``silu(gate) · up`` in NVFP4 or E4M3.

    SiLU and product are each computed in float32 and rounded to the input's dtype, as in vLLM's
    ``SiluAndMul``; the result is bit-identical to ``quantize`` of that product.

    Args:
        gate_up: bfloat16, float16 or float32 ``(..., M, 2·I)``, gate before up, I a multiple of 16.
            On a GPU the last stride is 1, and rows are evenly spaced and 32-byte aligned (sm_90:
            16-byte aligned). With a scale per row I is at most 40960 on sm_100, 49152 on sm_90
            (float32: 24576).
        output: as for ``quantize``.

    Returns:
        As ``quantize`` of ``silu(gate) · up``, ``(..., M, I)``.

    Raises:
        InvalidArgument: an unsupported dtype, shape, stride or alignment; the message names it.
        NoKernelError: no kernel for this device.
    """
    return op_of(output, "silu_mul_quantize")(gate_up, *output)


def _run(gate_up: Tensor, output: Nvfp4Output | Fp8Output) -> tuple[Tensor, ...]:
    check_dtype("gate_up", gate_up, FLOAT_DTYPES)
    check_rows("gate_up", gate_up)
    if gate_up.shape[-1] % (2 * BLOCK_SIZE):
        raise InvalidArgument(
            f"gate_up: last dimension is {gate_up.shape[-1]}, must be a multiple of 32: gate and "
            "up side by side, each of whole blocks of 16; pad both with zeros"
        )
    check_output(output, gate_up=gate_up)
    table = PER_TOKEN_KERNELS if is_per_token(output) else KERNELS
    found: tuple[Tensor, ...] = table.select(gate_up.device, mode_of(output)).load()(
        SiluMulQuantizeCall(gate_up, output)
    )
    return found


def _fake(gate_up: Tensor, output: Nvfp4Output | Fp8Output) -> tuple[Tensor, ...]:
    return new_result(gate_up, gate_up.shape[-1] // 2, output)


@torch.library.custom_op("nvfp4::silu_mul_quantize", mutates_args=())
def _silu_mul_quantize(gate_up: Tensor, global_scale: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    data, scales = _run(gate_up, Static(global_scale, terms))
    return data, scales


@_silu_mul_quantize.register_fake
def _(gate_up: Tensor, global_scale: Tensor, terms: int) -> tuple[Tensor, ...]:
    return _fake(gate_up, Static(global_scale, terms))


@torch.library.custom_op("nvfp4::silu_mul_quantize_per_token", mutates_args=())
def _silu_mul_quantize_per_token(gate_up: Tensor, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    data, scales, row_scale = _run(gate_up, PerToken(terms))
    return data, scales, row_scale


@_silu_mul_quantize_per_token.register_fake
def _(gate_up: Tensor, terms: int) -> tuple[Tensor, ...]:
    return _fake(gate_up, PerToken(terms))


@torch.library.custom_op("nvfp4::silu_mul_quantize_fp8", mutates_args=())
def _silu_mul_quantize_fp8(gate_up: Tensor, scale: Tensor) -> Tensor:
    (rows,) = _run(gate_up, StaticFp8(scale))
    return rows


@_silu_mul_quantize_fp8.register_fake
def _(gate_up: Tensor, scale: Tensor) -> Tensor:
    (rows,) = _fake(gate_up, StaticFp8(scale))
    return rows


@torch.library.custom_op("nvfp4::silu_mul_quantize_fp8_per_token", mutates_args=())
def _silu_mul_quantize_fp8_per_token(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    rows, row_scale = _run(gate_up, PerTokenFp8())
    return rows, row_scale


@_silu_mul_quantize_fp8_per_token.register_fake
def _(gate_up: Tensor) -> tuple[Tensor, ...]:
    return _fake(gate_up, PerTokenFp8())
