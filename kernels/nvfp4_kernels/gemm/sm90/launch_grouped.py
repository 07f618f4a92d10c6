"""Launches of the GEMM on sm_90: ``grouped_gemm`` and ``grouped_silu_mul_gemm``."""

from dataclasses import replace
from functools import partial

from torch import Tensor

from nvfp4_kernels.devices import device_facts, dtype_name
from nvfp4_kernels.gemm.arguments import check_layouts
from nvfp4_kernels.gemm.call import GroupedGemmCall
from nvfp4_kernels.gemm.shards import shard_ends
from nvfp4_kernels.gemm.sm90.choose_fp8 import choose_grouped_config as choose_grouped_fp8_config
from nvfp4_kernels.gemm.sm90.choose_grouped import GroupedProblem, choose_grouped_config
from nvfp4_kernels.gemm.sm90.kernel import GemmArguments, WeightOnlyGemm
from nvfp4_kernels.gemm.sm90.launch import epilogue, is_fp8, new_result, out_scale
from nvfp4_kernels.runtime.compile import launch


def grouped_gemm(call: GroupedGemmCall, *, gated: bool = False) -> tuple[Tensor, None]:
    """Check kernel-specific requirements, allocate the result, launch.

    Weights are in fragments or, with E4M3 activations, folded.

    Args:
        call: arguments of the op.
        gated: whether experts have pairs of weights: the op is ``grouped_silu_mul_gemm``.

    Returns:
        The result, and None for scales: sm_90 has no NVFP4 results.

    Raises:
        InvalidArgument: an operand that is not contiguous or not aligned.
    """
    a, alpha, bias, n = call.a, call.alpha, call.bias, call.rows
    check_layouts(call)
    (tiles, tokens, k), experts = a.shape, alpha.shape[0]
    out = new_result(call, (tiles, tokens, n))
    if out.numel() == 0 or experts == 0:
        return out, None
    output = replace(
        epilogue(call, out),
        bias=dtype_name(bias.dtype) if bias is not None else "",
        activation=call.activation,
    )
    weights = 2 if gated else 1
    problem = GroupedProblem(tiles, tokens, experts, n, k, weights, call.global_experts)
    sms = device_facts(a.device).sms
    choose = choose_grouped_fp8_config if is_fp8(a) else choose_grouped_config
    tile, output = choose(problem, output, sms)
    arguments = GemmArguments(
        x=a,
        w1=call.b,
        sfw1=call.b_scales,
        w2=None,
        sfw2=None,
        out=out,
        alpha=alpha,
        row_scale=call.row_scale,
        bias=bias,
        out_scale=out_scale(call),
        m=tiles * tokens,
        n=n,
        k=k,
        sms=sms,
        shard_ends=shard_ends([n]),
        groups=call.groups,
    )
    launch(WeightOnlyGemm(replace(tile, routed_before=call.routed_before), output), arguments)
    return out, None


grouped_silu_mul_gemm = partial(grouped_gemm, gated=True)
