"""``silu_mul_quantize``: the activation of a gated MLP, straight to NVFP4 for the next GEMM."""

from typing import overload

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_dtype
from nvfp4_kernels.device.rowwise.operands import (
    FLOAT_DTYPES,
    check_rows,
    new_operand,
    new_row_scale,
)
from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE
from nvfp4_kernels.formats.output import PerToken, Static
from nvfp4_kernels.quantize.arguments import check_output, op_of
from nvfp4_kernels.quantize.call import SiluMulQuantizeCall
from nvfp4_kernels.quantize.silu_mul.kernels import KERNELS, PER_TOKEN_KERNELS


@overload
def silu_mul_quantize(gate_up: Tensor, output: Static) -> tuple[Tensor, Tensor]: ...
@overload
def silu_mul_quantize(gate_up: Tensor, output: PerToken) -> tuple[Tensor, Tensor, Tensor]: ...
def silu_mul_quantize(gate_up: Tensor, output: Static | PerToken) -> tuple[Tensor, ...]:
    """``silu(gate) · up`` in NVFP4.

    SiLU and product are each computed in float32 and rounded to the input's dtype, as in vLLM's
    ``SiluAndMul``; the result is bit-identical to ``quantize`` of that product.

    Args:
        gate_up: bfloat16, float16 or float32 ``(..., M, 2·I)``, gate before up, I a multiple of 16.
            On a GPU the last stride is 1, and rows are evenly spaced and 32-byte aligned; on sm_100
            I is at most 40960 (float32: 24576) for ``PerToken``.
        output: as for ``quantize``.

    Returns:
        ``data`` uint8 ``(..., M, I/2)`` and ``scales`` float8_e4m3fn in the blocked layout ``(...,
        ceil(M/128), ceil(I/64), 32, 16)``, padding zero; with several terms, as returned by
        ``quantize``. ``PerToken``: also ``row_scale`` float32 ``(..., M)``, the row's
        ``max|silu(gate) · up| / 2688``.

    Raises:
        InvalidArgument: an unsupported dtype, shape, stride or alignment; the message names it.
        NoKernelError: no kernel for this device.
    """
    ops = torch.ops.nvfp4
    op = op_of(output, ops.silu_mul_quantize, ops.silu_mul_quantize_per_token)
    return op(gate_up, *output)


def _check(call: SiluMulQuantizeCall, output: Static | PerToken) -> None:
    check_dtype("gate_up", call.gate_up, FLOAT_DTYPES)
    check_rows("gate_up", call.gate_up)
    if call.gate_up.shape[-1] % (2 * BLOCK_SIZE):
        raise InvalidArgument(
            f"gate_up: last dimension is {call.gate_up.shape[-1]}, must be a multiple of 32: gate "
            "and up side by side, each of whole blocks of 16; pad both with zeros"
        )
    check_output(output, gate_up=call.gate_up)


def _fake_operand(gate_up: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    return new_operand(gate_up, gate_up.shape[-1] // 2, terms)


@torch.library.custom_op("nvfp4::silu_mul_quantize", mutates_args=())
def _silu_mul_quantize(gate_up: Tensor, global_scale: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    call = SiluMulQuantizeCall(gate_up, global_scale, terms)
    _check(call, Static(global_scale, terms))
    return KERNELS.select(gate_up.device, "w4a4").load()(call)


@_silu_mul_quantize.register_fake
def _(gate_up: Tensor, global_scale: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    return _fake_operand(gate_up, terms)


@torch.library.custom_op("nvfp4::silu_mul_quantize_per_token", mutates_args=())
def _silu_mul_quantize_per_token(gate_up: Tensor, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    call = SiluMulQuantizeCall(gate_up, None, terms)
    _check(call, PerToken(terms))
    return PER_TOKEN_KERNELS.select(gate_up.device, "w4a4").load()(call)


@_silu_mul_quantize_per_token.register_fake
def _(gate_up: Tensor, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    return (*_fake_operand(gate_up, terms), new_row_scale(gate_up))
