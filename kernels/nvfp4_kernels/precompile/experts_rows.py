"""Kernels that route, permute and combine the tokens of an MoE layer. Imports no CuTe."""

from collections.abc import Iterator

from nvfp4_kernels.formats.terms import TermLayout
from nvfp4_kernels.moe.combine.choose import choose_config as choose_combine
from nvfp4_kernels.moe.dispatch.choose import (
    choose_fp8_rows,
    choose_gather,
    choose_rows,
    fuse_ids,
    fuse_logits,
)
from nvfp4_kernels.moe.route.choose import choose_config as choose_route
from nvfp4_kernels.moe.route.choose import mapped_experts
from nvfp4_kernels.moe.route.tile import Sizes
from nvfp4_kernels.precompile.experts_layer import Experts
from nvfp4_kernels.precompile.spec import KernelSpec

_ELEMENT_SIZE = 2  # of bfloat16 and float16
_DISPATCH = "nvfp4_kernels.moe.dispatch"
_ROUTE, _TOPK = "nvfp4_kernels.moe.route", "nvfp4_kernels.moe.topk"


def row_specs(
    experts: Experts, tokens: int, tile_tokens: int, sms: int
) -> Iterator[tuple[str, KernelSpec]]:
    """Kernels other than GEMMs for ``tokens`` tokens, with the part of the layer served first.

    Args:
        experts: the MoE layer.
        tokens: number of tokens, M.
        tile_tokens: rows of a token tile.
        sms: SMs of the GPU.
    """
    rows, threads = _rows(experts, tokens, tile_tokens, sms)
    slots, held = tokens * experts.top_k, experts.sizes.held
    mapped = mapped_experts(experts.mapped) if experts.mapped else 0
    sizes = Sizes(held, mapped, tile_tokens)
    choice, source = _choice(experts), None
    if choice is not None:
        shape, teams = (tokens, experts.top_k), experts.inputs == "static"
        tile = fuse_logits(shape, held, tile_tokens, threads, teams)
        if tile is None:
            yield "routing", KernelSpec("moe_topk", f"{_TOPK}.kernel:MoeTopk", (choice,))
        else:
            source = KernelSpec("", f"{_DISPATCH}.logits:TopkRoute", (choice, tile, sizes))
    if source is None:
        sort = fuse_ids(slots, held, tile_tokens, threads)
        if sort is None:
            fields = (choose_route(slots, held), sizes)
            yield "routing", KernelSpec("moe_route", f"{_ROUTE}.kernel:MoeRoute", fields)
            source = _given_tiles(tile_tokens)
        else:
            source = KernelSpec("", f"{_DISPATCH}.ids:CtaRoute", (sort, sizes))
    yield "tokens", _dispatch(source, rows)
    if experts.is_per_token:
        in_tiles, _ = _rows(experts, tokens, tile_tokens, sms, in_tiles=True)
        yield "w2", _dispatch(_given_tiles(tile_tokens), in_tiles)
    yield "sum", _combine(experts, tokens, sms)


def _dispatch(source: KernelSpec, rows: KernelSpec) -> KernelSpec:
    return KernelSpec("moe_dispatch", f"{_DISPATCH}.kernel:MoeDispatch", (source, rows))


def _given_tiles(tile_tokens: int) -> KernelSpec:
    return KernelSpec("", f"{_DISPATCH}.tokens:GivenTiles", (tile_tokens,))


def _choice(experts: Experts) -> KernelSpec | None:
    """Spec of the router top-k's configuration, or None."""
    if experts.choice is None:
        return None
    router, dtype, biased = experts.choice
    fields = (dtype, experts.sizes.total, router, biased)
    return KernelSpec("", f"{_TOPK}.choice:TokenChoice", fields)


def _rows(
    experts: Experts, tokens: int, tile_tokens: int, sms: int, *, in_tiles: bool = False
) -> tuple[KernelSpec, int]:
    """Spec of the layout of a token tile's rows, and threads per CTA.

    With ``in_tiles``, the rows are gemm2's inputs, already in token tiles; else tokens.
    """
    if experts.inputs == "16-bit":
        return _gathered(experts)
    per_token = experts.is_per_token
    k = experts.sizes.i if in_tiles else experts.sizes.h
    sizes = tokens * experts.top_k, k, _ELEMENT_SIZE, per_token, sms
    top_k = 0 if in_tiles else experts.top_k
    weighted = experts.weight_on_input and not in_tiles
    if experts.is_fp8:
        vectors = choose_fp8_rows(*sizes)
        spec = (experts.dtype, vectors, top_k, weighted, per_token)
        return KernelSpec("", f"{_DISPATCH}.gather:Fp8TokenRows", spec), vectors.threads
    tile = choose_rows(*sizes)
    layout = TermLayout.of(experts.terms, tile_tokens)
    fields = (experts.dtype, per_token, tile, tile_tokens, k, top_k, weighted, layout)
    return KernelSpec("", f"{_DISPATCH}.quantize:MoeRows", fields), tile.threads


def _gathered(experts: Experts) -> tuple[KernelSpec, int]:
    """Spec of the layout of a token tile's copied rows, and threads per CTA."""
    tile = choose_gather(experts.sizes.h)
    fields = (experts.dtype, tile, experts.top_k, experts.weight_on_input)
    return KernelSpec("", f"{_DISPATCH}.gather:GatheredRows", fields), tile.threads


def _combine(experts: Experts, tokens: int, sms: int) -> KernelSpec:
    tile = choose_combine(tokens, experts.sizes.h, _ELEMENT_SIZE, sms)
    weighted = not experts.weight_on_input
    fields = (experts.dtype, experts.dtype, experts.top_k, weighted, tile)
    return KernelSpec("moe_combine", "nvfp4_kernels.moe.combine.kernel:MoeCombine", fields)
