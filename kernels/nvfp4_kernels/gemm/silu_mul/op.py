"""``silu_mul_gemm``: gate and up GEMMs of an MLP and the activation in one pass over the input."""

from typing import Any, overload

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_dtype, check_same_device, check_shape
from nvfp4_kernels.dispatch import Mode
from nvfp4_kernels.formats.output import Output, Static, StaticFp8
from nvfp4_kernels.gemm.arguments import (
    batch_of,
    check_activation,
    check_batch,
    check_fragments,
    check_layout_taken,
    check_no_n,
    check_output,
    check_result,
    check_weight,
    fp8_result,
    fragments_k,
    quantized_result,
    refuse_fragments,
    require_folded,
    weight_layout,
)
from nvfp4_kernels.gemm.call import SiluMulGemmCall
from nvfp4_kernels.gemm.silu_mul.kernels import KERNELS


@overload
def silu_mul_gemm(
    a: Tensor, a_scales: Tensor | None, b1: Tensor, b1_scales: Tensor, b2: Tensor,
    b2_scales: Tensor, alpha: Tensor, *, row_scale: Tensor | None = ...,
    out_dtype: torch.dtype = ..., n: int | None = ..., terms: int = ..., output: None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def silu_mul_gemm(
    a: Tensor, a_scales: Tensor | None, b1: Tensor, b1_scales: Tensor, b2: Tensor,
    b2_scales: Tensor, alpha: Tensor, *, row_scale: Tensor | None = ..., terms: int = ...,
    output: Static,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def silu_mul_gemm(
    a: Tensor, a_scales: None, b1: Tensor, b1_scales: Tensor, b2: Tensor, b2_scales: Tensor,
    alpha: Tensor, *, row_scale: Tensor | None = ..., n: int | None = ..., output: StaticFp8,
) -> Tensor: ...  # fmt: skip
def silu_mul_gemm(
    a: Tensor,
    a_scales: Tensor | None,
    b1: Tensor,
    b1_scales: Tensor,
    b2: Tensor,
    b2_scales: Tensor,
    alpha: Tensor,
    *,
    row_scale: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    n: int | None = None,
    terms: int = 1,
    output: Output = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``silu(alpha[0] · A · B1ᵀ) · (alpha[1] · A · B2ᵀ)``, computed in float32, rounded once.

    The restriction on preceding kernels is the same as for ``gemm``, for both weights.

    Args:
        a: w4a4: uint8 ``(..., M, K/2)``; w4a16 (``a_scales`` None): 16-bit floats ``(..., M, K)``;
            w4a8 (the same, with folded weights): float8_e4m3fn ``(..., M, K)`` as returned by
            ``quantize``, K padded to a multiple of 64. K is a multiple of 16.
        a_scales: float8_e4m3fn, blocked layout of ``a``'s scales, or None.
        b1: the gate weight, uint8 ``(N, K/2)`` or ``(..., N, K/2)`` with ``a``'s batch dimensions.
            On sm_90 ``b1`` must, and for w4a16 on the CPU may, be in the fragment layout instead,
            ``(ceil(N/64), ceil(K/64), 4, 32, 16)`` (see ``formats.fragments``); for w4a8, in the
            folded layout ``(ceil(N/64), ceil(K/128), 2, 4, 32, 16)`` (see ``formats.folded``).
        b1_scales: float8_e4m3fn, blocked layout of the gate's scales; for weights in fragments,
            uint8 ``(ceil(N/64), ceil(K/64), 4, 8, 8)``; for folded weights, int32
            ``(ceil(N/64), ceil(K/128), 4, 32)``. The dtype tells the layouts apart.
        b2: the up weight, of ``b1``'s shape and layout.
        b2_scales: the up weight's scales, as ``b1_scales``.
        alpha: float32 ``(2,)``: each weight's global scale, times the activation's global scale if
            all rows share one. For folded weights float32 ``(2, N)``: the same, times each row's
            ``row_scale``.
        row_scale: float32 ``(..., M)``, the activation's per-row global scales, if any; each
            multiplies both products.
        out_dtype: bfloat16, float16 or float32; left out with ``output``.
        n: number of rows of each weight; needed with weights in fragments or folded, which are
            padded to whole tiles. ``a`` determines K.
        terms: number of NVFP4 terms of the activation (see ``formats.terms``), 1 to 4; with more
            than one, ``a`` is ``(..., terms, M, K/2)`` and ``a_scales`` as returned by
            ``quantize``.
        output: None; ``Static`` for an NVFP4 result, quantised for the next GEMM from the float32
            values: then the weights must be blocked, ``n`` is left out, and N must be a multiple of
            16; or, with folded weights, ``StaticFp8`` for an E4M3 result.

    Returns:
        ``(..., M, N)`` of ``out_dtype``. With ``StaticFp8``: float8_e4m3fn ``(..., M,
        ceil(N/64)·64)`` in the order of ``formats.fp8_rows``, zeros past N. With ``Static``:
        ``data`` uint8 ``(..., M, N/2)`` and ``scales`` float8_e4m3fn in the blocked layout; if
        ``output`` has several terms, both are as returned by ``quantize``.

    Raises:
        InvalidArgument: shapes, dtypes or devices do not match; the message names the argument.
        NoKernelError: no kernel for this device and mode; the message lists existing kernels.
    """
    operands = a, a_scales, b1, b1_scales, b2, b2_scales, alpha, row_scale
    if output is None:
        return torch.ops.nvfp4.silu_mul_gemm(*operands, n, out_dtype, terms)
    output = check_output(output, out_dtype)
    if isinstance(output, StaticFp8):
        return torch.ops.nvfp4.silu_mul_gemm_fp8(*operands, n, output.scale)
    scale, out_terms = output
    check_no_n(n)
    return torch.ops.nvfp4.silu_mul_gemm_quantized(*operands, scale, terms, out_terms)


_OPERANDS = (
    "Tensor a, Tensor? a_scales, Tensor b1, Tensor b1_scales, Tensor b2, Tensor b2_scales, "
    "Tensor alpha, Tensor? row_scale"
)


def _fragments_n(n: int | None) -> int:
    if n is None:
        raise InvalidArgument(
            "n: is None, must be the rows of b1 and b2, which their fragments pad; pass it"
        )
    return n


def _check_pair(call: SiluMulGemmCall) -> tuple[int, int]:
    """Check both weights against each other and against ``n``; return N and K."""
    a, a_scales, b1, b1_scales, b2, b2_scales, _, _, n, *_ = call
    layout = weight_layout(b1_scales)
    if weight_layout(b2_scales) != layout:
        raise InvalidArgument(
            f"b2: is in the layout {weight_layout(b2_scales)!r}, must be in {layout!r} as b1 is; "
            "bring both weights to one layout"
        )
    if layout != "blocked":
        k, n = fragments_k("b1", a, a_scales, layout), _fragments_n(n)
        check_fragments("b1", b1, b1_scales, n, k, "n")
        check_fragments("b2", b2, b2_scales, n, k, "n")
        return n, k
    rows, k = check_weight("b1", b1, b1_scales)
    if check_weight("b2", b2, b2_scales) != (rows, k):
        raise InvalidArgument(
            f"b2: shape is {tuple(b2.shape)}, must be {tuple(b1.shape)} as b1's; "
            "gate and up projections come in pairs"
        )
    if n not in (None, rows):
        raise InvalidArgument(
            f"n: is {n}, must be {rows} as b1's rows; leave it out in the blocked layout"
        )
    return rows, k


def _check(call: SiluMulGemmCall) -> Mode:
    """Check the arguments; return the mode."""
    (n, k), layout = _check_pair(call), weight_layout(call.b1_scales)
    mode, _ = check_activation(call.a, call.a_scales, call.row_scale, k, call.terms, layout)
    if layout == "blocked":
        check_batch(call.a, "b1", call.b1, call.terms)
        check_batch(call.a, "b2", call.b2, call.terms)
    check_dtype("alpha", call.alpha, (torch.float32,))
    if layout == "folded":
        check_shape("alpha", call.alpha, (2, n), "a factor for each row of the gate and up weights")
    else:
        remedy = "one factor for the gate and one for the up projection"
        check_shape("alpha", call.alpha, (2,), remedy)
    check_result(call, n, (), "one scale for the whole output")
    check_same_device(
        a=call.a, a_scales=call.a_scales, b1=call.b1, b1_scales=call.b1_scales, b2=call.b2,
        b2_scales=call.b2_scales, alpha=call.alpha, row_scale=call.row_scale,
    )  # fmt: skip
    return mode


def _run(call: SiluMulGemmCall) -> tuple[Tensor, Tensor | None]:
    kernel = KERNELS.select(call.a.device, _check(call))
    check_layout_taken("b1", call.b1_scales, kernel)
    return kernel.load()(call)


@torch.library.custom_op(
    "nvfp4::silu_mul_gemm",
    mutates_args=(),
    schema=f"({_OPERANDS}, SymInt? n, ScalarType out_dtype, int terms) -> Tensor",
)
def _silu_mul_gemm(*arguments: Any) -> Tensor:
    out, _ = _run(SiluMulGemmCall(*arguments))
    return out


@_silu_mul_gemm.register_fake
def _(*arguments: Any) -> Tensor:
    call = SiluMulGemmCall(*arguments)
    n = call.b1.shape[-2] if weight_layout(call.b1_scales) == "blocked" else _fragments_n(call.n)
    shape = (*batch_of(call.a, call.terms), call.a.shape[-2], n)
    return call.a.new_empty(shape, dtype=call.out_dtype)


@torch.library.custom_op(
    "nvfp4::silu_mul_gemm_fp8",
    mutates_args=(),
    schema=f"({_OPERANDS}, SymInt? n, Tensor out_scale) -> Tensor",
)
def _silu_mul_gemm_fp8(*arguments: Any) -> Tensor:
    *operands, n, scale = arguments
    call = SiluMulGemmCall._make((*operands, n, torch.float32, 1, StaticFp8(scale)))
    require_folded(b1_scales=call.b1_scales)
    out, _ = _run(call)
    return out


@_silu_mul_gemm_fp8.register_fake
def _(*arguments: Any) -> Tensor:
    a, *_, n, _ = arguments
    return fp8_result(a, _fragments_n(n))


@torch.library.custom_op(
    "nvfp4::silu_mul_gemm_quantized",
    mutates_args=(),
    schema=(
        f"({_OPERANDS}, Tensor out_global_scale, int terms, int out_terms) -> (Tensor, Tensor)"
    ),
)
def _silu_mul_gemm_quantized(*arguments: Any) -> tuple[Tensor, Tensor]:
    *operands, scale, terms, out_terms = arguments
    call = SiluMulGemmCall._make((*operands, None, torch.float32, terms, Static(scale, out_terms)))
    refuse_fragments(b1_scales=call.b1_scales, b2_scales=call.b2_scales)
    data, scales = _run(call)
    assert scales is not None
    return data, scales


@_silu_mul_gemm_quantized.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    a, _, b1, *_, terms, out_terms = arguments
    return quantized_result(a, b1.shape[-2], terms, out_terms)
