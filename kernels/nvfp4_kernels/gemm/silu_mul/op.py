"""``silu_mul_gemm``: gate and up GEMMs of an MLP and the activation in one pass over the input."""

from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.checks import (
    InvalidArgument,
    check_blocks_of_16,
    check_dtype,
    check_same_device,
    check_shape,
)
from nvfp4_kernels.formats.terms import check_terms
from nvfp4_kernels.gemm.arguments import (
    batch_of,
    check_activation,
    check_batch,
    check_fragments,
    check_layout_taken,
    check_out_dtype,
    check_weight,
    fragments_k,
    quantized_result,
    refuse_fragments,
    weight_layout,
)
from nvfp4_kernels.gemm.silu_mul.kernels import KERNELS


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
) -> Tensor:
    """``silu(alpha[0] · A · B1ᵀ) · (alpha[1] · A · B2ᵀ)``, formed in float32, rounded once.

    Args:
        a: w4a4: uint8 ``(..., M, K/2)``; w4a16 (``a_scales`` None): 16-bit floats ``(..., M, K)``.
        a_scales: float8_e4m3fn, blocked layout of ``a``'s scales, or None.
        b1: the gate, uint8 ``(N, K/2)`` or ``(..., N, K/2)`` with ``a``'s batch dimensions; w4a16
            on CPU and sm_90 also in fragments, ``(ceil(N/64), ceil(K/64), 4, 32, 16)``.
        b1_scales: float8_e4m3fn, blocked layout of the gate's scales; of fragments uint8
            ``(ceil(N/64), ceil(K/64), 4, 8, 8)``. The dtype tells the layouts apart.
        b2: the up projection, shaped as ``b1``.
        b2_scales: the up projection's scales, as ``b1_scales``.
        alpha: float32 ``(2,)``: each weight's global scale, times the activation's global scale if
            that is a single number.
        row_scale: float32 ``(..., M)``, the activation's per-row global scales, if any.
        out_dtype: bfloat16, float16 or float32.
        n: rows of each weight; needed with fragments, which are padded to whole tiles of 64 rows
            and 64 elements. ``a`` determines K.
        terms: number of NVFP4 terms of the activation, 1 to 4; with more than one, ``a`` is ``(...,
            terms, M, K/2)`` and ``a_scales`` as ``quantize`` returns it.

    Returns:
        ``(..., M, N)`` of ``out_dtype``.

    Raises:
        InvalidArgument: shapes, dtypes or devices that do not fit, named.
        NoKernelError: no kernel for this device and mode; the message lists existing kernels.
    """
    return torch.ops.nvfp4.silu_mul_gemm(
        a, a_scales, b1, b1_scales, b2, b2_scales, alpha, row_scale, n, out_dtype, terms
    )


def silu_mul_gemm_quantized(
    a: Tensor,
    a_scales: Tensor | None,
    b1: Tensor,
    b1_scales: Tensor,
    b2: Tensor,
    b2_scales: Tensor,
    alpha: Tensor,
    out_global_scale: Tensor,
    *,
    row_scale: Tensor | None = None,
    terms: int = 1,
    out_terms: int = 1,
) -> tuple[Tensor, Tensor]:
    """``silu_mul_gemm`` with the result quantised for the next GEMM, from the float32 values.

    Arguments as for ``silu_mul_gemm``, without fragments, N a multiple of 16. ``out_global_scale``,
    float32 ``()``: the next layer's input scale. ``out_terms``, 1 to 4: number of NVFP4 terms of
    the result.

    Returns:
        ``data`` uint8 ``(..., M, N/2)`` and ``scales`` float8_e4m3fn in the blocked layout; with
        several terms, as returned by ``quantize``.

    Raises:
        InvalidArgument, NoKernelError: as ``silu_mul_gemm``.
    """
    return torch.ops.nvfp4.silu_mul_gemm_quantized(
        a, a_scales, b1, b1_scales, b2, b2_scales, alpha, row_scale, out_global_scale,
        terms, out_terms,
    )  # fmt: skip


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


