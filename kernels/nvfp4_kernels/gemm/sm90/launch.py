"""Launches of the weight-only GEMM on sm_90: ``gemm`` and ``silu_mul_gemm``."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_layout
from nvfp4_kernels.devices import dtype_name, multiprocessors
from nvfp4_kernels.formats.fragments import Fragments
from nvfp4_kernels.gemm.arguments import MAX_SHARDS
from nvfp4_kernels.gemm.shards import shard_ends
from nvfp4_kernels.gemm.sm90.choose import Problem, choose_batch_invariant, choose_config
from nvfp4_kernels.gemm.sm90.kernel import GemmArguments, WeightOnlyGemm
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig
from nvfp4_kernels.runtime.compile import launch


def gemm(
    a: Tensor,
    a_scales: None,
    b: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    shard_sizes: Sequence[int],
    row_scale: None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *,
    batch_invariant: bool = False,
) -> Tensor:
    """See ``nvfp4_kernels.gemm.op.gemm``; the weight is in fragments.

    ``batch_invariant``: see ``product``.
    """
    rows, n = a.flatten(0, -2), sum(shard_sizes)
    weights = [Fragments(b, b_scales)]
    out = product(rows, weights, alpha, shard_sizes, n, bias, out_dtype, batch_invariant)
    return out.view(*a.shape[:-1], n)


def silu_mul_gemm(
    a: Tensor,
    a_scales: None,
    b1: Tensor,
    b1_scales: Tensor,
    b2: Tensor,
    b2_scales: Tensor,
    alpha: Tensor,
    row_scale: None,
    n: int,
    out_global_scale: None,
    out_dtype: torch.dtype,
    *,
    batch_invariant: bool = False,
) -> tuple[Tensor, None]:
    """See ``nvfp4_kernels.gemm.silu_mul.op``; the weights are in fragments.

    ``batch_invariant``: see ``product``.
    """
    rows = a.flatten(0, -2)
    weights = [Fragments(b1, b1_scales), Fragments(b2, b2_scales)]
    out = product(rows, weights, alpha, [n], n, None, out_dtype, batch_invariant)
    return out.view(*a.shape[:-1], n), None


gemm_batch_invariant = partial(gemm, batch_invariant=True)
silu_mul_gemm_batch_invariant = partial(silu_mul_gemm, batch_invariant=True)


def product(
    a: Tensor,
    weights: Sequence[Fragments],
    alpha: Tensor,
    shard_sizes: Sequence[int],
    n: int,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    batch_invariant: bool = False,
) -> Tensor:
    """Check kernel-specific requirements, allocate the result, launch.

    Args:
        a: bfloat16 or float16 ``(M, K)``, K a multiple of 16.
        weights: one weight, or gate and up; already ``settled``.
        alpha: float32, one per shard, or one per weight of a pair.
        shard_sizes: shards of a single weight, adding up to ``n``.
        n: rows of each weight.
        bias: ``(n,)`` or None.
        out_dtype: bfloat16, float16 or float32.
        batch_invariant: whether the summation order of a row must not depend on M.

    Returns:
        ``(M, n)``.

    Raises:
        InvalidArgument: an operand that is not contiguous or not aligned, or too many shards.
    """
    m, k = a.shape
    named = {"a": a, "alpha": alpha, "bias": bias}
    for index, weight in enumerate(weights):
        name = "b" if len(weights) == 1 else f"b{index + 1}"
        named |= {name: weight.data, f"{name}_scales": weight.scales}
    for name, tensor in named.items():
        check_layout(name, tensor)
    if len(shard_sizes) > MAX_SHARDS:
        raise InvalidArgument(
            f"shard_sizes: {len(shard_sizes)} shards, must be at most {MAX_SHARDS} on sm_90; "
            "split the weight"
        )
    out = a.new_empty((m, n), dtype=out_dtype)
    if out.numel() == 0:
        return out
    if k == 0:
        raise InvalidArgument("a: K is 0, must be at least 16; there is nothing to multiply")
    output = replace(
        epilogue(a.dtype, out_dtype),
        shards=len(shard_sizes) if len(weights) == 1 else 1,
        bias=dtype_name(bias.dtype) if bias is not None else "",
    )
    sms = multiprocessors(a.device)
    choose = choose_batch_invariant if batch_invariant else choose_config
    kernel = WeightOnlyGemm(*choose(Problem(m, n, k, len(weights)), output, sms))
    first, last = weights[0], weights[-1]
    arguments = GemmArguments(
        x=a,
        w1=first.data,
        sfw1=first.scales,
        w2=last.data,
        sfw2=last.scales,
        out=out,
        alpha=alpha,
        bias=bias,
        m=m,
        n=n,
        k=k,
        sms=sms,
        shard_ends=shard_ends(shard_sizes),
    )
    launch(kernel, arguments)
    return out


def epilogue(act: torch.dtype, out: torch.dtype) -> EpilogueConfig:
    """Epilogue configuration for the dtypes of activations and result."""
    return EpilogueConfig(act=dtype_name(act), dtype=dtype_name(out))  # type: ignore[arg-type]
