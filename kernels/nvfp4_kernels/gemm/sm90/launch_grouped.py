"""Launches of the weight-only GEMM on sm_90: ``grouped_gemm`` and ``grouped_silu_mul_gemm``."""

from dataclasses import replace

from torch import Tensor

from nvfp4_kernels.devices import device_facts, dtype_name
from nvfp4_kernels.gemm.arguments import check_layouts
from nvfp4_kernels.gemm.call import GroupedGemmCall
from nvfp4_kernels.gemm.shards import shard_ends
from nvfp4_kernels.gemm.sm90.choose_grouped import GroupedProblem, choose_grouped_config
from nvfp4_kernels.gemm.sm90.kernel import GemmArguments, WeightOnlyGemm
from nvfp4_kernels.gemm.sm90.launch import epilogue
from nvfp4_kernels.runtime.compile import launch


def grouped_gemm(call: GroupedGemmCall) -> tuple[Tensor, None]:
    """Check kernel-specific requirements, allocate the result, launch; weights are in fragments.

    With pairs of weights and a gated activation this is also ``grouped_silu_mul_gemm``.

    Returns:
        The result, and None for scales: sm_90 has no NVFP4 results.

    Raises:
        InvalidArgument: an operand that is not contiguous or not aligned.
    """
    a, alpha, bias, n = call.a, call.alpha, call.bias, call.rows
    check_layouts(call)
    (tiles, tokens, k), experts = a.shape, alpha.shape[0]
    out = a.new_empty((tiles, tokens, n), dtype=call.out_dtype)
    if out.numel() == 0 or experts == 0:
        return out, None
    output = replace(
        epilogue(a.dtype, call.out_dtype),
        bias=dtype_name(bias.dtype) if bias is not None else "",
        activation=call.activation,
    )
    problem = GroupedProblem(tiles, tokens, experts, n, k, alpha[0].numel(), call.global_experts)
    sms = device_facts(a.device).sms
    tile, output = choose_grouped_config(problem, output, sms)
    arguments = GemmArguments(
        x=a,
        w1=call.b,
        sfw1=call.b_scales,
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
        groups=call.groups,
    )
    launch(WeightOnlyGemm(replace(tile, routed_before=call.routed_before), output), arguments)
    return out, None


# For pairs of weights it computes this op.
grouped_silu_mul_gemm = grouped_gemm
