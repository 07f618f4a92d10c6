"""Checks and shapes that the grouped ops share."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nvfp4_kernels.activation import Activation, check_gated, check_ungated
from nvfp4_kernels.checks import (
    InvalidArgument,
    check_blocks_of_16,
    check_dtype,
    check_same_device,
    check_shape,
)
from nvfp4_kernels.devices import device_arch
from nvfp4_kernels.dispatch import KernelTable, Mode
from nvfp4_kernels.formats.fragments import fragment_shapes
from nvfp4_kernels.formats.terms import check_terms
from nvfp4_kernels.gemm.arguments import (
    OUT_DTYPES,
    batch_of,
    check_activation,
    check_layout_taken,
    check_out_dtype,
    check_weight,
    fragments_k,
    quantized_result,
    refuse_fragments,
    weight_layout,
)
from nvfp4_kernels.moe.routing import check_groups, check_tile_tokens, check_used

OPERANDS = (
    "Tensor a, Tensor? a_scales, Tensor groups, Tensor b, Tensor b_scales, Tensor alpha, "
    "Tensor? row_scale, Tensor? bias"
)
ACTIVATION = "str? activation, float? limit, float act_alpha, float act_beta"


class GroupedOperands(NamedTuple):
    """Operands of every grouped GEMM; see ``grouped_gemm`` and ``grouped_silu_mul_gemm``."""

    a: Tensor
    a_scales: Tensor | None
    groups: Tensor
    b: Tensor
    b_scales: Tensor
    alpha: Tensor
    row_scale: Tensor | None
    bias: Tensor | None


def check_grouped(
    operands: GroupedOperands, per_expert: tuple[int, ...], n: int | None, terms: int
) -> tuple[Mode, int]:
    """Check the operands; return the mode and N.

    ``per_expert``: matrices of an expert: ``(2,)`` for gate and up, else ``()``.
    """
    a, a_scales, groups, b, b_scales, alpha, row_scale, bias = operands
    check_dtype("b", b, (torch.uint8,))
    dims = 1 + len(per_expert) + (5 if weight_layout(b_scales) == "fragments" else 2)
    if b.ndim != dims or tuple(b.shape[1 : 1 + len(per_expert)]) != per_expert:
        inner = "".join(f"{size}, " for size in per_expert)
        raise InvalidArgument(
            f"b: shape is {tuple(b.shape)}, must be (experts, {inner}N, K/2), or that of fragments "
            "with uint8 scales; stack the experts' weights"
        )
    matrices = (b.shape[0], *per_expert)
    if weight_layout(b_scales) == "fragments":
        k, n = fragments_k("b", a, a_scales), _fragments_n(n)
        data, scales = fragment_shapes(n, k)
        remedy = f"the fragments of N = {n} (n) × K = {k} (a) of each matrix"
        check_shape("b", b, (*matrices, *data), remedy)
        check_shape("b_scales", b_scales, (*matrices, *scales), remedy)
    else:
        rows, k = check_weight("b", b, b_scales)
        if n not in (None, rows):
            raise InvalidArgument(
                f"n: is {n}, must be {rows} as b's rows; leave it out in the blocked layout"
            )
        n = rows
    mode, tile_tokens = check_activation(a, a_scales, row_scale, k, terms)
    batch = batch_of(a, terms)
    if len(batch) != 1:
        raise InvalidArgument(
            f"a: shape is {tuple(a.shape)}, must be (tiles, T, …), or (tiles, {terms}, T, …) with "
            "more than one term; make it with moe_dispatch()"
        )
    check_tile_tokens("a: T", tile_tokens)
    check_groups("groups", groups, batch[0])
    check_dtype("alpha", alpha, (torch.float32,))
    check_shape("alpha", alpha, matrices, "one factor for each matrix of b")
    if bias is not None:
        check_dtype("bias", bias, OUT_DTYPES)
        check_shape("bias", bias, (*matrices, n), "one value for each row of each matrix of b")
    check_same_device(**operands._asdict())
    if device_arch(a.device) == "cpu":  # a GPU is not waited for
        check_used("groups", groups, b.shape[0])
    return mode, n


def check_out(
    out_global_scale: Tensor | None, out_dtype: torch.dtype, operands: GroupedOperands, n: int
) -> None:
    """Check the arguments that define the result."""
    check_out_dtype(out_dtype)
    if out_global_scale is not None:
        check_blocks_of_16("output", (1, n))  # the next product's K
        experts = (operands.b.shape[0],)
        check_shape("out_global_scale", out_global_scale, experts, "one scale for each expert")
        check_same_device(a=operands.a, out_global_scale=out_global_scale)


def check_quantized(
    op: str, operands: GroupedOperands, out_global_scale: Tensor, out_terms: int
) -> None:
    """Check the further requirements of a quantised result."""
    refuse_fragments(op, b_scales=operands.b_scales)
    check_dtype("out_global_scale", out_global_scale, (torch.float32,))
    check_terms("out_terms", out_terms)


def run_grouped(
    table: KernelTable,
    operands: GroupedOperands,
    n: int | None,
    out_global_scale: Tensor | None,
    activation: Activation | None,
    out_dtype: torch.dtype,
    terms: int,
    out_terms: int = 1,
    *,
    gated: bool,
) -> tuple[Tensor, Tensor | None]:
    """Check the arguments of a grouped op and run its kernel; ``gated``: weights are pairs."""
    mode, rows = check_grouped(operands, (2,) if gated else (), n, terms)
    if gated:
        assert activation is not None
        check_gated(activation)
    else:
        check_ungated(activation)
    check_out(out_global_scale, out_dtype, operands, rows)
    kernel = table.select(operands.a.device, mode)
    check_layout_taken("b", operands.b_scales, kernel)
    *tensors, bias = operands
    return kernel.load()(
        *tensors, rows, out_global_scale, activation, out_dtype, terms, out_terms, bias=bias
    )


def fake_grouped(*arguments: Any) -> Tensor:
    """The result of a grouped op without its values, from the torch op's arguments."""
    *given, n, _, _, _, _, out_dtype, terms = arguments
    operands = GroupedOperands(*given)
    a, b = operands.a, operands.b
    rows = _fragments_n(n) if weight_layout(operands.b_scales) == "fragments" else b.shape[-2]
    return a.new_empty((*batch_of(a, terms), a.shape[-2], rows), dtype=out_dtype)


def fake_quantized(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The quantised result of a grouped op without its values, from the torch op's arguments."""
    a, _, _, b, *_, terms, out_terms = arguments
    return quantized_result(a, b.shape[-2], terms, out_terms)


def _fragments_n(n: int | None) -> int:
    if n is None:
        raise InvalidArgument(
            "n: is None, must be the rows of each matrix of b, which fragments pad; pass it"
        )
    return n
