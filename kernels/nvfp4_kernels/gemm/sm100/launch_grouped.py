"""Launches of the block-scaled GEMM on token tiles: ``grouped_gemm``, ``grouped_silu_mul_gemm``."""

from dataclasses import replace

from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.devices import device_facts, dtype_name
from nvfp4_kernels.formats.output import StaticFp8
from nvfp4_kernels.formats.terms import TermLayout
from nvfp4_kernels.gemm.arguments import check_layouts
from nvfp4_kernels.gemm.call import GroupedGemmCall
from nvfp4_kernels.gemm.shards import shard_ends
from nvfp4_kernels.gemm.sm100.choose import with_store
from nvfp4_kernels.gemm.sm100.choose_grouped import GroupedProblem, choose_grouped, grouped_tile
from nvfp4_kernels.gemm.sm100.kernel import BlockScaledGemm, GemmArguments
from nvfp4_kernels.gemm.sm100.launch import new_result
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig, Tile
from nvfp4_kernels.runtime.compile import launch
from nvfp4_kernels.sm100.limits import K_STEP


def grouped_gemm(
    call: GroupedGemmCall, *, tile: Tile | None = None
) -> tuple[Tensor, Tensor | None]:
    """Check kernel-specific requirements, allocate the result, launch.

    With pairs of weights and a gated activation this is also ``grouped_silu_mul_gemm``. Token
    tiles beyond ``groups[0]`` are neither read nor written.

    With ``routed_before`` the preceding launch has waited for the routing, see
    ``scheduler.prefetch_tile_count``. ``global_experts`` is unused: ``choose_grouped`` weighs
    several numbers of ranks.

    Args:
        call: arguments of the op.
        tile: tile to use, in its grouped form, instead of the chosen tile; must fit the problem.

    Returns:
        The result, and the blocked scales if NVFP4, else None.

    Raises:
        InvalidArgument: an operand that is not contiguous or not aligned, or a K that is not a
            positive multiple of 32.
    """
    a, b, bias = call.a, call.b, call.bias
    assert not isinstance(call.output, StaticFp8), "of folded weights, which sm_100 does not take"
    out_scale, out_terms = call.output or (None, 1)
    check_layouts(call, **{"output.global_scale": out_scale})
    n, k, tile_tokens, experts = call.rows, 2 * a.shape[-1], a.shape[-2], b.shape[0]
    if k == 0 or k % K_STEP:
        raise InvalidArgument(
            f"b: K is {k}, must be a positive multiple of {K_STEP} on sm_100, whose tensor maps "
            "have strides of 16 bytes; pad K of the weights with zeros at load, and a with it"
        )
    out, out_scales, dtype = new_result(call)
    if out.numel() == 0 or experts == 0:
        return out, out_scales
    output = EpilogueConfig(
        dtype,
        bias=dtype_name(bias.dtype) if bias is not None else "",
        row_scale=call.row_scale is not None,
        terms=TermLayout.of(out_terms, tile_tokens),
        activation=call.activation,
    )
    weights = call.alpha.numel() // experts
    problem = GroupedProblem(tile_tokens, n, k, a.shape[0], experts, weights, call.terms)
    facts = device_facts(a.device)
    if tile is None:
        tile, output = choose_grouped(problem, output, facts.sms)
    else:
        tile = grouped_tile(problem, tile)
        output = with_store(output, tile, n)
    tile = replace(tile, routed_before=call.routed_before)
    kernel = BlockScaledGemm(tile, output)
    arguments = GemmArguments(
        x=a,
        sfx=call.a_scales,
        w1=b,
        sfw1=call.b_scales,
        w2=None,
        sfw2=None,
        out=out,
        sf_out=out_scales,
        out_scale=out_scale,
        alpha=call.alpha,
        row_scale=call.row_scale,
        bias=bias,
        groups=call.groups,
        m=tile_tokens,
        n=n,
        k=k,
        batch=a.shape[0],
        weight_batch=experts * weights,
        clusters=facts.max_clusters(tile.cluster),
        defective_below=facts.defective_map_bytes,
        shard_ends=shard_ends([n]),
    )
    launch(kernel, arguments)
    return out, out_scales


# For pairs of weights it computes this op.
grouped_silu_mul_gemm = grouped_gemm