def _check_pair(operands: tuple[Any, ...], n: int | None) -> tuple[int, int]:
    """Check both weights against each other and against ``n``; return N and K."""
    a, a_scales, b1, b1_scales, b2, b2_scales, *_ = operands
    layout = weight_layout(b1_scales)
    if weight_layout(b2_scales) != layout:
        raise InvalidArgument(
            f"b2: is in the layout {weight_layout(b2_scales)!r}, must be in {layout!r} as b1 is; "
            "bring both weights to one layout"
        )
    if layout == "fragments":
        k, n = fragments_k("b1", a, a_scales), _fragments_n(n)
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


def _run(
    operands: tuple[Any, ...],
    n: int | None,
    out_global_scale: Tensor | None,
    out_dtype: torch.dtype,
    terms: int,
    out_terms: int = 1,
) -> tuple[Tensor, Tensor | None]:
    a, a_scales, b1, b1_scales, b2, b2_scales, alpha, row_scale = operands
    rows, k = _check_pair(operands, n)
    mode, _ = check_activation(a, a_scales, row_scale, k, terms)
    check_terms("out_terms", out_terms)
    if weight_layout(b1_scales) == "blocked":
        check_batch(a, "b1", b1, terms)
        check_batch(a, "b2", b2, terms)
    check_dtype("alpha", alpha, (torch.float32,))
    check_shape("alpha", alpha, (2,), "one factor for the gate and one for the up projection")
    check_out_dtype(out_dtype)
    check_same_device(
        a=a, a_scales=a_scales, b1=b1, b1_scales=b1_scales, b2=b2, b2_scales=b2_scales,
        alpha=alpha, row_scale=row_scale, out_global_scale=out_global_scale,
    )  # fmt: skip
    kernel = KERNELS.select(a.device, mode)
    check_layout_taken("b1", b1_scales, kernel)
    # Kernels of 16-bit activations know of one term alone.
    of_terms = (terms, out_terms) if terms > 1 or out_terms > 1 else ()
    return kernel.load()(*operands, rows, out_global_scale, out_dtype, *of_terms)


@torch.library.custom_op(
    "nvfp4::silu_mul_gemm",
    mutates_args=(),
    schema=f"({_OPERANDS}, SymInt? n, ScalarType out_dtype, int terms) -> Tensor",
)
def _silu_mul_gemm(*arguments: Any) -> Tensor:
    *operands, n, out_dtype, terms = arguments
    out, _ = _run(tuple(operands), n, None, out_dtype, terms)
    return out


@_silu_mul_gemm.register_fake
def _(a: Tensor, a_scales: Tensor | None, b1: Tensor, b1_scales: Tensor, *rest: Any) -> Tensor:
    *_, n, out_dtype, terms = rest
    rows = _fragments_n(n) if weight_layout(b1_scales) == "fragments" else b1.shape[-2]
    return a.new_empty((*batch_of(a, terms), a.shape[-2], rows), dtype=out_dtype)


@torch.library.custom_op(
    "nvfp4::silu_mul_gemm_quantized",
    mutates_args=(),
    schema=(
        f"({_OPERANDS}, Tensor out_global_scale, int terms, int out_terms) -> (Tensor, Tensor)"
    ),
)
def _silu_mul_gemm_quantized(*arguments: Any) -> tuple[Tensor, Tensor]:
    *operands, out_global_scale, terms, out_terms = arguments
    _, _, b1, b1_scales, _, b2_scales, *_ = operands
    refuse_fragments("silu_mul_gemm_quantized", b1_scales=b1_scales, b2_scales=b2_scales)
    check_dtype("out_global_scale", out_global_scale, (torch.float32,))
    check_shape("out_global_scale", out_global_scale, (), "one scale for the whole output")
    n, _ = check_weight("b1", b1, b1_scales)
    check_blocks_of_16("output", (1, n))  # the next layer's K is this product's N
    given = tuple(operands), n, out_global_scale, torch.float32
    data, scales = _run(*given, terms, out_terms)
    assert scales is not None
    return data, scales


@_silu_mul_gemm_quantized.register_fake
def _(a: Tensor, a_scales: Tensor | None, b1: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, terms, out_terms = rest
    return quantized_result(a, b1.shape[-2], terms, out_terms)
