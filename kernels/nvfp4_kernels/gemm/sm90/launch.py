"""Launches of the GEMM on sm_90: ``gemm`` and ``silu_mul_gemm``."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.devices import device_facts, dtype_name
from nvfp4_kernels.formats.fp8_rows import padded
from nvfp4_kernels.formats.output import StaticFp8
from nvfp4_kernels.gemm.arguments import check_layouts, check_number_of_shards
from nvfp4_kernels.gemm.call import AnyCall, ProductCall
from nvfp4_kernels.gemm.shards import shard_ends
from nvfp4_kernels.gemm.sm90 import choose_fp8
from nvfp4_kernels.gemm.sm90.choose import Problem, choose_batch_invariant, choose_config
from nvfp4_kernels.gemm.sm90.kernel import GemmArguments, WeightOnlyGemm
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig
from nvfp4_kernels.runtime.compile import launch


def gemm(call: ProductCall, *, batch_invariant: bool = False) -> tuple[Tensor, None]:
    """Check kernel-specific requirements, allocate the result, launch.

    Weights are in fragments or, with E4M3 activations, folded. With a pair of weights this is also
    ``silu_mul_gemm``.

    Args:
        call: arguments of the op.
        batch_invariant: whether the summation order of a row must not depend on M.

    Returns:
        The result, and None for scales: sm_90 has no NVFP4 results.

    Raises:
        InvalidArgument: an operand that is not contiguous or not aligned, too many shards, or
            K = 0.
    """
    a, weights, bias, n = call.a.flatten(0, -2), call.weights, call.bias, call.rows
    m, k = a.shape
    check_layouts(call, a=a)
    check_number_of_shards(call.shard_sizes, "sm_90")
    out = new_result(call, (m, n))
    shape = (*call.a.shape[:-1], out.shape[-1])
    if out.numel() == 0:
        return out.view(shape), None
    if k == 0:
        raise InvalidArgument("a: K is 0, must be at least 16; there is nothing to multiply")
    output = replace(
        epilogue(call, out),
        shards=1 if is_fp8(a) else len(call.shard_sizes),
        bias=dtype_name(bias.dtype) if bias is not None else "",
    )
    sms = device_facts(a.device).sms
    choose = choose_batch_invariant if batch_invariant else choose_config
    if is_fp8(a):
        choose = choose_fp8.choose_batch_invariant if batch_invariant else choose_fp8.choose_config
    kernel = WeightOnlyGemm(*choose(Problem(m, n, k, len(weights)), output, sms))
    (w1, sfw1), (w2, sfw2) = weights[0], weights[-1]
    arguments = GemmArguments(
        x=a,
        w1=w1,
        sfw1=sfw1,
        w2=w2,
        sfw2=sfw2,
        out=out,
        alpha=call.alpha,
        row_scale=call.row_scale,
        bias=bias,
        out_scale=out_scale(call),
        m=m,
        n=n,
        k=k,
        sms=sms,
        shard_ends=shard_ends(call.shard_sizes),
    )
    launch(kernel, arguments)
    return out.view(shape), None


# With a pair of weights it computes this op.
silu_mul_gemm = gemm
gemm_batch_invariant = silu_mul_gemm_batch_invariant = partial(gemm, batch_invariant=True)


def is_fp8(a: Tensor) -> bool:
    """Whether activations are E4M3."""
    return a.dtype == torch.float8_e4m3fn


def epilogue(call: AnyCall, out: Tensor) -> EpilogueConfig:
    """Epilogue configuration for a call with the result ``out``."""
    act, dtype = (dtype_name(each.dtype) for each in (call.a, out))
    per_token = call.row_scale is not None
    return EpilogueConfig(act=act, dtype=dtype, per_token=per_token)  # type: ignore[arg-type]


def new_result(call: AnyCall, shape: tuple[int, ...]) -> Tensor:
    """Allocate a result ``(..., N)``, its last dimension padded if E4M3."""
    if call.output is None:
        return call.a.new_empty(shape, dtype=call.out_dtype)
    assert isinstance(call.output, StaticFp8), "NVFP4 results take blocked weights"
    return call.a.new_empty((*shape[:-1], padded(shape[-1])), dtype=torch.float8_e4m3fn)


def out_scale(call: AnyCall) -> Tensor | None:
    """Scale of an E4M3 result, or None."""
    return call.output.scale if isinstance(call.output, StaticFp8) else None
