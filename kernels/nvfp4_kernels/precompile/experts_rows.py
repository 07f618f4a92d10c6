"""Kernels that route, permute and combine the tokens of an MoE layer. No CuTe in here."""

from collections.abc import Iterator

from nvfp4_kernels.formats.terms import TermLayout
from nvfp4_kernels.moe.combine.choose import choose_config as choose_combine
from nvfp4_kernels.moe.quantize.choose import choose_config as choose_rows
from nvfp4_kernels.moe.quantize.choose import choose_gather
from nvfp4_kernels.moe.route.choose import choose_config as choose_route
from nvfp4_kernels.moe.route.choose import mapped_experts
from nvfp4_kernels.moe.route.tile import Sizes
from nvfp4_kernels.moe.route_quantize.choose import is_one_launch, row_capacity, sort_tile
from nvfp4_kernels.moe.topk_route.choose import choose_config as choose_topk
from nvfp4_kernels.precompile.experts_layer import Experts
from nvfp4_kernels.precompile.spec import KernelSpec

_ELEMENT_SIZE = 2  # of bfloat16 and float16
_QUANTIZE = "nvfp4_kernels.moe.quantize.sm100"
_GATHER = "nvfp4_kernels.moe.quantize.gather"
_ROUTE, _FUSED = "nvfp4_kernels.moe.route", "nvfp4_kernels.moe.route_quantize"
_TOPK, _TOPK_ROUTE = "nvfp4_kernels.moe.topk", "nvfp4_kernels.moe.topk_route"


def row_specs(
    experts: Experts, tokens: int, tile_tokens: int, sms: int
) -> Iterator[tuple[str, KernelSpec]]:
    """Kernels for a number of tokens, except the GEMMs, each with the part of the layer it serves.

    Args:
        experts: the MoE layer.
        tokens: number of tokens, M.
        tile_tokens: rows of a token tile.
        sms: SMs of the GPU.
    """
    gathers = experts.inputs == "16-bit"
    parts = _gathered(experts) if gathers else _quantized(experts, tokens, tile_tokens, sms)
    rows, threads = parts
    slots, held = tokens * experts.top_k, experts.sizes.held
    mapped = mapped_experts(experts.mapped) if experts.mapped else 0
    sizes = Sizes(held, mapped, tile_tokens)
    choice = _choice(experts)
    tile = None
    if choice is not None:
        teams = experts.inputs == "static"
        tile = choose_topk(tokens, experts.top_k, held, tile_tokens, threads, teams)
        if tile is None:
            yield "routing", KernelSpec("moe_topk", f"{_TOPK}.kernel:MoeTopk", (choice,))
    if tile is not None:
        route = KernelSpec("", f"{_TOPK_ROUTE}.route:TopkRoute", (choice, tile, sizes))
        target = "gather:MoeTopkRouteGather" if gathers else "sm100:MoeTopkRouteQuantizeSm100"
        yield (
            "tokens",
            KernelSpec("moe_topk_route_quantize", f"{_TOPK_ROUTE}.{target}", (route, rows)),
        )
    elif is_one_launch(slots, tile_tokens, threads):
        place = sort_tile(slots, threads), sizes, row_capacity(slots, held, tile_tokens)
        route = KernelSpec("", f"{_FUSED}.route:CtaRoute", place)
        target = "gather:MoeRouteGather" if gathers else "sm100:MoeRouteQuantizeSm100"
        yield "tokens", KernelSpec("moe_route_quantize", f"{_FUSED}.{target}", (route, rows))
    else:
        fields = (choose_route(slots, held), sizes)
        yield "routing", KernelSpec("moe_route", f"{_ROUTE}.kernel:MoeRoute", fields)
        if gathers:
            copied = (rows, tile_tokens)
            yield "tokens", KernelSpec("moe_gather", f"{_GATHER}:MoeGather", copied)
        else:
            yield "tokens", KernelSpec("moe_quantize", f"{_QUANTIZE}:MoeQuantizeSm100", (rows,))
    if experts.inputs == "per-token":
        in_tiles, _ = _quantized(experts, tokens, tile_tokens, sms, in_tiles=True)
        yield "w2", KernelSpec("moe_quantize", f"{_QUANTIZE}:MoeQuantizeSm100", (in_tiles,))
    yield "sum", _combine(experts, tokens, sms)


def _choice(experts: Experts) -> KernelSpec | None:
    """Spec of the router top-k's configuration, or None."""
    if experts.choice is None:
        return None
    router, dtype, biased = experts.choice
    fields = (dtype, experts.sizes.total, router, biased)
    return KernelSpec("", f"{_TOPK}.choice:TokenChoice", fields)


def _quantized(
    experts: Experts, tokens: int, tile_tokens: int, sms: int, *, in_tiles: bool = False
) -> tuple[KernelSpec, int]:
    """Spec of the layout of a token tile's quantised rows, and threads per CTA."""
    per_token = experts.inputs == "per-token"
    k = experts.sizes.i if in_tiles else experts.sizes.h
    tile = choose_rows(tokens * experts.top_k, k, _ELEMENT_SIZE, per_token, sms)
    top_k = 0 if in_tiles else experts.top_k
    weighted = experts.weight_on_input and not in_tiles
    layout = TermLayout.of(experts.terms, tile_tokens)
    fields = (experts.dtype, per_token, tile, tile_tokens, k, top_k, weighted, layout)
    return KernelSpec("", f"{_QUANTIZE}:MoeRows", fields), tile.threads


def _gathered(experts: Experts) -> tuple[KernelSpec, int]:
    """Spec of the layout of a token tile's copied rows, and threads per CTA."""
    tile = choose_gather(experts.sizes.h * _ELEMENT_SIZE)
    fields = (experts.dtype, tile, experts.top_k, experts.weight_on_input)
    return KernelSpec("", f"{_GATHER}:GatheredRows", fields), tile.threads


def _combine(experts: Experts, tokens: int, sms: int) -> KernelSpec:
    tile = choose_combine(tokens, experts.sizes.h, _ELEMENT_SIZE, sms)
    weighted = not experts.weight_on_input
    fields = (experts.dtype, experts.dtype, experts.top_k, weighted, tile)
    return KernelSpec("moe_combine", "nvfp4_kernels.moe.combine.kernel:MoeCombine", fields)
