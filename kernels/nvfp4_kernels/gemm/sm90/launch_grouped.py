"""Launches of the weight-only GEMM on sm_90: ``grouped_gemm`` and ``grouped_silu_mul_gemm``."""

from dataclasses import replace

import torch
from torch import Tensor

from nvfp4_kernels.activation import Activation
from nvfp4_kernels.checks import check_layout
from nvfp4_kernels.devices import dtype_name, multiprocessors
from nvfp4_kernels.formats.fragments import Fragments
from nvfp4_kernels.gemm.shards import shard_ends
from nvfp4_kernels.gemm.sm90.choose_grouped import GroupedProblem, choose_grouped_config
from nvfp4_kernels.gemm.sm90.kernel import GemmArguments, WeightOnlyGemm
from nvfp4_kernels.gemm.sm90.launch import epilogue
from nvfp4_kernels.runtime.compile import launch


def grouped_gemm(
    a: Tensor,
    a_scales: None,
    groups: Tensor,
    b: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    row_scale: None,
    n: int,
    out_global_scale: None,
    activation: Activation | None,
    out_dtype: torch.dtype,
    terms: int = 1,
    out_terms: int = 1,
    routed_before: bool = False,
    bias: Tensor | None = None,
    global_experts: int | None = None,
) -> tuple[Tensor, None]:
    """See ``nvfp4_kernels.gemm.grouped.op``; the weights are in fragments.

    ``routed_before``, ``global_experts``: see ``grouped_product``; ``routed_before`` is for a
    layer's second GEMM.
    """
    weights = Fragments(b, b_scales)
    return grouped_product(
        a, groups, weights, alpha, n, activation, out_dtype, bias=bias,
        routed_before=routed_before, global_experts=global_experts,
    ), None  # fmt: skip


def grouped_silu_mul_gemm(
    a: Tensor,
    a_scales: None,
    groups: Tensor,
    b: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    row_scale: None,
    n: int,
    out_global_scale: None,
    activation: Activation,
    out_dtype: torch.dtype,
    terms: int = 1,
    out_terms: int = 1,
    bias: Tensor | None = None,
    global_experts: int | None = None,
) -> tuple[Tensor, None]:
    """See ``nvfp4_kernels.gemm.grouped_silu_mul.op``; the weights are in fragments.

    ``global_experts``: see ``grouped_product``.
    """
    weights = Fragments(b, b_scales)
    return grouped_product(
        a, groups, weights, alpha, n, activation, out_dtype, bias=bias,
        global_experts=global_experts,
    ), None  # fmt: skip


def grouped_product(
    a: Tensor,
    groups: Tensor,
    weights: Fragments,
    alpha: Tensor,
    n: int,
    activation: Activation | None,
    out_dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    routed_before: bool = False,
    global_experts: int | None = None,
) -> Tensor:
    """Check kernel-specific requirements, allocate the result, launch.

    Args:
        a: bfloat16 or float16 ``(tiles, T, K)``.
        groups: int32 ``(1 + tiles,)``, see ``Routing``.
        weights: weights of all experts, one or gate and up each; already ``settled``.
        alpha: float32 ``(experts,)``, or ``(experts, 2)`` for pairs of weights.
        n: rows of each weight.
        activation: activation of the result, or None.
        out_dtype: bfloat16, float16 or float32.
        bias: as ``alpha`` with ``n`` elements each, or None.
        routed_before: whether ``groups`` was complete before the preceding launch began, as for a
            layer's second GEMM, preceded by the first. Weights are then loaded before that launch
            has ended. If wrongly set, behaviour is undefined.
        global_experts: experts of all ranks, over which slots are spread; None: this rank has all.
            Affects only the choice of a tile, not the result.

    Returns:
        ``(tiles, T, n)``; unused tiles are not written.

    Raises:
        InvalidArgument: an operand that is not contiguous or not aligned.
    """
    named = {"a": a, "groups": groups, "b": weights.data, "b_scales": weights.scales}
    for name, tensor in (named | {"alpha": alpha, "bias": bias}).items():
        check_layout(name, tensor)
    (tiles, tokens, k), experts = a.shape, alpha.shape[0]
    out = a.new_empty((tiles, tokens, n), dtype=out_dtype)
    if out.numel() == 0 or experts == 0:
        return out
    output = replace(
        epilogue(a.dtype, out_dtype),
        bias=dtype_name(bias.dtype) if bias is not None else "",
        activation=activation,
    )
    problem = GroupedProblem(tiles, tokens, experts, n, k, alpha[0].numel(), global_experts)
    sms = multiprocessors(a.device)
    tile, output = choose_grouped_config(problem, output, sms)
    arguments = GemmArguments(
        x=a,
        w1=weights.data,
        sfw1=weights.scales,
        w2=None,
        sfw2=None,
        out=out,
        alpha=alpha,
        bias=bias,
        m=tiles * tokens,
        n=n,
        k=k,
        sms=sms,
        shard_ends=shard_ends([n]),
        groups=groups,
    )
    launch(WeightOnlyGemm(replace(tile, routed_before=routed_before), output), arguments)
    return out
