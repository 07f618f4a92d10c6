"""Launches of the block-scaled GEMM on token tiles: ``grouped_gemm``, ``grouped_silu_mul_gemm``."""

from dataclasses import replace

import torch
from torch import Tensor

from nvfp4_kernels.activation import Activation
from nvfp4_kernels.checks import InvalidArgument, check_layout
from nvfp4_kernels.devices import defective_map_bytes, dtype_name, max_clusters, multiprocessors
from nvfp4_kernels.formats.terms import TermLayout
from nvfp4_kernels.gemm.shards import shard_ends
from nvfp4_kernels.gemm.sm100.choose import with_store
from nvfp4_kernels.gemm.sm100.choose_grouped import GroupedProblem, choose_grouped, grouped_tile
from nvfp4_kernels.gemm.sm100.kernel import BlockScaledGemm, GemmArguments
from nvfp4_kernels.gemm.sm100.launch import new_result
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig, Tile
from nvfp4_kernels.runtime.compile import launch
from nvfp4_kernels.sm100.limits import K_STEP


def grouped_gemm(
    a: Tensor,
    a_scales: Tensor,
    groups: Tensor,
    b: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    row_scale: Tensor | None,
    n: int,
    out_global_scale: Tensor | None,
    activation: Activation | None,
    out_dtype: torch.dtype,
    terms: int = 1,
    out_terms: int = 1,
    routed_before: bool = False,
    bias: Tensor | None = None,
    global_experts: int | None = None,
    given: Tile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See ``nvfp4_kernels.gemm.grouped.op``; the second result is None for 16-bit output.

    ``b`` and ``alpha`` may be gate and up, ``(experts, 2, N, K/2)``, with a gated ``activation``:
    this is also ``grouped_silu_mul_gemm``. Tiles beyond ``groups[0]`` are not touched.

    ``routed_before``: the preceding launch is a GEMM of the same routing and has waited for the
    routing, see ``scheduler.counting``. Weights are then loaded while that GEMM ends.

    ``global_experts``, of all ranks, is unused: ``choose_grouped`` weighs one or more ranks.

    ``given``: a tile that overrides the choice; must fit.

    Raises:
        InvalidArgument: an operand that is not contiguous or not aligned, or an unpadded K.
    """
    named = {
        "a": a, "a_scales": a_scales, "groups": groups, "b": b, "b_scales": b_scales,
        "alpha": alpha, "row_scale": row_scale, "out_global_scale": out_global_scale, "bias": bias,
    }  # fmt: skip
    for name, tensor in named.items():
        check_layout(name, tensor)
    k, tile_tokens, experts = 2 * a.shape[-1], a.shape[-2], b.shape[0]
    if k == 0 or k % K_STEP:
        raise InvalidArgument(
            f"b: K is {k}, must be a positive multiple of {K_STEP} on sm_100, whose tensor maps "
            "have strides of 16 bytes; pad K of the weights with zeros at load, and a with it"
        )
    out, out_scales, dtype = new_result(a, n, out_global_scale, out_dtype, terms, out_terms)
    if out.numel() == 0 or experts == 0:
        return out, out_scales
    output = EpilogueConfig(
        dtype,
        bias=dtype_name(bias.dtype) if bias is not None else "",
        row_scale=row_scale is not None,
        terms=TermLayout.of(out_terms, tile_tokens),
        activation=activation,
    )
    weights = alpha.numel() // experts
    problem = GroupedProblem(tile_tokens, n, k, a.shape[0], experts, weights, terms)
    if given is None:
        tile, output = choose_grouped(problem, output, multiprocessors(a.device))
    else:
        tile = grouped_tile(problem, given)
        output = with_store(output, tile, n)
    tile = replace(tile, routed_before=routed_before)
    kernel = BlockScaledGemm(tile, output)
    arguments = GemmArguments(
        x=a,
        sfx=a_scales,
        w1=b,
        sfw1=b_scales,
        w2=None,
        sfw2=None,
        out=out,
        sf_out=out_scales,
        out_scale=out_global_scale,
        alpha=alpha,
        row_scale=row_scale,
        bias=bias,
        groups=groups,
        m=tile_tokens,
        n=n,
        k=k,
        batch=a.shape[0],
        weight_batch=experts * weights,
        clusters=max_clusters(a.device, tile.cluster),
        defective_below=defective_map_bytes(a.device),
        shard_ends=shard_ends([n]),
    )
    launch(kernel, arguments)
    return out, out_scales


# For pairs of weights it computes this op.
grouped_silu_mul_gemm = grouped_gemm
