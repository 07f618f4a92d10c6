"""Launches of the block-scaled GEMM on sm_100: ``gemm`` and ``silu_mul_gemm``."""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.devices import device_facts, dtype_name
from nvfp4_kernels.formats.output import Static, StaticFp8
from nvfp4_kernels.formats.terms import TermLayout
from nvfp4_kernels.gemm.arguments import (
    batch_of,
    check_layouts,
    check_number_of_shards,
    quantized_result,
)
from nvfp4_kernels.gemm.call import AnyCall, ProductCall
from nvfp4_kernels.gemm.shards import shard_ends
from nvfp4_kernels.gemm.sm100.choose import (
    Problem,
    choose_batch_invariant,
    choose_config,
    with_store,
)
from nvfp4_kernels.gemm.sm100.kernel import BlockScaledGemm, GemmArguments
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig, OutDtype, Tile
from nvfp4_kernels.runtime.compile import launch
from nvfp4_kernels.sm100.limits import K_STEP


def gemm(
    call: ProductCall, *, tile: Tile | None = None, batch_invariant: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Check kernel-specific requirements, allocate the result, launch.

    With a pair of weights this is also ``silu_mul_gemm``.

    Args:
        call: arguments of the op.
        tile: tile to use instead of the chosen tile; must fit the problem.
        batch_invariant: whether to use the same tile for any M.

    Returns:
        The result, and the blocked scales if NVFP4, else None.

    Raises:
        InvalidArgument: an operand that is not contiguous or not aligned, too many shards, K = 0,
            or, with ``batch_invariant``, several terms, as the layout of terms depends on M.
    """
    data, weights, bias, terms = call.a, call.weights, call.bias, call.terms
    assert not isinstance(call.output, StaticFp8), "of folded weights, which sm_100 does not take"
    out_terms = 1 if call.output is None else call.output.terms
    m, n, k = data.shape[-2], call.rows, 2 * data.shape[-1]
    batch = math.prod(batch_of(data, terms))
    check_layouts(call)
    check_number_of_shards(call.shard_sizes, "sm_100")
    if batch_invariant and max(terms, out_terms) > 1:
        raise InvalidArgument(
            f"terms: are {terms} and {out_terms}, must be 1 of a batch-invariant product on "
            "sm_100; serve W4A4 without activation_terms"
        )
    out, out_scales, dtype = new_result(call)
    if out.numel() == 0:
        return out, out_scales
    if k == 0:
        raise InvalidArgument("a: K is 0, must be at least 16; there is nothing to multiply")

    output = EpilogueConfig(
        dtype,
        shards=len(call.shard_sizes),
        bias=dtype_name(bias.dtype) if bias is not None else "",
        row_scale=call.row_scale is not None,
        terms=TermLayout.of(out_terms, m),
    )
    problem = Problem(m, n, k, batch, len(weights), terms)
    facts = device_facts(data.device)
    if batch_invariant:
        kernel = BlockScaledGemm(*choose_batch_invariant(problem, output, facts.sms))
    elif tile is None:
        kernel = BlockScaledGemm(*choose_config(problem, output, facts.sms))
    else:
        tile = replace(tile, terms=TermLayout.of(terms, m))
        kernel = BlockScaledGemm(tile, with_store(output, tile, n))
    # A weight may be padded already.
    row = (k + -k % K_STEP) // 2
    x, w1, w2 = (
        t if t.shape[-1] == row else torch.nn.functional.pad(t, (0, row - t.shape[-1]))
        for t in (data, weights[0][0], weights[-1][0])
    )
    arguments = GemmArguments(
        x=x,
        sfx=call.a_scales,
        w1=w1,
        sfw1=weights[0][1],
        w2=w2,
        sfw2=weights[-1][1],
        out=out,
        sf_out=out_scales,
        out_scale=None if call.output is None else call.output.global_scale,
        alpha=call.alpha,
        row_scale=call.row_scale,
        bias=bias,
        groups=None,
        m=m,
        n=n,
        k=2 * row,
        batch=batch,
        weight_batch=math.prod(weights[0][0].shape[:-2]),
        clusters=facts.max_clusters(kernel.tile.cluster),
        defective_below=facts.defective_map_bytes,
        shard_ends=shard_ends(call.shard_sizes),
    )
    launch(kernel, arguments)
    return out, out_scales


# With a pair of weights it computes this op.
silu_mul_gemm = gemm
gemm_batch_invariant = silu_mul_gemm_batch_invariant = partial(gemm, batch_invariant=True)


def new_result(call: AnyCall) -> tuple[Tensor, Tensor | None, OutDtype]:
    """Allocate a result and, if NVFP4, blocked scales (else None); also return its ``OutDtype``."""
    a, n = call.a, call.rows
    if isinstance(call.output, Static):
        return *quantized_result(a, n, call.terms, call.output.terms), "nvfp4"
    out = a.new_empty((*batch_of(a, call.terms), a.shape[-2], n), dtype=call.out_dtype)
    return out, None, dtype_name(call.out_dtype)  # type: ignore[return-value]
