"""``silu_mul_quantize``: the activation of a gated MLP, straight to NVFP4 for the next GEMM."""

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_dtype, check_same_device, check_shape
from nvfp4_kernels.device.rowwise.operands import (
    FLOAT_DTYPES,
    check_rows,
    new_operand,
    new_row_scale,
)
from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE
from nvfp4_kernels.formats.terms import check_terms
from nvfp4_kernels.quantize.silu_mul.kernels import KERNELS, PER_TOKEN_KERNELS


def silu_mul_quantize(
    gate_up: Tensor, global_scale: Tensor, terms: int = 1
) -> tuple[Tensor, Tensor]:
    """``silu(gate) · up`` in NVFP4, with one calibrated global scale.

    SiLU and product are each computed in float32 and rounded to the input's dtype, as in vLLM's
    ``SiluAndMul``; then bit-identical to ``quantize``.

    Args:
        gate_up: bfloat16, float16 or float32 ``(..., M, 2·I)``, gate before up, I a multiple of 16.
            On a GPU the last stride is 1, and rows are evenly spaced and 32-byte aligned.
        global_scale: float32 ``()``, the global scale of the result.
        terms: number of NVFP4 terms of the result, 1 to 4 (see ``nvfp4_kernels.formats.terms``).

    Returns:
        ``data`` uint8 ``(..., M, I/2)`` and ``scales`` float8_e4m3fn in the blocked layout ``(...,
        ceil(M/128), ceil(I/64), 32, 16)``, padding zero; with several terms, as returned by
        ``quantize``.

    Raises:
        InvalidArgument: an unsupported dtype, shape, stride or alignment, named.
        NoKernelError: no kernel for this device.
    """
    return torch.ops.nvfp4.silu_mul_quantize(gate_up, global_scale, terms)


def silu_mul_quantize_per_token(gate_up: Tensor, terms: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """``silu(gate) · up`` in NVFP4, with one global scale per row, computed from the row.

    Args:
        gate_up: as for ``silu_mul_quantize``; on sm_100, I is at most 40960 (float32: 24576).
        terms: as for ``silu_mul_quantize``.

    Returns:
        ``data`` and ``scales`` as for ``silu_mul_quantize``, and ``row_scale`` float32
        ``(..., M)``: the row's ``max|silu(gate) · up| / 2688``.

    Raises:
        InvalidArgument, NoKernelError: as ``silu_mul_quantize``.
    """
    return torch.ops.nvfp4.silu_mul_quantize_per_token(gate_up, terms)


def _check_input(gate_up: Tensor, terms: int) -> None:
    check_terms("terms", terms)
    check_dtype("gate_up", gate_up, FLOAT_DTYPES)
    check_rows("gate_up", gate_up)
    if gate_up.shape[-1] % (2 * BLOCK_SIZE):
        raise InvalidArgument(
            f"gate_up: last dimension is {gate_up.shape[-1]}, must be a multiple of 32: gate and "
            "up side by side, each of whole blocks of 16; pad both with zeros"
        )


def _fake_operand(gate_up: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    return new_operand(gate_up, gate_up.shape[-1] // 2, terms)


@torch.library.custom_op("nvfp4::silu_mul_quantize", mutates_args=())
def _silu_mul_quantize(gate_up: Tensor, global_scale: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    _check_input(gate_up, terms)
    check_dtype("global_scale", global_scale, (torch.float32,))
    remedy = "for one scale per row use silu_mul_quantize_per_token"
    check_shape("global_scale", global_scale, (), remedy)
    check_same_device(gate_up=gate_up, global_scale=global_scale)
    kernel = KERNELS.select(gate_up.device, "w4a4").load()
    return kernel(gate_up, global_scale, terms)


@_silu_mul_quantize.register_fake
def _(gate_up: Tensor, global_scale: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    return _fake_operand(gate_up, terms)


@torch.library.custom_op("nvfp4::silu_mul_quantize_per_token", mutates_args=())
def _silu_mul_quantize_per_token(gate_up: Tensor, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    _check_input(gate_up, terms)
    kernel = PER_TOKEN_KERNELS.select(gate_up.device, "w4a4").load()
    return kernel(gate_up, terms)


@_silu_mul_quantize_per_token.register_fake
def _(gate_up: Tensor, terms: int) -> tuple[Tensor, Tensor, Tensor]:
    return (*_fake_operand(gate_up, terms), new_row_scale(gate_up))
