"""``gemm``, D = alpha · row_scale · (A · Bᵀ) + bias with an NVFP4 weight, and ``gemv``."""

from collections.abc import Sequence
from functools import wraps
from typing import Any, overload

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_same_device
from nvfp4_kernels.dispatch import Mode
from nvfp4_kernels.formats.output import Output, Static
from nvfp4_kernels.gemm.arguments import (
    batch_of,
    check_activation,
    check_batch,
    check_bias,
    check_fragments,
    check_layout_taken,
    check_result,
    check_shards,
    check_static_output,
    check_weight,
    fragments_k,
    quantized_result,
    refuse_fragments,
    weight_layout,
)
from nvfp4_kernels.gemm.call import GemmCall
from nvfp4_kernels.gemm.kernels import KERNELS, MAX_GEMV_ROWS


@overload
def gemm(
    a: Tensor, a_scales: Tensor | None, b: Tensor, b_scales: Tensor, alpha: Tensor,
    shard_sizes: Sequence[int], *, row_scale: Tensor | None = ..., bias: Tensor | None = ...,
    out_dtype: torch.dtype = ..., terms: int = ..., output: None = ...,
) -> Tensor: ...  # fmt: skip
@overload
def gemm(
    a: Tensor, a_scales: Tensor | None, b: Tensor, b_scales: Tensor, alpha: Tensor,
    shard_sizes: Sequence[int], *, row_scale: Tensor | None = ..., bias: Tensor | None = ...,
    terms: int = ..., output: Static,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def gemm(
    a: Tensor,
    a_scales: Tensor | None,
    b: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    shard_sizes: Sequence[int],
    *,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    terms: int = 1,
    output: Output = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Matrix product of activations with an NVFP4 weight.

    The operands without global scales (E2M1 values times block scales, 16-bit floats, or E4M3
    activations with a folded weight's E4M3 values) are multiplied and accumulated in float32;
    ``alpha``, ``row_scale`` and ``bias`` are applied to the accumulator, which is then rounded
    once.

    On sm_90 all arguments but ``a`` and ``row_scale``, on sm_100 ``b`` and ``b_scales``, may be
    read while preceding kernels that allow programmatic dependent launch still run: such kernels
    must not write these arguments.

    Args:
        a: w4a4: uint8 ``(..., M, K/2)``, two E2M1 codes per byte; w4a16 (``a_scales`` None):
            bfloat16 or float16 ``(..., M, K)``; w4a8 (the same, with a folded weight):
            float8_e4m3fn ``(..., M, K)`` as returned by ``quantize``, K padded to a multiple of 64.
            K is a multiple of 16.
        a_scales: float8_e4m3fn, blocked layout of ``a``'s ``(..., M, K/16)`` scales, or None.
        b: uint8 ``(N, K/2)``, or ``(..., N, K/2)`` with the same batch dimensions as ``a``. On
            sm_90 ``b`` must, and for w4a16 on the CPU may, be in the fragment layout instead,
            ``(ceil(N/64), ceil(K/64), 4, 32, 16)`` (see ``formats.fragments``); for w4a8, in the
            folded layout ``(ceil(N/64), ceil(K/128), 2, 4, 32, 16)`` (see ``formats.folded``).
        b_scales: float8_e4m3fn, blocked layout of ``b``'s ``(..., N, K/16)`` scales; for a weight
            in fragments, uint8 ``(ceil(N/64), ceil(K/64), 4, 8, 8)``; for a folded weight, int32
            ``(ceil(N/64), ceil(K/128), 4, 32)``. The dtype tells the layouts apart.
        alpha: float32 ``(S,)``, one factor per shard of the output: global scale of the weight's
            shard, times the activation's global scale if all rows share one. For a folded weight
            float32 ``(N,)``: the same, times the row's ``row_scale``.
        shard_sizes: S output widths that add up to N, e.g. the widths of q, k and v; on GPUs S is
            at most 8. With fragments or folded, which are padded to whole tiles, the widths
            determine N, and ``a`` determines K.
        row_scale: float32 ``(..., M)``, the activation's per-row global scales, if any.
        bias: ``(N,)``, bfloat16, float16 or float32.
        out_dtype: bfloat16, float16 or float32; left out with ``output``.
        terms: number of NVFP4 terms of the activation (see ``formats.terms``), 1 to 4; with more
            than one, ``a`` is ``(..., terms, M, K/2)`` and ``a_scales`` as returned by
            ``quantize``.
        output: None, or ``Static`` for an NVFP4 result, quantised for the next GEMM from the
            float32 values; then the weight must be blocked, and N must be a multiple of 16.

    Returns:
        ``(..., M, N)`` of ``out_dtype``. With ``Static``: ``data`` uint8 ``(..., M, N/2)`` and
        ``scales`` float8_e4m3fn in the blocked layout; if ``output`` has several terms, both are
        as returned by ``quantize``.

    Raises:
        InvalidArgument: shapes, dtypes or devices do not match; the message names the argument.
        NoKernelError: no kernel for this device and mode; the message lists existing kernels.
    """
    operands = a, a_scales, b, b_scales, alpha, _widths(shard_sizes), row_scale, bias
    if output is None:
        return torch.ops.nvfp4.gemm(*operands, out_dtype, terms)
    scale, out_terms = check_static_output(output, out_dtype)
    return torch.ops.nvfp4.gemm_quantized(*operands, scale, terms, out_terms)


@wraps(gemm, assigned=(), updated=())
def gemv(a: Tensor, *operands: Any, **options: Any) -> Any:
    """``gemm`` of a decode step, with at most ``MAX_GEMV_ROWS`` rows of activations.

    Arguments, result and kernels are the same as for ``gemm``, which chooses its tile by M.

    Raises:
        InvalidArgument: M above ``MAX_GEMV_ROWS``, or as ``gemm``.
        NoKernelError: as ``gemm``.
    """
    if isinstance(a, Tensor) and a.ndim > 1 and a.shape[-2] > MAX_GEMV_ROWS:
        raise InvalidArgument(
            f"a: M is {a.shape[-2]}, must be at most {MAX_GEMV_ROWS}; use gemm for more rows"
        )
    return gemm(a, *operands, **options)


def _widths(shard_sizes: Sequence[int]) -> list[int]:
    if not isinstance(shard_sizes, Sequence):
        raise InvalidArgument(
            f"shard_sizes: is {type(shard_sizes).__name__}, must be a sequence of widths; of one "
            "shard pass [N]"
        )
    return list(shard_sizes)


def _check(call: GemmCall) -> Mode:
    """Check the arguments; return the mode."""
    a, b = call.a, call.b
    layout = weight_layout(call.b_scales)
    if layout == "blocked":
        n, k = check_weight("b", b, call.b_scales)
    else:
        n, k = call.rows, fragments_k("b", a, call.a_scales, layout)
        check_fragments("b", b, call.b_scales, n, k, "shard_sizes")
    mode, _ = check_activation(a, call.a_scales, call.row_scale, k, call.terms, layout)
    if layout == "blocked":
        check_batch(a, "b", b, call.terms)
    check_shards(call.alpha, call.shard_sizes, n, layout)
    check_bias(call.bias, n)
    check_result(call, n, (), "one scale for the whole output")
    check_same_device(
        a=a, a_scales=call.a_scales, b=b, b_scales=call.b_scales, alpha=call.alpha,
        row_scale=call.row_scale, bias=call.bias,
    )  # fmt: skip
    return mode


def _run(call: GemmCall) -> tuple[Tensor, Tensor | None]:
    kernel = KERNELS.select(call.a.device, _check(call))
    check_layout_taken("b", call.b_scales, kernel)
    return kernel.load()(call)


_OPERANDS = (
    "Tensor a, Tensor? a_scales, Tensor b, Tensor b_scales, Tensor alpha, SymInt[] shard_sizes, "
    "Tensor? row_scale, Tensor? bias"
)


@torch.library.custom_op(
    "nvfp4::gemm",
    mutates_args=(),
    schema=f"({_OPERANDS}, ScalarType out_dtype, int terms) -> Tensor",
)
def _gemm(*arguments: Any) -> Tensor:
    out, _ = _run(GemmCall(*arguments))
    return out


@_gemm.register_fake
def _(*arguments: Any) -> Tensor:
    call = GemmCall(*arguments)
    n = call.b.shape[-2] if weight_layout(call.b_scales) == "blocked" else call.rows
    shape = (*batch_of(call.a, call.terms), call.a.shape[-2], n)
    return call.a.new_empty(shape, dtype=call.out_dtype)


@torch.library.custom_op(
    "nvfp4::gemm_quantized",
    mutates_args=(),
    schema=(
        f"({_OPERANDS}, Tensor out_global_scale, int terms, int out_terms) -> (Tensor, Tensor)"
    ),
)
def _gemm_quantized(*arguments: Any) -> tuple[Tensor, Tensor]:
    *operands, scale, terms, out_terms = arguments
    call = GemmCall._make((*operands, torch.float32, terms, Static(scale, out_terms)))
    refuse_fragments(b_scales=call.b_scales)
    data, scales = _run(call)
    assert scales is not None
    return data, scales


@_gemm_quantized.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    a, _, b, *_, terms, out_terms = arguments
    return quantized_result(a, b.shape[-2], terms, out_terms)
