"""Argument checks, conversions and fake results that the grouped GEMM ops share."""

from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.activation import GATED, Activation, check_gated, check_ungated
from nvfp4_kernels.checks import InvalidArgument, check_dtype, check_same_device, check_shape
from nvfp4_kernels.devices import is_reference_device
from nvfp4_kernels.dispatch import KernelTable, Mode
from nvfp4_kernels.formats.output import Static, StaticFp8
from nvfp4_kernels.gemm.arguments import (
    OUT_DTYPES,
    batch_of,
    check_activation,
    check_layout_taken,
    check_result,
    check_weight,
    fp8_result,
    fragments_k,
    layout_shapes,
    quantized_result,
    refuse_fragments,
    require_folded,
    weight_layout,
)
from nvfp4_kernels.gemm.call import GroupedGemmCall
from nvfp4_kernels.moe.routing import check_groups, check_tile_tokens, check_used

OPERANDS = (
    "Tensor a, Tensor? a_scales, Tensor groups, Tensor b, Tensor b_scales, Tensor alpha, "
    "Tensor? row_scale, Tensor? bias"
)
ACTIVATION = "str? activation, float? limit, float act_alpha, float act_beta"


def check_grouped(call: GroupedGemmCall, per_expert: tuple[int, ...]) -> Mode:
    """Check all arguments except the activation function; return the mode.

    ``per_expert``: dimension of ``b`` over an expert's matrices: ``(2,)`` for gate and up, else
    ``()``.
    """
    a, a_scales, groups, b, b_scales, alpha, row_scale, bias, n, _, _, terms, *_ = call
    check_dtype("b", b, (torch.uint8,))
    layout = weight_layout(b_scales)
    dims = 1 + len(per_expert) + {"blocked": 2, "fragments": 5, "folded": 6}[layout]
    if b.ndim != dims or tuple(b.shape[1 : 1 + len(per_expert)]) != per_expert:
        inner = "".join(f"{size}, " for size in per_expert)
        raise InvalidArgument(
            f"b: shape is {tuple(b.shape)}, must be (experts, {inner}N, K/2), or that of fragments "
            "with uint8 scales or of folded weights with int32 scales; stack the experts' weights"
        )
    matrices = (b.shape[0], *per_expert)
    if layout != "blocked":
        k, n = fragments_k("b", a, a_scales, layout), _fragments_n(n)
        data, scales = layout_shapes(layout, n, k)
        remedy = f"the layout {layout!r} of N = {n} (n) × K = {k} (a) of each matrix"
        check_shape("b", b, (*matrices, *data), remedy)
        check_shape("b_scales", b_scales, (*matrices, *scales), remedy)
    else:
        rows, k = check_weight("b", b, b_scales)
        if n not in (None, rows):
            raise InvalidArgument(
                f"n: is {n}, must be {rows} as b's rows; leave it out in the blocked layout"
            )
        n = rows
    mode, tile_tokens = check_activation(a, a_scales, row_scale, k, terms, layout)
    batch = batch_of(a, terms)
    if len(batch) != 1:
        raise InvalidArgument(
            f"a: shape is {tuple(a.shape)}, must be (tiles, T, …), or (tiles, {terms}, T, …) with "
            "more than one term; make it with moe_dispatch()"
        )
    check_tile_tokens("a: T", tile_tokens)
    check_groups("groups", groups, batch[0])
    check_dtype("alpha", alpha, (torch.float32,))
    factors = (*matrices, n) if layout == "folded" else matrices
    each = "row of each matrix of b" if layout == "folded" else "matrix of b"
    check_shape("alpha", alpha, factors, f"one factor for each {each}")
    if bias is not None:
        check_dtype("bias", bias, OUT_DTYPES)
        check_shape("bias", bias, (*matrices, n), "one value for each row of each matrix of b")
    check_result(call, n, (b.shape[0],), "one scale for each expert")
    check_same_device(
        a=a, a_scales=a_scales, groups=groups, b=b, b_scales=b_scales, alpha=alpha,
        row_scale=row_scale, bias=bias,
    )  # fmt: skip
    if is_reference_device(a.device):  # a GPU is not waited for
        check_used("groups", groups, b.shape[0])
    return mode


