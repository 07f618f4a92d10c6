"""Launches of the block-scaled GEMM on sm_100: ``gemm``, ``gemm_quantized``, ``silu_mul_gemm``."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_layout
from nvfp4_kernels.devices import defective_map_bytes, dtype_name, max_clusters, multiprocessors
from nvfp4_kernels.formats.terms import TermLayout
from nvfp4_kernels.gemm.arguments import MAX_SHARDS, batch_of, quantized_result
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
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    shard_sizes: Sequence[int],
    row_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    terms: int = 1,
    *,
    batch_invariant: bool = False,
) -> Tensor:
    """See ``nvfp4_kernels.gemm.op.gemm``; ``batch_invariant``: see ``product``."""
    weights = [(b, b_scales)]
    out, _ = product(
        (a, a_scales), weights, alpha, shard_sizes, row_scale, bias, out_dtype, terms=terms,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    return out


def gemm_quantized(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    shard_sizes: Sequence[int],
    row_scale: Tensor | None,
    bias: Tensor | None,
    out_global_scale: Tensor,
    terms: int = 1,
    out_terms: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """See ``nvfp4_kernels.gemm.op.gemm_quantized``."""
    weights = [(b, b_scales)]
    return product(
        (a, a_scales), weights, alpha, shard_sizes, row_scale, bias, torch.float32,
        out_global_scale, terms=terms, out_terms=out_terms,
    )  # fmt: skip


def silu_mul_gemm(
    a: Tensor,
    a_scales: Tensor,
    b1: Tensor,
    b1_scales: Tensor,
    b2: Tensor,
    b2_scales: Tensor,
    alpha: Tensor,
    row_scale: Tensor | None,
    n: int,
    out_global_scale: Tensor | None,
    out_dtype: torch.dtype,
    terms: int = 1,
    out_terms: int = 1,
    *,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """See ``nvfp4_kernels.gemm.silu_mul.op``; the second result is None for 16-bit output.

    ``batch_invariant``: see ``product``.
    """
    weights = [(b1, b1_scales), (b2, b2_scales)]
    return product(
        (a, a_scales), weights, alpha, [n], row_scale, None, out_dtype, out_global_scale,
        terms=terms, out_terms=out_terms, batch_invariant=batch_invariant,
    )  # fmt: skip


gemm_batch_invariant = partial(gemm, batch_invariant=True)
silu_mul_gemm_batch_invariant = partial(silu_mul_gemm, batch_invariant=True)


def product(
    tokens: tuple[Tensor, Tensor],
    weights: Sequence[tuple[Tensor, Tensor]],
    alpha: Tensor,
    shard_sizes: Sequence[int],
    row_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out_global_scale: Tensor | None = None,
    tile: Tile | None = None,
    terms: int = 1,
    out_terms: int = 1,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Check kernel-specific requirements, allocate the result, launch.

    ``tokens``: data and blocked scales of the activations ``(..., M, K/2)``; ``weights``: data and
    scales of one weight, or of gate and up. ``out_global_scale``, float32 ``()``: global scale of a
    quantised result of ``out_terms`` terms. ``tile``: overrides the choice; must fit.
    ``batch_invariant``: one tile for any M. Other arguments as for ``gemm``.

    Returns:
        The result, and the blocked scales if quantised.

    Raises:
        InvalidArgument: an operand that is not contiguous or not aligned, too many shards, or, with
            ``batch_invariant``, several terms, as their layout depends on M.
    """
    data, scales = tokens
    m, packed = data.shape[-2:]
    batch_shape = batch_of(data, terms)
    n, k, batch = weights[0][0].shape[-2], 2 * packed, math.prod(batch_shape)
    named = {"a": data, "a_scales": scales, "alpha": alpha, "row_scale": row_scale, "bias": bias}
    for index, (weight, weight_scales) in enumerate(weights):
        name = "b" if len(weights) == 1 else f"b{index + 1}"
        named |= {name: weight, f"{name}_scales": weight_scales}
    for name, tensor in named.items():
        check_layout(name, tensor)
    if len(shard_sizes) > MAX_SHARDS:
        raise InvalidArgument(
            f"shard_sizes: {len(shard_sizes)} shards, must be at most {MAX_SHARDS} on sm_100; "
            "split the weight"
        )
    if batch_invariant and max(terms, out_terms) > 1:
        raise InvalidArgument(
            f"terms: are {terms} and {out_terms}, must be 1 of a batch-invariant product on "
            "sm_100; serve W4A4 without activation_terms"
        )
    out, out_scales, dtype = new_result(data, n, out_global_scale, out_dtype, terms, out_terms)
    if out.numel() == 0:
        return out, out_scales
    if k == 0:
        raise InvalidArgument("a: K is 0, must be at least 16; there is nothing to multiply")

    output = EpilogueConfig(
        dtype,
        shards=len(shard_sizes) if len(weights) == 1 else 1,
        bias=dtype_name(bias.dtype) if bias is not None else "",
        row_scale=row_scale is not None,
        terms=TermLayout.of(out_terms, m),
    )
    problem = Problem(m, n, k, batch, len(weights), terms)
    sms = multiprocessors(data.device)
    if batch_invariant:
        kernel = BlockScaledGemm(*choose_batch_invariant(problem, output, sms))
    elif tile is None:
        kernel = BlockScaledGemm(*choose_config(problem, output, sms))
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
        sfx=scales,
        w1=w1,
        sfw1=weights[0][1],
        w2=w2,
        sfw2=weights[-1][1],
        out=out,
        sf_out=out_scales,
        out_scale=out_global_scale,
        alpha=alpha,
        row_scale=row_scale,
        bias=bias,
        groups=None,
        m=m,
        n=n,
        k=2 * row,
        batch=batch,
        weight_batch=math.prod(weights[0][0].shape[:-2]),
        clusters=max_clusters(data.device, kernel.tile.cluster),
        defective_below=defective_map_bytes(data.device),
        shard_ends=shard_ends(shard_sizes),
    )
    launch(kernel, arguments)
    return out, out_scales


def new_result(
    data: Tensor,
    n: int,
    out_global_scale: Tensor | None,
    out_dtype: torch.dtype,
    terms: int,
    out_terms: int,
) -> tuple[Tensor, Tensor | None, OutDtype]:
    """Memory for a result of ``n`` columns, blocked scales or None, and the ``Output``.

    ``data``: the activations, of ``terms`` terms.
    """
    if out_global_scale is not None:
        return *quantized_result(data, n, terms, out_terms), "nvfp4"
    out = data.new_empty((*batch_of(data, terms), data.shape[-2], n), dtype=out_dtype)
    return out, None, dtype_name(out_dtype)  # type: ignore[return-value]