def run_grouped(
    table: KernelTable, call: GroupedGemmCall, *, gated: bool
) -> tuple[Tensor, Tensor | None]:
    """Check a grouped op's arguments and run its kernel; ``gated``: whether weights are pairs."""
    mode = check_grouped(call, (2,) if gated else ())
    if not gated:
        check_ungated(call.activation)
    elif call.activation is None:
        raise InvalidArgument(
            f"activation: is None, must be one of {', '.join(GATED)} with a gate; use "
            "grouped_gemm() for experts without one"
        )
    else:
        check_gated(call.activation)
    kernel = table.select(call.a.device, mode)
    check_layout_taken("b", call.b_scales, kernel)
    return kernel.load()(call)


def run_quantized(
    table: KernelTable, arguments: tuple[Any, ...], *, gated: bool
) -> tuple[Tensor, Tensor]:
    """Run a grouped op with a quantised result, from the torch op's arguments."""
    *operands, scale, name, limit, alpha, beta, terms, out_terms = arguments
    activation = activation_of(name, limit, alpha, beta)
    call = _call(*operands, None, activation, torch.float32, terms, Static(scale, out_terms))
    refuse_fragments(b_scales=call.b_scales)
    data, scales = run_grouped(table, call, gated=gated)
    assert scales is not None
    return data, scales


def run_fp8(table: KernelTable, arguments: tuple[Any, ...], *, gated: bool) -> Tensor:
    """Run a grouped op with an E4M3 result, from the torch op's arguments."""
    *operands, n, scale, name, limit, alpha, beta = arguments
    activation = activation_of(name, limit, alpha, beta)
    call = _call(*operands, n, activation, torch.float32, 1, StaticFp8(scale))
    require_folded(b_scales=call.b_scales)
    out, _ = run_grouped(table, call, gated=gated)
    return out


def fake_fp8(*arguments: Any) -> Tensor:
    """Fake-tensor result of a grouped op with an E4M3 result, from the torch op's arguments."""
    a, *_, n, _, _, _, _, _ = arguments
    return fp8_result(a, _fragments_n(n))


def call_of(*arguments: Any) -> GroupedGemmCall:
    """``GroupedGemmCall`` from the arguments of a torch op with a floating-point result."""
    *operands, n, name, limit, alpha, beta, out_dtype, terms = arguments
    activation = activation_of(name, limit, alpha, beta)
    return _call(*operands, n, activation, out_dtype, terms, None)


def _call(*arguments: Any) -> GroupedGemmCall:
    return GroupedGemmCall._make((*arguments, False, None))


def activation_of(
    name: str | None, limit: float | None, alpha: float, beta: float
) -> Activation | None:
    """``Activation`` from a torch op's arguments; inverse of ``activation_arguments``."""
    return None if name is None else Activation(name, limit, alpha, beta)


def activation_arguments(
    activation: Activation | None,
) -> tuple[str | None, float | None, float, float]:
    """Arguments of a torch op that describe ``activation``.

    Raises:
        InvalidArgument: ``activation`` is neither None nor an ``Activation`` with a name.
    """
    if activation is None:
        return None, None, 1.0, 0.0
    if not isinstance(activation, tuple) or len(activation) != 4:
        raise InvalidArgument(
            f"activation: is {type(activation).__name__}, must be an Activation; make one of "
            "activation.py's names"
        )
    if activation[0] is None:
        raise InvalidArgument(
            "activation: has no name, must be one of activation.py's; give None for no activation"
        )
    return activation


def fake_grouped(*arguments: Any) -> Tensor:
    """Fake-tensor result of a grouped op, from the torch op's arguments."""
    call = call_of(*arguments)
    n = call.b.shape[-2] if weight_layout(call.b_scales) == "blocked" else _fragments_n(call.n)
    shape = (*batch_of(call.a, call.terms), call.a.shape[-2], n)
    return call.a.new_empty(shape, dtype=call.out_dtype)


def fake_quantized(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Fake-tensor result of a grouped op that quantises, from the torch op's arguments."""
    a, _, _, b, *_, terms, out_terms = arguments
    return quantized_result(a, b.shape[-2], terms, out_terms)


def _fragments_n(n: int | None) -> int:
    if n is None:
        raise InvalidArgument(
            "n: is None, must be the rows of each matrix of b, which its layout pads; pass it"
        )
    return n
